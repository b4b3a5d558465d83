//! Compiles CUDA C++ for the present GPU, and keeps the machine code on disk.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use crate::cache;
use crate::error::{CudaError, Result};
use crate::function_table;
use crate::loader::{self, Library};

function_table! {
    /// Functions of `libnvrtc.so`.
    Functions {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            program: *mut *mut c_void,
            source: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char,
        ) -> c_int;
        fn nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int;
        fn nvrtcCompileProgram(program: *mut c_void, count: c_int, options: *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) -> c_int;
        fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(program: *mut c_void, bytes: *mut usize) -> c_int;
        fn nvrtcGetCUBIN(program: *mut c_void, cubin: *mut c_char) -> c_int;
        fn nvrtcGetErrorString(status: c_int) -> *const c_char;
    }
}

/// The run-time compiler.
pub struct Nvrtc {
    api: Functions,
    version: (i32, i32),
    pub library: Library,
}

/// Machine code and the compiler's messages.
pub struct Compiled {
    pub cubin: Vec<u8>,
    pub log: String,
}

impl Nvrtc {
    pub fn load() -> Result<Nvrtc> {
        let library = Library::open(&loader::NVRTC)?;
        library.open_companion("libnvrtc-builtins.so");
        let api = Functions::load(&library)?;
        let mut version = (0, 0);
        // SAFETY: valid pointers.
        let status = unsafe { (api.nvrtcVersion)(&mut version.0, &mut version.1) };
        check(&api, status, "read its version")?;
        Ok(Nvrtc { api, version, library })
    }

    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The machine code of a source, from the cache on disk or compiled now.
    pub fn cubin(&self, name: &str, code: &str, architecture: &str) -> Result<Vec<u8>> {
        let key = cache::key(&[code, architecture, &self.version()]);
        let file = cache::folder().map(|folder| {
            folder.join("kernels").join(format!("{name}-{architecture}-{key:016x}.cubin"))
        });
        if let Some(cubin) = file.as_ref().and_then(|file| std::fs::read(file).ok()) {
            return Ok(cubin);
        }
        let cubin = self.compile(name, code, architecture, &[])?.cubin;
        if let Some(file) = file {
            store(file, &cubin);
        }
        Ok(cubin)
    }

    /// Compiles a source for an architecture such as `sm_90a`.
    pub fn compile(
        &self,
        name: &str,
        code: &str,
        architecture: &str,
        options: &[&str],
    ) -> Result<Compiled> {
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| CudaError::new(format!("{name}.cu contains a zero byte")))
        };
        let (source, file) = (text(code)?, text(&format!("{name}.cu"))?);
        let target = text(&format!("--gpu-architecture={architecture}"))?;
        let mut options =
            options.iter().map(|option| text(option)).collect::<Result<Vec<CString>>>()?;
        options.extend([target, text("--std=c++17")?]);
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let (api, mut program) = (&self.api, std::ptr::null_mut());
        // SAFETY: all strings and buffers live until the calls return, with the sizes that NVRTC asks for.
        unsafe {
            let (none, names) = (std::ptr::null(), std::ptr::null());
            let status = (api.nvrtcCreateProgram)(
                &mut program,
                source.as_ptr(),
                file.as_ptr(),
                0,
                none,
                names,
            );
            check(api, status, &format!("read {name}.cu"))?;
            let status =
                (api.nvrtcCompileProgram)(program, pointers.len() as c_int, pointers.as_ptr());
            let log = self.log(program)?;
            let compiled = check(api, status, &format!("compile {name}.cu for {architecture}"));
            let cubin = compiled
                .map_err(|error| CudaError::new(format!("{error}\n{log}")))
                .and_then(|()| self.output(program));
            (api.nvrtcDestroyProgram)(&mut program);
            Ok(Compiled { cubin: cubin?, log })
        }
    }

    /// # Safety
    /// `program` must be a program that was compiled.
    unsafe fn log(&self, program: *mut c_void) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the buffer has the size that NVRTC asks for.
        unsafe {
            check(
                &self.api,
                (self.api.nvrtcGetProgramLogSize)(program, &mut bytes),
                "read its log",
            )?;
            let mut log = vec![0u8; bytes];
            let status = (self.api.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast());
            check(&self.api, status, "read its log")?;
            Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string())
        }
    }

    /// # Safety
    /// `program` must be a program that was compiled without errors.
    unsafe fn output(&self, program: *mut c_void) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the buffer has the size that NVRTC asks for.
        unsafe {
            check(&self.api, (self.api.nvrtcGetCUBINSize)(program, &mut bytes), "read its output")?;
            let mut cubin = vec![0u8; bytes];
            let status = (self.api.nvrtcGetCUBIN)(program, cubin.as_mut_ptr().cast());
            check(&self.api, status, "read its output")?;
            Ok(cubin)
        }
    }
}

/// Writes a file whole or not at all. A cache that cannot be written only costs time.
fn store(file: PathBuf, bytes: &[u8]) {
    if let Err(error) = cache::store(&file, bytes) {
        eprintln!("warning: cannot cache {}: {error}", file.display());
    }
}

fn check(api: &Functions, status: c_int, action: &str) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: NVRTC returns a constant string for every status.
    let text = unsafe { CStr::from_ptr((api.nvrtcGetErrorString)(status)) }.to_string_lossy();
    Err(CudaError::new(format!("NVRTC cannot {action}: {text}")))
}
