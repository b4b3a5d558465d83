//! MPI's datatypes and operators for our element types. Where MPI's operator is missing or gives another
//! result than our own links, ours is registered with the library.
//!
//! | | sum, mean | product | min, max |
//! |---|---|---|---|
//! | f32, f64 | MPI | MPI | ours: NaN must propagate, which MPI does not specify |
//! | f16, bf16 | ours | ours | ours |
//! | i32, i64, u32 | MPI | MPI | MPI |
//! | u8 | ours: Open MPI 4.1 may saturate narrow sums | ours | MPI |

use super::request::succeeded;
use crate::call::fold::{Fold, Op};
use half::{bf16, f16};
use lockstep_types::{Dtype, Element};
use mpi::ffi;
use std::ffi::{c_int, c_void};

/// MPI datatype of an element type; half precisions are sent as two bytes.
pub(super) fn datatype(dtype: Dtype) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match dtype {
            Dtype::F32 => ffi::RSMPI_FLOAT,
            Dtype::F64 => ffi::RSMPI_DOUBLE,
            Dtype::F16 | Dtype::Bf16 => ffi::RSMPI_UINT16_T,
            Dtype::I32 => ffi::RSMPI_INT32_T,
            Dtype::I64 => ffi::RSMPI_INT64_T,
            Dtype::U8 => ffi::RSMPI_UINT8_T,
            Dtype::U32 => ffi::RSMPI_UINT32_T,
        }
    }
}

/// Operators that are registered with the library.
pub(super) struct OwnOps(Vec<(Dtype, Op, ffi::MPI_Op)>);

impl OwnOps {
    pub(super) fn register() -> Result<OwnOps, String> {
        let mut ops = Vec::new();
        add::<f16>(&mut ops, &Op::ALL)?;
        add::<bf16>(&mut ops, &Op::ALL)?;
        add::<f32>(&mut ops, &[Op::Min, Op::Max])?;
        add::<f64>(&mut ops, &[Op::Min, Op::Max])?;
        add::<u8>(&mut ops, &[Op::Sum, Op::Mean, Op::Product])?;
        Ok(OwnOps(ops))
    }

    /// The MPI operator. A mean is a sum that is divided afterwards.
    pub(super) fn find(&self, dtype: Dtype, op: Op) -> ffi::MPI_Op {
        let own = self.0.iter().find(|(d, o, _)| (*d, *o) == (dtype, op));
        // SAFETY: constants of the library.
        own.map_or_else(|| unsafe { library_op(op) }, |(_, _, handle)| *handle)
    }
}

unsafe fn library_op(op: Op) -> ffi::MPI_Op {
    // SAFETY: constants of the library.
    unsafe {
        match op {
            Op::Sum | Op::Mean => ffi::RSMPI_SUM,
            Op::Min => ffi::RSMPI_MIN,
            Op::Max => ffi::RSMPI_MAX,
            Op::Product => ffi::RSMPI_PROD,
        }
    }
}

fn add<T: Element>(ops: &mut Vec<(Dtype, Op, ffi::MPI_Op)>, which: &[Op]) -> Result<(), String> {
    for op in which {
        let function: unsafe extern "C" fn(_, _, _, _) = match op {
            Op::Sum | Op::Mean => combine::<T, { Op::Sum as u8 }>,
            Op::Min => combine::<T, { Op::Min as u8 }>,
            Op::Max => combine::<T, { Op::Max as u8 }>,
            Op::Product => combine::<T, { Op::Product as u8 }>,
        };
        // Sums and products are commutative bit by bit. For min and max the order decides which zero or
        // NaN is returned, so the library must keep the order of ranks.
        let commutes = c_int::from(!matches!(op, Op::Min | Op::Max));
        let mut handle = std::mem::MaybeUninit::uninit();
        // SAFETY: the function has the type that MPI asks for; the handle is written on success.
        let handle = unsafe {
            succeeded(ffi::MPI_Op_create(Some(function), commutes, handle.as_mut_ptr()))?;
            handle.assume_init()
        };
        ops.push((T::DTYPE, *op, handle));
    }
    Ok(())
}

/// `inout = input ∘ inout`, called by MPI. Half precisions are rounded at every step; our own links round
/// once per fold.
unsafe extern "C" fn combine<T: Element, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    let op = Op::from_code(OP).expect("OP is the code of an operator");
    let fold = Fold { dtype: T::DTYPE, op, ranks: 1 };
    // SAFETY: MPI passes two aligned buffers of `len` elements of the type that the collective was started
    // with, which nobody else accesses during the call.
    unsafe {
        let bytes = *len as usize * size_of::<T>();
        fold.combine(&[input.cast(), inout.cast()], &[inout.cast()], bytes, false);
    }
}
