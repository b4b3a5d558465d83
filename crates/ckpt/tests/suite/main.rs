//! Checkpoints and Hugging Face folders, held against what transformers wrote in `fixtures/pytorch`.

mod checkpoints;
mod crashes;
mod exports;
mod flips;
mod imports;
mod state;
mod support;
