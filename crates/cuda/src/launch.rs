//! Kernels: where their sources are, and how they are started.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Mutex, RwLock};

use crate::context::Context;
use crate::driver::{Handle, MAX_DYNAMIC_SHARED, STATIC_SHARED, SUCCESS};
use crate::error::Result;
use crate::nvrtc::Nvrtc;
use crate::stream::Stream;

/// A source file of kernels. The text of `types.cuh`, `ptx.cuh`, `hopper.cuh` and `prelude.cuh` is prepended to
/// each.
pub struct Source {
    pub name: &'static str,
    pub code: &'static str,
}

/// Definitions that all sources share.
const PRELUDE: &str = concat!(
    include_str!("types.cuh"),
    include_str!("ptx.cuh"),
    include_str!("hopper.cuh"),
    include_str!("prelude.cuh")
);

impl Source {
    /// The text that NVRTC compiles.
    pub fn text(&self) -> String {
        format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", self.name, self.code)
    }
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grid {
    pub blocks: [u32; 3],
    pub threads: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

impl Grid {
    pub fn new(blocks: usize, threads: u32) -> Grid {
        Grid::of([blocks, 1, 1], threads)
    }

    pub fn of(blocks: [usize; 3], threads: u32) -> Grid {
        let blocks =
            blocks.map(|blocks| u32::try_from(blocks).expect("a grid has fewer than 2^32 blocks"));
        Grid { blocks, threads, shared: 0 }
    }

    /// One thread per element.
    pub fn over(elements: usize, threads: u32) -> Grid {
        Grid::new(elements.div_ceil(threads as usize), threads)
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }

    pub fn shared(self, bytes: usize) -> Grid {
        Grid { shared: bytes as u32, ..self }
    }
}

/// A kernel parameter of up to 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C, align(8))]
pub struct Arg([u8; 8]);

impl Arg {
    /// The bytes as a number; those that the parameter does not use are zero.
    pub fn bits(self) -> u64 {
        u64::from_ne_bytes(self.0)
    }
}

macro_rules! arg_from {
    ($($number:ty)*) => {$(
        impl From<$number> for Arg {
            fn from(value: $number) -> Arg {
                let mut bytes = [0; 8];
                bytes[..size_of::<$number>()].copy_from_slice(&value.to_ne_bytes());
                Arg(bytes)
            }
        }
    )*};
}
arg_from!(u64 i64 u32 i32 f32 f64);

/// The kernels of one GPU, compiled on first use.
pub struct Kernels {
    nvrtc: Nvrtc,
    architecture: String,
    functions: RwLock<HashMap<(&'static str, &'static str), Function>>,
    modules: Mutex<HashMap<&'static str, ModuleHandle>>,
}

/// A kernel, ready to be started.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Function {
    handle: Handle,
    name: &'static str,
}

#[derive(Clone, Copy)]
struct ModuleHandle(Handle);

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: as above.
unsafe impl Send for ModuleHandle {}

impl Function {
    /// Enqueues the kernel on a stream. An empty grid is a launch that does nothing.
    pub fn launch(&self, stream: &Stream, grid: Grid, args: &[Arg]) -> Result<()> {
        let mut parameters = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (parameter, arg) in parameters[..args.len()].iter_mut().zip(args) {
            *parameter = (arg as *const Arg).cast_mut().cast();
        }
        self.start(stream, grid, &mut parameters)
    }

    /// [`Function::launch`] for a kernel whose only parameter is a structure, passed by value.
    ///
    /// # Safety
    /// `T` must have the layout of the kernel's parameter.
    pub unsafe fn launch_with<T: Copy>(
        &self,
        stream: &Stream,
        grid: Grid,
        parameter: &T,
    ) -> Result<()> {
        self.start(stream, grid, &mut [(parameter as *const T).cast_mut().cast()])
    }

