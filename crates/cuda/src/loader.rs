//! Finds and loads the shared libraries of CUDA at run time, so that neither building nor running on CPUs needs them.
//!
//! Folders are searched in this order:
//! 1. `LOCKSTEP_CUDA_PATH`, a list of folders separated by colons
//! 2. pip wheels: `nvidia/*/lib` in the site-packages of `VIRTUAL_ENV`, `CONDA_PREFIX` and the `python3` on the PATH
//! 3. the toolkit: `CUDA_HOME`, `CUDA_PATH` and `/usr/local/cuda`
//! 4. the system's own search path, which includes `LD_LIBRARY_PATH`
//!
//! Only exact sonames are tried: `libX.so` without a version may be an older copy.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::error::{CudaError, Result};

/// Lists the folders to search before all others.
pub const PATH_VARIABLE: &str = "LOCKSTEP_CUDA_PATH";

/// A library, and the names and packages to look for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub name: &'static str,
    /// The accepted sonames, best first.
    pub sonames: &'static [&'static str],
    /// How to install it.
    pub install: &'static str,
}

pub const DRIVER: Wanted = Wanted {
    name: "the CUDA driver",
    sonames: &["libcuda.so.1"],
    install: "install the NVIDIA driver, version 525 or newer",
};

pub const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    sonames: &["libnvrtc.so.13", "libnvrtc.so.12"],
    install: "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit",
};

pub const CUBLASLT: Wanted = Wanted {
    name: "cuBLASLt",
    sonames: &["libcublasLt.so.13", "libcublasLt.so.12"],
    install: "pip install nvidia-cublas, or install the CUDA toolkit",
};

pub const CUDNN: Wanted =
    Wanted { name: "cuDNN", sonames: &["libcudnn.so.9"], install: "pip install nvidia-cudnn-cu13" };

/// A loaded library. It stays loaded until the process ends.
#[derive(Clone, Debug)]
pub struct Library {
    handle: &'static libloading::Library,
    name: &'static str,
    /// The file, or the soname where the system's search path found it.
    pub path: PathBuf,
}

impl Library {
    /// Loads the first match in the documented order.
    pub fn open(wanted: &Wanted) -> Result<Library> {
        let mut failures = Vec::new();
        for path in candidates(wanted, &folders()) {
            match load(&path) {
                Ok(handle) => return Ok(Library { handle, name: wanted.name, path }),
                Err(error) => failures.push(error),
            }
        }
        let Wanted { name, sonames, install } = wanted;
        let tried = failures.last().map_or(String::new(), |error| format!(" ({error})"));
        Err(CudaError::new(format!(
            "{name} was not found: no {} in {PATH_VARIABLE}, pip wheels, the CUDA toolkit or the system{tried}; {install}",
            sonames.join(" or ")
        )))
    }

    /// The address of a function.
    ///
    /// # Safety
    /// `T` must be the function's type.
    pub unsafe fn symbol<T: Copy>(&self, symbol: &str) -> Result<T> {
        // SAFETY: the caller names the right type.
        let found = unsafe { self.handle.get::<T>(symbol.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|_| {
            CudaError::new(format!(
                "{} in {} has no function {symbol}: it is too old",
                self.name,
                self.path.display()
            ))
        })
    }

    /// Loads a companion that this library opens by name, from the same folder.
    pub fn open_companion(&self, prefix: &str) {
        let Some(folder) = self.path.parent().filter(|folder| !folder.as_os_str().is_empty())
        else {
            return;
        };
        let is_companion = |path: &PathBuf| {
            path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix))
        };
        // A failure shows when the library itself needs its companion.
        files_of(folder).filter(is_companion).for_each(|path| drop(load(&path)));
    }
}

/// The paths to try, in order: each folder with each soname, then the bare sonames.
fn candidates(wanted: &Wanted, folders: &[PathBuf]) -> Vec<PathBuf> {
    let in_folders = folders
        .iter()
        .flat_map(|folder| wanted.sonames.iter().map(move |soname| folder.join(soname)))
        .filter(|path| path.is_file());
    in_folders.chain(wanted.sonames.iter().map(PathBuf::from)).collect()
}

