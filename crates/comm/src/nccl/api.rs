//! The functions that are used of NCCL, and its version.

use crate::device::dotted;
use lockstep_cuda::loader::{Library, Wanted};
use lockstep_cuda::{Address, CudaError, Handle, function_table};
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

const NCCL: Wanted = Wanted {
    name: "NCCL",
    sonames: &["libnccl.so.2"],
    install: "pip install nvidia-nccl-cu13, or install libnccl2, version 2.18 or newer",
};

/// The oldest supported version: `ncclConfig_t`, communicators that do not block, and `ncclCommSplit`.
const OLDEST: u64 = 21800;

function_table! {
    /// Functions of `libnccl.so.2`.
    Functions {
        fn ncclGetVersion(version: *mut c_int) -> c_int;
        fn ncclGetUniqueId(id: *mut UniqueId) -> c_int;
        fn ncclCommInitRankConfig(comm: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> c_int;
        fn ncclCommSplit(comm: Handle, color: c_int, key: c_int, split: *mut Handle, config: *mut Config) -> c_int;
        fn ncclCommFinalize(comm: Handle) -> c_int;
        fn ncclCommDestroy(comm: Handle) -> c_int;
        fn ncclCommAbort(comm: Handle) -> c_int;
        fn ncclCommGetAsyncError(comm: Handle, status: *mut c_int) -> c_int;
        fn ncclGetErrorString(status: c_int) -> *const c_char;
        fn ncclGetLastError(comm: Handle) -> *const c_char;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclAllReduce(from: Address, to: Address, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclReduce(from: Address, to: Address, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclReduceScatter(from: Address, to: Address, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclAllGather(from: Address, to: Address, count: usize, dtype: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclBroadcast(from: Address, to: Address, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclSend(from: Address, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int;
        fn ncclRecv(to: Address, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int;
    }
}

function_table! {
    /// Functions for the registration of buffers.
    RegistrationFunctions {
        fn ncclCommRegister(comm: Handle, buffer: Address, bytes: usize, handle: *mut Handle) -> c_int;
        fn ncclCommDeregister(comm: Handle, handle: Handle) -> c_int;
    }
}

/// The oldest version whose registration is used. Older ones have it, but were not looked at.
const OLDEST_WITH_REGISTRATION: u64 = 22800;

/// `NCCL_SPLIT_NOCOLOR`
pub(crate) const NO_COLOR: c_int = -1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; 128]);

impl UniqueId {
    /// To be filled in by NCCL or by another member.
    pub(crate) const EMPTY: UniqueId = UniqueId([0; 128]);
}

/// `ncclConfig_t` of version 2.18. Newer versions accept it and use their defaults for what it lacks.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// A communicator whose calls return at once, with a limited number of blocks per kernel.
    ///
    /// Communicators that are split from it share no resources with it: NCCL would run the calls of both one after the
    /// other in the order in which the host enqueues them. Groups are used from different threads, so that order differs
    /// between ranks, and they would wait for each other.
    pub(crate) fn new(max_ctas: Option<usize>) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21805,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: max_ctas.map_or(UNDEFINED, |n| n as c_int),
            net_name: std::ptr::null(),
            split_share: 0,
        }
    }
}

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INTERNAL_ERROR: c_int = 3;
pub(crate) const REMOTE_ERROR: c_int = 6;
pub(crate) const IN_PROGRESS: c_int = 7;

/// The library of this process.
pub(crate) struct Api {
    pub functions: Functions,
    /// None if the version is too old.
    registration: Option<RegistrationFunctions>,
    /// E.g. 22803.
    pub version: u64,
    path: PathBuf,
}

/// The NCCL that this process has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclReport {
    /// E.g. 2.28.3.
    pub version: String,
    /// The file, or the soname where the system's search path found it.
    pub path: PathBuf,
}

/// Version and file of NCCL, or why it cannot be used. Loads the library.
pub fn nccl_report() -> Result<NcclReport, CudaError> {
    Api::get().map(|api| NcclReport { version: dotted(api.version), path: api.path.clone() })
}

impl Api {
    /// Loads NCCL once per process.
    pub(crate) fn get() -> Result<&'static Api, CudaError> {
        static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Api, CudaError> {
        let library = Library::open(&NCCL)?;
        let mut version = 0;
        // SAFETY: the types are those of the header; a valid pointer.
        unsafe {
            type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
            library.symbol::<GetVersion>("ncclGetVersion")?(&mut version);
        }
        let version = version as u64;
        check_version(version, &library.path.display().to_string())?;
        let functions = Functions::load(&library)?;
        let registration = match version {
            OLDEST_WITH_REGISTRATION.. => Some(RegistrationFunctions::load(&library)?),
            _ => None,
        };
        Ok(Api { functions, registration, version, path: library.path })
    }

    /// The functions for the registration of buffers, or why there are none.
    pub(crate) fn registration(&self) -> Result<RegistrationFunctions, CudaError> {
        self.registration.ok_or_else(|| {
            CudaError::new(format!(
                "NCCL {} cannot register buffers, which needs {} or newer; {}, or set comm.register_buffers=false",
                dotted(self.version),
                dotted(OLDEST_WITH_REGISTRATION),
                NCCL.install
            ))
        })
    }

    /// The text of a status, with the last error of the library.
    pub(crate) fn describe(&self, status: c_int) -> String {
        // SAFETY: both return constant or thread-local strings.
        unsafe {
            let text = CStr::from_ptr((self.functions.ncclGetErrorString)(status));
            let last = (self.functions.ncclGetLastError)(std::ptr::null_mut());
            let last = if last.is_null() { c"" } else { CStr::from_ptr(last) };
            let (text, last) = (text.to_string_lossy(), last.to_string_lossy());
            match last.trim() {
                "" => format!("NCCL {}: {text}", dotted(self.version)),
                last => format!("NCCL {}: {text}: {last}", dotted(self.version)),
            }
        }
    }
}

/// Fails if the version is too old.
fn check_version(version: u64, path: &str) -> Result<(), CudaError> {
    if version >= OLDEST {
        return Ok(());
    }
    let (found, oldest) = (dotted(version), dotted(OLDEST));
    Err(CudaError::new(format!(
        "NCCL {found} in {path} is too old: {oldest} or newer is needed; {}",
        NCCL.install
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_checked_and_named() {
        assert!(check_version(22803, "libnccl.so.2").is_ok());
        let error = check_version(21605, "/opt/libnccl.so.2").unwrap_err().to_string();
        assert!(
            error.starts_with("NCCL 2.16.5 in /opt/libnccl.so.2 is too old: 2.18.0"),
            "{error}"
        );
        assert!(error.contains("pip install"), "{error}");
    }

    #[test]
    fn the_config_has_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
