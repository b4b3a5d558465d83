//! The seam between models and machines: a device makes tensors and carries out operations on them, in
//! order. Models know only this; which machine it is, is chosen at run time.
//!
//! Operations may run behind the caller; only reading a value waits. The CPU does them at once.

mod attention;
mod elementwise;
mod embedding;
mod loss;
mod matmul;
mod meter;
mod mlp;
mod norm;
mod optimizer;
mod pack;
mod routing;

use std::sync::Arc;

pub use attention::{Attention, AttentionKnown};
pub use embedding::Vocabulary;
pub use lockstep_types::OpClass;
pub use loss::{CrossEntropy, Found, Gradient};
pub use matmul::Matmul;
pub use meter::Meter;
pub use optimizer::{AdamW, Stepped};
pub use routing::{Capacity, Router};

use crate::cpu::Cpu;
use crate::{Dtype, Element, Memory, Pool, Tag, Tensor, View, ViewMut};

/// A machine that tensors live on. Clones are the same machine.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    backend: Backend,
    pool: Arc<Pool>,
    meter: Meter,
}

/// What varies from machine to machine; each operation matches on it once.
enum Backend {
    Cpu(Cpu),
}

impl Device {
    /// This machine's processor, with `threads` of it.
    pub fn cpu(threads: usize) -> Device {
        Device::on(Cpu::new(threads))
    }

    /// A processor as it was made: with fewer instructions than it has, say.
    pub fn on(cpu: Cpu) -> Device {
        Device(Arc::new(Inner {
            backend: Backend::Cpu(cpu),
            pool: Arc::new(Pool::new()),
            meter: Meter::new(),
        }))
    }

    /// A tensor with whatever was last written in its memory.
    pub fn empty(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        Tensor::new(&self.0.pool, rows, cols, dtype, tag)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        let mut tensor = self.empty(rows, cols, dtype, tag);
        self.fill(tensor.view_mut(), 0.0);
        tensor
    }

    /// Copies from the host.
    pub fn write<E: Element>(&self, to: ViewMut<'_>, from: &[E]) {
        match &self.0.backend {
            Backend::Cpu(_) => to.host::<E>().copy_from_slice(from),
        }
    }

    /// Copies to the host, after everything before it is done.
    pub fn read<E: Element>(&self, from: View<'_>, to: &mut [E]) {
        match &self.0.backend {
            Backend::Cpu(_) => to.copy_from_slice(from.host::<E>()),
        }
    }

    /// What tensors hold.
    pub fn memory(&self) -> Memory {
        self.0.pool.memory()
    }

    /// Lets the peaks of `memory` start again from what is held now.
    pub fn reset_peaks(&self) {
        self.0.pool.reset_peaks();
    }

    /// Where the time of the operations goes.
    pub fn meter(&self) -> &Meter {
        &self.0.meter
    }

    /// That share each operation.
    pub fn threads(&self) -> usize {
        match &self.0.backend {
            Backend::Cpu(cpu) => cpu.team.size(),
        }
    }

    /// Carries out an operation on the processor, on the clock if one is wanted.
    fn on_cpu<R>(&self, operation: OpClass, work: impl FnOnce(&Cpu) -> R) -> R {
        let Backend::Cpu(cpu) = &self.0.backend;
        self.0.meter.time(operation, || work(cpu))
    }
}

/// Runs a block with `$E` as the element type of a float dtype.
macro_rules! with_float {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F32 => {
                type $E = f32;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $E = half::bf16;
                $body
            }
            dtype => panic!("kernels compute in f32 or bf16, not in {dtype}"),
        }
    };
}
use with_float;