/// Folders 1 to 3 of the documented list.
fn folders() -> Vec<PathBuf> {
    let listed = |variable: &str| {
        let value = std::env::var_os(variable).unwrap_or_default();
        std::env::split_paths(&value)
            .filter(|path| !path.as_os_str().is_empty())
            .collect::<Vec<_>>()
    };
    let python = listed("PATH").into_iter().find(|folder| folder.join("python3").exists());
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .flat_map(listed)
        .chain(python.as_deref().and_then(Path::parent).map(PathBuf::from));
    let toolkits = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .flat_map(listed)
        .chain([PathBuf::from("/usr/local/cuda")])
        .flat_map(|root| [root.join("lib64"), root.join("targets/x86_64-linux/lib")]);
    let mut folders = listed(PATH_VARIABLE);
    folders.extend(environments.flat_map(|root| wheel_folders(&root)));
    folders.extend(toolkits);
    folders
}

/// `nvidia/*/lib` in the site-packages of a Python environment.
fn wheel_folders(environment: &Path) -> Vec<PathBuf> {
    let is_python = |path: &PathBuf| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3"))
    };
    let versions = files_of(&environment.join("lib")).filter(is_python);
    let packages = versions.flat_map(|version| {
        ["site-packages/nvidia", "dist-packages/nvidia"].map(|folder| version.join(folder))
    });
    packages.flat_map(|nvidia| files_of(&nvidia).map(|package| package.join("lib"))).collect()
}

/// The entries of a folder in the order of their names; none if it cannot be read.
fn files_of(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter()
}

fn load(path: &Path) -> std::result::Result<&'static libloading::Library, String> {
    // SAFETY: the libraries of CUDA are made to be loaded this way; their constructors do not depend on this program.
    let loaded = unsafe { libloading::Library::new(path) };
    loaded.map(|library| &*Box::leak(Box::new(library))).map_err(|error| error.to_string())
}

/// Version of NCCL, if it is installed, e.g. 2.27.3.
pub fn nccl_version() -> Option<String> {
    let nccl = Wanted { name: "NCCL", sonames: &["libnccl.so.2"], install: "install NCCL" };
    let library = Library::open(&nccl).ok()?;
    let mut version = 0;
    // SAFETY: the type is that of the library's header, and the pointer is valid.
    let status = unsafe {
        let get: unsafe extern "C" fn(*mut std::ffi::c_int) -> std::ffi::c_int =
            library.symbol("ncclGetVersion").ok()?;
        get(&mut version)
    };
    // 22703 is 2.27.3.
    let dotted = || format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    (status == 0).then(dotted)
}

/// Declares a table of C functions that are looked up in a [`Library`].
#[macro_export]
macro_rules! function_table {
    ($(#[$doc:meta])* $table:ident { $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // the names of the library
        #[derive(Clone, Copy)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($arg: $type),*) -> $result,)*
        }

        impl $table {
            /// Looks up every function.
            pub fn load(
                library: &$crate::loader::Library,
            ) -> $crate::Result<$table> {
                // SAFETY: the types are those of the library's headers.
                unsafe { Ok($table { $($name: library.symbol(stringify!($name))?,)* }) }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABSENT: Wanted = Wanted {
        name: "nothing",
        sonames: &["libnothing.so.3", "libnothing.so.2"],
        install: "write it",
    };

    #[test]
    fn a_missing_library_names_the_sonames_and_the_remedy() {
        let message = Library::open(&ABSENT).unwrap_err().to_string();
        assert!(message.contains("libnothing.so.3 or libnothing.so.2"), "{message}");
        assert!(message.ends_with("write it"), "{message}");
    }

    #[test]
    fn folders_come_before_the_system_and_newer_sonames_first() {
        let folder = std::env::temp_dir().join(format!("lockstep-loader-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for soname in ["libnothing.so.2", "libnothing.so.3", "libnothing.so"] {
            std::fs::write(folder.join(soname), "").unwrap();
        }
        let paths = candidates(&ABSENT, &[folder.join("absent"), folder.clone()]);
        let names = [
            folder.join("libnothing.so.3"),
            folder.join("libnothing.so.2"),
            PathBuf::from("libnothing.so.3"),
            PathBuf::from("libnothing.so.2"),
        ];
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(paths, names);
    }

    #[test]
    fn wheels_are_found_in_the_site_packages_of_an_environment() {
        let root = std::env::temp_dir().join(format!("lockstep-wheels-{}", std::process::id()));
        let lib = root.join("lib/python3.12/site-packages/nvidia/cudnn/lib");
        std::fs::create_dir_all(&lib).unwrap();
        let found = wheel_folders(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [lib]);
    }
}
