//! cuDNN's backend API: operation graphs, and execution plans that cuDNN builds for them. The graphs themselves are in
//! `attention`.

mod descriptor;
mod graph;
mod names;
mod plan;

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;

use lockstep_cuda::{
    CudaError, Result, function_table,
    loader::{self, Library},
};

use super::attention;
pub(crate) use descriptor::Descriptor;
pub(crate) use graph::{Graph, Tensor};
pub(crate) use names::{DataType, Pointwise, Reduction};
pub(crate) use plan::{Plan, Target};

function_table! {
    /// Functions of `libcudnn.so`.
    Functions {
        fn cudnnGetVersion() -> usize;
        fn cudnnGetErrorString(status: c_int) -> *const c_char;
        fn cudnnGetLastErrorString(text: *mut c_char, bytes: usize) -> ();
        fn cudnnCreate(handle: *mut *mut c_void) -> c_int;
        fn cudnnDestroy(handle: *mut c_void) -> c_int;
        fn cudnnSetStream(handle: *mut c_void, stream: *mut c_void) -> c_int;
        fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut *mut c_void) -> c_int;
        fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> c_int;
        fn cudnnBackendFinalize(descriptor: *mut c_void) -> c_int;
        fn cudnnBackendSetAttribute(
            descriptor: *mut c_void,
            name: c_int,
            kind: c_int,
            count: i64,
            values: *const c_void,
        ) -> c_int;
        fn cudnnBackendGetAttribute(
            descriptor: *mut c_void,
            name: c_int,
            kind: c_int,
            capacity: i64,
            count: *mut i64,
            values: *mut c_void,
        ) -> c_int;
        fn cudnnBackendExecute(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) -> c_int;
    }
}

/// The oldest version whose graphs are used.
const OLDEST_VERSION: usize = 9_00_00;

/// The library and a handle that enqueues on one stream.
pub(crate) struct Dnn {
    api: Functions,
    handle: Mutex<Handle>,
    version: usize,
    pub library: Library,
    pub attention: attention::Settings,
}

struct Handle(*mut c_void);

// SAFETY: a handle may be used by one thread after the other.
unsafe impl Send for Handle {}

impl Dnn {
    /// Loads cuDNN for a stream of the current context.
    pub fn load(stream: *mut c_void) -> Result<Dnn> {
        let (library, api, version) = load()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer; the stream lives as long as this handle.
        unsafe {
            check(&api, (api.cudnnCreate)(&mut handle), "create a handle")?;
            check(&api, (api.cudnnSetStream)(handle, stream), "select the stream")?;
        }
        let handle = Mutex::new(Handle(handle));
        Ok(Dnn { api, handle, version, library, attention: attention::Settings::default() })
    }

    /// Version as a number, e.g. 91900 for 9.19.0.
    pub fn version(&self) -> usize {
        self.version
    }

    pub fn graph(&self) -> Graph {
        Graph::new(self.api)
    }

    /// Calls `work` with the handle, which no other thread uses meanwhile.
    pub fn with_handle<R>(&self, work: impl FnOnce(Target<'_>) -> R) -> R {
        let handle = self.handle.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        work(Target::Handle(handle.0))
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: created by `load` and not used any more.
        unsafe { (self.api.cudnnDestroy)(handle.0) };
    }
}

/// cuDNN without a GPU: it builds plans for a described device, and cannot execute them.
#[cfg(test)]
pub(crate) struct Offline {
    api: Functions,
    pub version: usize,
    properties: Descriptor,
}

#[cfg(test)]
impl Offline {
    /// `device`: the JSON text that cuDNN itself writes about a device.
    pub fn load(device: &str) -> Result<Offline> {
        let (_, api, version) = load()?;
        let properties = Descriptor::new(api, names::DEVICE_PROPERTIES)?;
        properties.set_text(names::DEVICE_PROPERTIES_JSON, device)?;
        properties.finalize()?;
        Ok(Offline { api, version, properties })
    }

    pub fn graph(&self) -> Graph {
        Graph::new(self.api)
    }

    pub fn target(&self) -> Target<'_> {
        Target::Described(&self.properties)
    }
}

fn load() -> Result<(Library, Functions, usize)> {
    let library = Library::open(&loader::CUDNN)?;
    let api = Functions::load(&library)?;
    // SAFETY: no arguments.
    let version = unsafe { (api.cudnnGetVersion)() };
    if version < OLDEST_VERSION {
        return Err(CudaError::new(format!(
            "cuDNN in {} has version {version}; 9.0 or newer is needed: {}",
            library.path.display(),
            loader::CUDNN.install
        )));
    }
    Ok((library, api, version))
}

fn check(api: &Functions, status: c_int, action: &str) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let mut text = [0u8; 2048];
    // SAFETY: the buffer has the given size; the name of a status is a constant string.
    let name = unsafe {
        (api.cudnnGetLastErrorString)(text.as_mut_ptr().cast(), text.len());
        std::ffi::CStr::from_ptr((api.cudnnGetErrorString)(status)).to_string_lossy()
    };
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    let details = String::from_utf8_lossy(&text[..end]);
    Err(CudaError::new(format!("cuDNN cannot {action}: {name}: {}", details.trim())))
}
