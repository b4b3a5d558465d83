//! The functions, types and constants of cuBLASLt that are used.

use std::ffi::{c_int, c_void};

use lockstep_cuda::{Handle, function_table};

function_table! {
    /// Functions of `libcublasLt.so`.
    Functions {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtCreate(handle: *mut Handle) -> c_int;
        fn cublasLtMatmulDescCreate(desc: *mut Handle, compute: c_int, scale: c_int) -> c_int;
        fn cublasLtMatmulDescDestroy(desc: Handle) -> c_int;
        fn cublasLtMatmulDescSetAttribute(desc: Handle, attribute: c_int, value: *const c_void, bytes: usize) -> c_int;
        fn cublasLtMatrixLayoutCreate(layout: *mut Handle, kind: c_int, rows: u64, cols: u64, ld: i64) -> c_int;
        fn cublasLtMatrixLayoutDestroy(layout: Handle) -> c_int;
        fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(preference: Handle, attribute: c_int, value: *const c_void, bytes: usize) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: Handle,
            desc: Handle,
            a: Handle,
            b: Handle,
            c: Handle,
            d: Handle,
            preference: Handle,
            requested: c_int,
            results: *mut HeuristicResult,
            found: *mut c_int,
        ) -> c_int;
        fn cublasLtMatmulAlgoCheck(
            handle: Handle,
            desc: Handle,
            a: Handle,
            b: Handle,
            c: Handle,
            d: Handle,
            algorithm: *const Algorithm,
            result: *mut HeuristicResult,
        ) -> c_int;
        fn cublasLtMatmul(
            handle: Handle,
            desc: Handle,
            alpha: *const c_void,
            a: *const c_void,
            a_layout: Handle,
            b: *const c_void,
            b_layout: Handle,
            beta: *const c_void,
            c: *const c_void,
            c_layout: Handle,
            d: *mut c_void,
            d_layout: Handle,
            algorithm: *const Algorithm,
            workspace: *mut c_void,
            workspace_bytes: usize,
            stream: Handle,
        ) -> c_int;
    }
}

/// `cublasLtMatmulAlgo_t`, which is opaque.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Algorithm(pub [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeuristicResult {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
    pub state: c_int,
    pub waves: f32,
    reserved: [c_int; 4],
}

/// `cudaDataType_t`
pub(crate) const R_32F: c_int = 0;
pub(crate) const R_16BF: c_int = 14;
pub(crate) const R_8F_E4M3: c_int = 28;
pub(crate) const R_8F_E5M2: c_int = 29;
/// `cublasComputeType_t`
pub(crate) const COMPUTE_32F: c_int = 68;
pub(crate) const COMPUTE_32F_FAST_TF32: c_int = 77;

/// `cublasLtMatmulDescAttributes_t`
pub(crate) const TRANSA: c_int = 3;
pub(crate) const TRANSB: c_int = 4;
pub(crate) const EPILOGUE: c_int = 7;
pub(crate) const BIAS_POINTER: c_int = 8;
pub(crate) const EPILOGUE_AUX_POINTER: c_int = 11;
pub(crate) const EPILOGUE_AUX_LD: c_int = 12;
pub(crate) const A_SCALE_POINTER: c_int = 17;
pub(crate) const B_SCALE_POINTER: c_int = 18;
pub(crate) const FAST_ACCUM: c_int = 25;
pub(crate) const BIAS_DATA_TYPE: c_int = 26;

/// `cublasLtEpilogue_t`
pub(crate) const EPILOGUE_DEFAULT: c_int = 1;
pub(crate) const EPILOGUE_BIAS: c_int = 4;
pub(crate) const EPILOGUE_DGELU: c_int = 64 | 128;
pub(crate) const EPILOGUE_GELU_AUX: c_int = 32 | 128;
pub(crate) const EPILOGUE_GELU_AUX_BIAS: c_int = EPILOGUE_GELU_AUX | EPILOGUE_BIAS;

/// `cublasLtMatmulPreferenceAttributes_t`
pub(crate) const MAX_WORKSPACE_BYTES: c_int = 1;
pub(crate) const MIN_ALIGNMENT_A_BYTES: c_int = 5;
pub(crate) const MIN_ALIGNMENT_B_BYTES: c_int = 6;
pub(crate) const MIN_ALIGNMENT_C_BYTES: c_int = 7;
pub(crate) const MIN_ALIGNMENT_D_BYTES: c_int = 8;
