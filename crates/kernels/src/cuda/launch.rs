//! Kernels of the operations: their parameters, and how they are started.

use super::queue::Operation;
use super::{Arg, Cuda, Grid, Source};
use crate::{View, ViewMut};

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
        if grid.is_empty() {
            return;
        }
        let function = self.kernels.function(&self.context, source, kernel);
        self.queue.push(self.libraries(), args.iter().copied(), |args| Operation::Kernel {
            function,
            grid,
            args,
        });
    }

    /// As `launch`, for arguments that never come again: the kernel is enqueued at once, after all earlier operations.
    pub(crate) fn launch_now(
        &self,
        source: &'static Source,
        kernel: &'static str,
        grid: Grid,
        args: &[Arg],
    ) {
        self.kernels.launch(self.stream(), source, kernel, grid, args);
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;

    /// Needs NVRTC, but no GPU. Where it is not installed, the test passes with a note, unless `LOCKSTEP_NEED_NVRTC` is
    /// set.
    #[test]
    fn every_kernel_compiles_for_all_architectures() {
        if let Err(error) = lockstep_cuda::Nvrtc::load()
            && std::env::var_os("LOCKSTEP_NEED_NVRTC").is_none()
        {
            return eprintln!("skipped: {error}");
        }
        let mut sources = vec![
            &elementwise::ELEMENTWISE,
            &embedding::EMBEDDING,
            &fp8::FP8,
            &grouped::GROUPED,
            &loss::LOSS,
            &mlp::MLP,
            &norm::NORM,
            &optimizer::OPTIMIZER,
            &pack::PACK,
            &random::RANDOM,
            &reduce::REDUCE,
            &rope::ROPE,
            &routing::ROUTING,
            &sort::SORT,
        ];
        sources.extend(attention::SOURCES);
        lockstep_cuda::check_compiles(&sources).unwrap_or_else(|error| panic!("{error}"));
    }
}
