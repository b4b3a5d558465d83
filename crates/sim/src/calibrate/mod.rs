//! Fits a cluster description to measurements. Measures nothing itself.

mod fit;
mod gpu;
mod least;
mod scale;

pub use fit::{Fitted, MeasuredMatmul, MeasuredStep, RankSkew, fit};
pub use gpu::{GpuMeasurement, MeasuredAttention, fit_gpu};
pub use scale::calibrate;
