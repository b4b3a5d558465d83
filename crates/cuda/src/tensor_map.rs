//! Descriptions of tensors for the copy engine of a multiprocessor (TMA), which copies boxes of a tensor to shared memory.

use std::ffi::c_void;

use crate::context::Context;
use crate::driver::Address;
use crate::error::{CudaError, Result};

/// `CUtensorMap`: a tensor of bf16 with three dimensions, and the box that a copy takes. Kernels get it by value.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TensorMap([u64; 16]);

/// A tensor of bf16 in device memory. The innermost dimension comes first.
#[derive(Clone, Copy, Debug)]
pub struct Boxes {
    /// A multiple of 16.
    pub address: Address,
    pub dims: [u64; 3],
    /// Bytes from one index of the second and third dimension to the next, multiples of 16.
    pub strides: [u64; 2],
    /// Elements of a box. A row of it is at most 128 bytes.
    pub size: [u32; 3],
}

/// `CU_TENSOR_MAP_DATA_TYPE_BFLOAT16`
const BF16: i32 = 9;
/// `CU_TENSOR_MAP_INTERLEAVE_NONE`
const NOT_INTERLEAVED: i32 = 0;
/// `CU_TENSOR_MAP_SWIZZLE_128B`
const SWIZZLE_128: i32 = 3;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`
const PROMOTE_256: i32 = 3;
/// `CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE`: elements outside the tensor are zero.
const FILL_ZERO: i32 = 0;

impl TensorMap {
    /// Describes boxes whose rows are stored with the 128-byte swizzle that `wgmma` reads.
    pub fn new(context: &Context, boxes: &Boxes) -> Result<TensorMap> {
        let Boxes { address, dims, strides, size } = boxes;
        let mut map = TensorMap([0; 16]);
        let steps = [1u32; 3];
        // SAFETY: the arrays have the lengths of a tensor with three dimensions; the map has 128 bytes at a multiple of 64.
        let status = unsafe {
            (context.api().cuTensorMapEncodeTiled)(
                (&raw mut map).cast::<c_void>(),
                BF16,
                3,
                *address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                size.as_ptr(),
                steps.as_ptr(),
                NOT_INTERLEAVED,
                SWIZZLE_128,
                PROMOTE_256,
                FILL_ZERO,
            )
        };
        if status != 0 {
            return Err(CudaError::new(format!(
                "the copy engine cannot read {boxes:?} (status {status})"
            )));
        }
        Ok(map)
    }
}
