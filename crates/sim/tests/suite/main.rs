//! Predictions against published measurements, formulas against walks, and the vocabulary.

mod calibrations;
mod clocks;
mod clusters;
mod errors;
mod memories;
mod operations;
mod plans;
mod reports;
mod searches;
mod tables;
mod times;
