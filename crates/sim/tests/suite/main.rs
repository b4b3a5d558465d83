//! Predictions compared with published measurements, and formulas with simulations.

mod calibrations;
mod clocks;
mod clusters;
mod errors;
mod gpus;
mod memories;
mod operations;
mod plans;
mod reports;
mod searches;
mod tables;
mod times;