    fn start(&self, stream: &Stream, grid: Grid, parameters: &mut [*mut c_void]) -> Result<()> {
        let Grid { blocks: [x, y, z], threads, shared } = grid;
        if grid.is_empty() {
            return Ok(());
        }
        let context = stream.context();
        // SAFETY: the parameters point to values of at least the kernel's parameter sizes; the memory they name lives
        // until later operations of this stream reuse it.
        let status = unsafe {
            (context.api().cuLaunchKernel)(
                self.handle,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared,
                stream.handle(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        match status {
            SUCCESS => Ok(()),
            failed => context.driver.check(failed, &format!("start the kernel {}", self.name)),
        }
    }
}

impl Kernels {
    pub fn new(context: &Context) -> Result<Kernels> {
        let architecture = architecture(context.capability);
        let (functions, modules) = (RwLock::default(), Mutex::default());
        Ok(Kernels { nvrtc: Nvrtc::load()?, architecture, functions, modules })
    }

    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// A kernel, compiled and loaded on first use.
    ///
    /// # Panics
    /// If it cannot be compiled.
    pub fn function(
        &self,
        context: &Context,
        source: &'static Source,
        kernel: &'static str,
    ) -> Function {
        let key = (source.name, kernel);
        if let Some(&function) =
            self.functions.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&key)
        {
            return function;
        }
        let mut modules = self.modules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let module = *modules.entry(source.name).or_insert_with(|| {
            self.load_module(context, source).unwrap_or_else(|error| panic!("{error}"))
        });
        let name = CString::new(kernel).expect("kernel names have no zero byte");
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module lives as long as the process.
        let status =
            unsafe { (context.api().cuModuleGetFunction)(&mut handle, module.0, name.as_ptr()) };
        context.must(status, &format!("find the kernel {kernel} in {}.cu", source.name));
        // A block may use all the shared memory that the GPU has; the default limit is 48 KiB.
        let mut fixed = 0;
        // SAFETY: the function lives, and the pointer is valid.
        unsafe {
            let status = (context.api().cuFuncGetAttribute)(&mut fixed, STATIC_SHARED, handle);
            context.must(status, "read the shared memory of a kernel");
            let limit = context.shared_per_block as i32 - fixed;
            let status = (context.api().cuFuncSetAttribute)(handle, MAX_DYNAMIC_SHARED, limit);
            context.must(status, "set the shared memory of a kernel");
        }
        let function = Function { handle, name: kernel };
        self.functions
            .write()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .insert(key, function);
        function
    }

    /// Enqueues a kernel on a stream. An empty grid is a launch that does nothing.
    ///
    /// # Panics
    /// If the kernel cannot be compiled or started.
    pub fn launch(
        &self,
        stream: &Stream,
        source: &'static Source,
        kernel: &'static str,
        grid: Grid,
        args: &[Arg],
    ) {
        let context = stream.context();
        let launched = self.function(context, source, kernel).launch(stream, grid, args);
        launched
            .unwrap_or_else(|error| panic!("GPU {} ({}): {error}", context.index, context.name));
    }

    /// [`Kernels::launch`] for a kernel whose only parameter is a structure, passed by value.
    ///
    /// # Safety
    /// `T` must have the layout of the kernel's parameter.
    ///
    /// # Panics
    /// If the kernel cannot be compiled or started.
    pub unsafe fn launch_with<T: Copy>(
        &self,
        stream: &Stream,
        source: &'static Source,
        kernel: &'static str,
        grid: Grid,
        parameter: &T,
    ) {
        let context = stream.context();
        let function = self.function(context, source, kernel);
        // SAFETY: guaranteed by the caller.
        let launched = unsafe { function.launch_with(stream, grid, parameter) };
        launched
            .unwrap_or_else(|error| panic!("GPU {} ({}): {error}", context.index, context.name));
    }

    fn load_module(&self, context: &Context, source: &Source) -> Result<ModuleHandle> {
        let cubin = self.nvrtc.cubin(source.name, &source.text(), &self.architecture)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is complete machine code.
        let status =
            unsafe { (context.api().cuModuleLoadData)(&mut module, cubin.as_ptr().cast()) };
        context.driver.check(status, &format!("load the kernels of {}.cu", source.name))?;
        Ok(ModuleHandle(module))
    }
}

/// The target that has all instructions of a GPU, e.g. `sm_90a`.
fn architecture((major, minor): (i32, i32)) -> String {
    let specific = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{specific}")
}

/// More parameters than any kernel has.
const MAX_ARGS: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_all_instructions_of_a_gpu() {
        let names = [(8, 0), (8, 9), (9, 0), (10, 0)].map(architecture);
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a"]);
    }
}
