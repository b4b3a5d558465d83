//! Report of the GPU of a device, its driver and libraries, with versions and files.

use std::path::PathBuf;

use lockstep_cuda::driver::dotted;

use super::Cuda;

/// A GPU and the libraries that are used with it.
#[derive(Clone, Debug)]
pub struct CudaReport {
    pub gpu: String,
    pub index: usize,
    /// Compute capability, e.g. 9.0.
    pub capability: String,
    pub total_bytes: usize,
    pub multiprocessors: usize,
    pub libraries: Vec<CudaLibrary>,
}

/// A library that was loaded, or why it was not.
#[derive(Clone, Debug)]
pub struct CudaLibrary {
    pub name: &'static str,
    pub version: String,
    pub path: PathBuf,
}

impl Cuda {
    pub fn report(&self) -> CudaReport {
        let context = &self.context;
        let library =
            |name, version, path: &PathBuf| CudaLibrary { name, version, path: path.clone() };
        let driver = &context.driver;
        let mut libraries = vec![
            library("driver", format!("CUDA {}", dotted(driver.version)), &driver.library.path),
            library("NVRTC", self.kernels.nvrtc().version(), &self.kernels.nvrtc().library.path),
            library("cuBLASLt", cublas_version(self.blaslt.version), &self.blaslt.library.path),
        ];
        if let Some(dnn) = &self.dnn {
            libraries.push(library("cuDNN", cudnn_version(dnn.version()), &dnn.library.path));
        }
        CudaReport {
            gpu: context.name.clone(),
            index: context.index,
            capability: format!("{}.{}", context.capability.0, context.capability.1),
            total_bytes: context.total_bytes,
            multiprocessors: context.multiprocessors,
            libraries,
        }
    }
}

/// 130002 is 13.0.2, and 120900 is 12.9.0.
fn cublas_version(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// 91900 is 9.19.0.
fn cudnn_version(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
