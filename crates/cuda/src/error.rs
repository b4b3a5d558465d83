//! Errors of the CUDA backend.

use std::fmt;

/// Why a CUDA device cannot be used. The message names the file and the version, and says what to install or change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError(String);

impl CudaError {
    pub fn new(message: impl Into<String>) -> CudaError {
        CudaError(message.into())
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CudaError {}

pub type Result<T> = std::result::Result<T, CudaError>;
