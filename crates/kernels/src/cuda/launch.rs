//! Kernels: where their sources are, and how they are started.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Mutex, RwLock};

use super::Cuda;
use super::context::Context;
use super::driver::{Handle, MAX_DYNAMIC_SHARED, SUCCESS};
use super::error::Result;
use super::nvrtc::Nvrtc;
use crate::{View, ViewMut};

/// A source file of kernels. `kernels/prelude.cuh` is prepended to each.
pub(crate) struct Source {
    pub name: &'static str,
    pub code: &'static str,
}

/// Definitions that all sources share.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// All sources, for checks that compile every kernel.
#[cfg(test)]
fn sources() -> impl Iterator<Item = &'static Source> {
    let others = [
        &super::elementwise::ELEMENTWISE,
        &super::embedding::EMBEDDING,
        &super::loss::LOSS,
        &super::mlp::MLP,
        &super::norm::NORM,
        &super::optimizer::OPTIMIZER,
        &super::pack::PACK,
        &super::random::RANDOM,
        &super::reduce::REDUCE,
        &super::rope::ROPE,
        &super::routing::ROUTING,
        &super::sort::SORT,
    ];
    others.into_iter().chain(super::attention::SOURCES)
}

impl Source {
    /// The text that NVRTC compiles.
    pub fn text(&self) -> String {
        format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", self.name, self.code)
    }
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
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

    pub fn shared(self, bytes: usize) -> Grid {
        Grid { shared: bytes as u32, ..self }
    }
}

/// A kernel parameter of up to 8 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct Arg([u8; 8]);

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

impl From<View<'_>> for Arg {
    fn from(view: View<'_>) -> Arg {
        Arg::from(view.address())
    }
}

impl From<ViewMut<'_>> for Arg {
    fn from(view: ViewMut<'_>) -> Arg {
        Arg::from(view.address())
    }
}

impl From<&ViewMut<'_>> for Arg {
    fn from(view: &ViewMut<'_>) -> Arg {
        Arg::from(view.address())
    }
}

/// The kernels of one GPU, compiled on first use.
pub(crate) struct Kernels {
    nvrtc: Nvrtc,
    architecture: String,
    functions: RwLock<HashMap<(&'static str, &'static str), Function>>,
    modules: Mutex<HashMap<&'static str, ModuleHandle>>,
}

#[derive(Clone, Copy)]
struct Function {
    handle: Handle,
}

#[derive(Clone, Copy)]
struct ModuleHandle(Handle);

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: as above.
unsafe impl Send for ModuleHandle {}

impl Kernels {
    pub fn new(context: &Context) -> Result<Kernels> {
        let architecture = architecture(context.capability);
        let (functions, modules) = (RwLock::default(), Mutex::default());
        Ok(Kernels { nvrtc: Nvrtc::load()?, architecture, functions, modules })
    }

    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    fn function(
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
        let limit = context.shared_per_block as i32;
        // SAFETY: the function lives. Kernels with static shared memory refuse the full limit and keep the default.
        unsafe { (context.api().cuFuncSetAttribute)(handle, MAX_DYNAMIC_SHARED, limit) };
        let function = Function { handle };
        self.functions
            .write()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .insert(key, function);
        function
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

impl Cuda {
    /// Enqueues a kernel on the compute stream. An empty grid is a launch that does nothing.
    ///
    /// # Panics
    /// If the launch fails.
    pub(crate) fn launch(
        &self,
        source: &'static Source,
        kernel: &'static str,
        grid: Grid,
        args: &[Arg],
    ) {
        let Grid { blocks: [x, y, z], threads, shared } = grid;
        if x == 0 || y == 0 || z == 0 {
            return;
        }
        let function = self.kernels.function(&self.context, source, kernel);
        let mut parameters = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (parameter, arg) in parameters[..args.len()].iter_mut().zip(args) {
            *parameter = (arg as *const Arg).cast_mut().cast();
        }
        // SAFETY: the parameters point to values of at least the kernel's parameter sizes; the memory they name lives
        // until later operations of this stream reuse it.
        let status = unsafe {
            (self.context.api().cuLaunchKernel)(
                function.handle,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared,
                self.stream.handle(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if status != SUCCESS {
            self.context.must(status, &format!("start the kernel {kernel}"));
        }
    }
}

/// More parameters than any kernel has.
const MAX_ARGS: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels that may spill registers, with the reason.
    const MAY_SPILL: [&str; 0] = [];

    /// Needs NVRTC, but no GPU. Where it is not installed, the test passes with a note, unless `LOCKSTEP_NEED_NVRTC` is
    /// set.
    #[test]
    fn every_kernel_compiles_for_all_architectures_without_spills() {
        let nvrtc = match Nvrtc::load() {
            Ok(nvrtc) => nvrtc,
            Err(error) if std::env::var_os("LOCKSTEP_NEED_NVRTC").is_none() => {
                return eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        };
        // Compiling takes two minutes; the architectures share the cores.
        std::thread::scope(|scope| {
            for architecture in ["sm_80", "sm_90a", "sm_100a"] {
                let nvrtc = &nvrtc;
                scope
                    .spawn(move || sources().for_each(|source| check(nvrtc, source, architecture)));
            }
        });
    }

    fn check(nvrtc: &Nvrtc, source: &Source, architecture: &str) {
        let options = ["--ptxas-options=-v"];
        let compiled = nvrtc.compile(source.name, &source.text(), architecture, &options);
        let log = compiled.unwrap_or_else(|error| panic!("{error}")).log;
        let spills = spilling(&log);
        assert!(spills.is_empty(), "{} on {architecture} spills: {spills:?}", source.name);
        assert!(log.contains("registers"), "the log of {} has no register counts", source.name);
    }

    /// Kernels of a compiler log that store registers to memory.
    fn spilling(log: &str) -> Vec<String> {
        let (mut kernel, mut spilling) = (String::new(), Vec::new());
        for line in log.lines() {
            if let Some((_, name)) = line.split_once("Function properties for ") {
                kernel = name.trim().to_string();
            }
            let spills = line.contains("spill stores") && !line.contains(" 0 bytes spill stores");
            if spills && !MAY_SPILL.contains(&kernel.as_str()) {
                spilling.push(format!("{kernel}: {}", line.trim()));
            }
        }
        spilling
    }

    #[test]
    fn spills_are_found_in_a_log() {
        let log = "ptxas info    : Function properties for a\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Function properties for b\n    8 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n";
        assert_eq!(spilling(log).len(), 1);
        assert!(spilling(log)[0].starts_with("b: 8 bytes"));
    }

    #[test]
    fn architectures_have_all_instructions_of_a_gpu() {
        let names = [(8, 0), (8, 9), (9, 0), (10, 0)].map(architecture);
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a"]);
    }
}
