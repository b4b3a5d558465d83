//! `lockstep train`, `generate` and `bench step` as their users run them: the real binary, small run files.

mod desk;
mod runs;
mod steps;
mod troubles;
mod weights;
