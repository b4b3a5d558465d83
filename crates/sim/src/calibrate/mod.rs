//! Fits a cluster description to measurements. Measures nothing itself.

mod fit;
mod least;
mod scale;

pub use fit::{Fitted, MeasuredMatmul, MeasuredStep, RankSkew, fit};
pub use scale::calibrate;
