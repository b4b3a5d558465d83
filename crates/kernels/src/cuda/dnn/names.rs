//! Numbers of the backend API that are used here, as in `cudnn_graph.h`.

use std::ffi::{c_int, c_void};

/// A kind of descriptor, and how messages call it.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub number: c_int,
    pub name: &'static str,
}

const fn kind(number: c_int, name: &'static str) -> Kind {
    Kind { number, name }
}

pub(super) const POINTWISE: Kind = kind(0, "pointwise");
pub(super) const ENGINE: Kind = kind(2, "engine");
pub(super) const ENGINE_CONFIG: Kind = kind(3, "engine configuration");
pub(super) const HEURISTICS: Kind = kind(4, "heuristics");
pub(super) const PLAN: Kind = kind(5, "execution plan");
pub(super) const POINTWISE_OPERATION: Kind = kind(13, "pointwise operation");
pub(super) const OPERATION_GRAPH: Kind = kind(15, "operation graph");
pub(super) const VARIANT_PACK: Kind = kind(16, "variant pack");
pub(super) const TENSOR: Kind = kind(17, "tensor");
pub(super) const MATMUL: Kind = kind(18, "matmul");
pub(super) const MATMUL_OPERATION: Kind = kind(19, "matmul operation");
pub(super) const REDUCTION: Kind = kind(21, "reduction");
pub(super) const REDUCTION_OPERATION: Kind = kind(22, "reduction operation");
pub(super) const RESHAPE_OPERATION: Kind = kind(31, "reshape operation");
#[cfg(test)]
pub(super) const DEVICE_PROPERTIES: Kind = kind(38, "device properties");

/// An attribute of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attribute(pub c_int);

pub(super) const POINTWISE_MODE: Attribute = Attribute(0);
pub(super) const POINTWISE_PRECISION: Attribute = Attribute(1);
pub(super) const POINTWISE_AXIS: Attribute = Attribute(9);
pub(super) const HEURISTICS_MODE: Attribute = Attribute(200);
pub(super) const HEURISTICS_GRAPH: Attribute = Attribute(201);
pub(super) const HEURISTICS_RESULTS: Attribute = Attribute(202);
pub(super) const HEURISTICS_DEVICE: Attribute = Attribute(204);
pub(super) const ENGINE_CONFIG_ENGINE: Attribute = Attribute(300);
pub(super) const PLAN_HANDLE: Attribute = Attribute(400);
pub(super) const PLAN_ENGINE_CONFIG: Attribute = Attribute(401);
pub(super) const PLAN_WORKSPACE: Attribute = Attribute(402);
pub(super) const PLAN_DEVICE: Attribute = Attribute(407);
pub(super) const POINTWISE_OPERATION_POINTWISE: Attribute = Attribute(750);
pub(super) const POINTWISE_OPERATION_X: Attribute = Attribute(751);
pub(super) const POINTWISE_OPERATION_B: Attribute = Attribute(752);
pub(super) const POINTWISE_OPERATION_Y: Attribute = Attribute(753);
pub(super) const POINTWISE_OPERATION_ALPHA_1: Attribute = Attribute(754);
pub(super) const POINTWISE_OPERATION_ALPHA_2: Attribute = Attribute(755);
pub(super) const POINTWISE_OPERATION_T: Attribute = Attribute(758);
pub(super) const GRAPH_HANDLE: Attribute = Attribute(800);
pub(super) const GRAPH_OPERATIONS: Attribute = Attribute(801);
pub(super) const TENSOR_ALIGNMENT: Attribute = Attribute(900);
pub(super) const TENSOR_DATA_TYPE: Attribute = Attribute(901);
pub(super) const TENSOR_DIMENSIONS: Attribute = Attribute(902);
pub(super) const TENSOR_STRIDES: Attribute = Attribute(903);
pub(super) const TENSOR_ID: Attribute = Attribute(906);
pub(super) const TENSOR_IS_VIRTUAL: Attribute = Attribute(907);
pub(super) const TENSOR_IS_BY_VALUE: Attribute = Attribute(908);
pub(super) const PACK_IDS: Attribute = Attribute(1000);
pub(super) const PACK_POINTERS: Attribute = Attribute(1001);
pub(super) const PACK_WORKSPACE: Attribute = Attribute(1003);
pub(super) const ENGINE_NUMERICAL_NOTES: Attribute = Attribute(1303);
pub(super) const MATMUL_PRECISION: Attribute = Attribute(1500);
pub(super) const MATMUL_OPERATION_A: Attribute = Attribute(1520);
pub(super) const MATMUL_OPERATION_B: Attribute = Attribute(1521);
pub(super) const MATMUL_OPERATION_C: Attribute = Attribute(1522);
pub(super) const MATMUL_OPERATION_MATMUL: Attribute = Attribute(1523);
pub(super) const REDUCTION_OPERATOR: Attribute = Attribute(1600);
pub(super) const REDUCTION_PRECISION: Attribute = Attribute(1601);
pub(super) const REDUCTION_OPERATION_X: Attribute = Attribute(1610);
pub(super) const REDUCTION_OPERATION_Y: Attribute = Attribute(1611);
pub(super) const REDUCTION_OPERATION_REDUCTION: Attribute = Attribute(1612);
pub(super) const RESHAPE_OPERATION_X: Attribute = Attribute(2200);
pub(super) const RESHAPE_OPERATION_Y: Attribute = Attribute(2201);
#[cfg(test)]
pub(super) const DEVICE_PROPERTIES_JSON: Attribute = Attribute(2702);

/// A type of attribute values.
///
/// # Safety
/// `TYPE` must be the number for values with the layout of `Self`.
pub(crate) unsafe trait Value: Copy {
    const TYPE: c_int;
}

macro_rules! values {
    ($($type:ty = $number:expr;)*) => {
        $(
            // SAFETY: the number and the C type are those of `cudnn_graph.h`.
            unsafe impl Value for $type {
                const TYPE: c_int = $number;
            }
        )*
    };
}

values! {
    HandleValue = 0;
    DataType = 1;
    bool = 2;
    i64 = 3;
    f32 = 4;
    Pointer = 6;
    HeuristicsMode = 8;
    NumericalNote = 11;
    Pointwise = 14;
    RawDescriptor = 15;
    Reduction = 18;
}

#[cfg(test)]
values! {
    Character = 24;
}

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct HandleValue(pub *mut c_void);

/// A device address, or the host address of a number passed by value.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Pointer(pub *const c_void);

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct RawDescriptor(pub *mut c_void);

#[cfg(test)]
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Character(#[allow(dead_code)] pub u8); // read by cuDNN

#[derive(Clone, Copy, PartialEq)]
#[repr(transparent)]
pub(super) struct NumericalNote(pub c_int);

pub(super) const NONDETERMINISTIC: NumericalNote = NumericalNote(4);

#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum HeuristicsMode {
    A = 3,
}

/// Element type of a tensor, or precision of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(i32)]
pub(crate) enum DataType {
    F32 = 0,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(crate) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    GreaterOrEqual = 303,
    Index = 501,
    Select = 601,
}

#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(crate) enum Reduction {
    Sum = 0,
    Max = 3,
}
