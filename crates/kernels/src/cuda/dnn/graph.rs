//! A graph of operations on tensors of four dimensions. Intermediate results are virtual: cuDNN fuses the operations
//! and never stores them.

use lockstep_cuda::Result;

use super::names::{self, DataType, Pointwise, RawDescriptor, Reduction};
use super::{Descriptor, Functions};

/// The operations of a graph so far, with everything they refer to.
pub(crate) struct Graph {
    pub(super) api: Functions,
    pub(super) operations: Vec<Descriptor>,
    /// Tensors and settings of operations.
    pub(super) parts: Vec<Descriptor>,
    /// Numbers that are passed by value, with the ids of their tensors.
    pub(super) scalars: Vec<(i64, f32)>,
    next_id: i64,
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    raw: RawDescriptor,
    pub dims: [i64; 4],
    pub strides: [i64; 4],
}

/// Ids below this one are chosen by the caller.
const FIRST_OWN_ID: i64 = 1000;

impl Graph {
    pub(super) fn new(api: Functions) -> Graph {
        let (operations, parts, scalars) = (Vec::new(), Vec::new(), Vec::new());
        Graph { api, operations, parts, scalars, next_id: FIRST_OWN_ID }
    }

    /// A tensor in device memory, whose address is given at execution under this id.
    pub fn tensor(
        &mut self,
        id: i64,
        data_type: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Tensor> {
        assert!(id < FIRST_OWN_ID, "id {id} is reserved");
        self.declare(id, data_type, (dims, strides), Storage::Memory)
    }

    /// An intermediate result.
    pub fn intermediate(
        &mut self,
        data_type: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Tensor> {
        let id = self.own_id();
        self.declare(id, data_type, (dims, strides), Storage::Virtual)
    }

    /// A number.
    pub fn scalar(&mut self, value: f32) -> Result<Tensor> {
        let id = self.own_id();
        self.scalars.push((id, value));
        self.declare(id, DataType::F32, ([1; 4], [1; 4]), Storage::Value)
    }

    fn own_id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id
    }

    fn declare(
        &mut self,
        id: i64,
        data_type: DataType,
        (dims, strides): ([i64; 4], [i64; 4]),
        storage: Storage,
    ) -> Result<Tensor> {
        let tensor = Descriptor::new(self.api, names::TENSOR)?;
        tensor.set(names::TENSOR_DATA_TYPE, &[data_type])?;
        tensor.set(names::TENSOR_DIMENSIONS, &dims)?;
        tensor.set(names::TENSOR_STRIDES, &strides)?;
        tensor.set(names::TENSOR_ID, &[id])?;
        tensor.set(names::TENSOR_ALIGNMENT, &[16i64])?;
        tensor.set(names::TENSOR_IS_VIRTUAL, &[storage == Storage::Virtual])?;
        tensor.set(names::TENSOR_IS_BY_VALUE, &[storage == Storage::Value])?;
        tensor.finalize()?;
        let raw = RawDescriptor(tensor.raw());
        self.parts.push(tensor);
        Ok(Tensor { raw, dims, strides })
    }

    /// `to` = a · b over the last two dimensions.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, to: Tensor) -> Result<()> {
        let settings = Descriptor::new(self.api, names::MATMUL)?;
        settings.set(names::MATMUL_PRECISION, &[DataType::F32])?;
        settings.finalize()?;
        let operation = Descriptor::new(self.api, names::MATMUL_OPERATION)?;
        operation.set(names::MATMUL_OPERATION_A, &[a.raw])?;
        operation.set(names::MATMUL_OPERATION_B, &[b.raw])?;
        operation.set(names::MATMUL_OPERATION_C, &[to.raw])?;
        operation.link(names::MATMUL_OPERATION_MATMUL, &settings)?;
        self.add(settings, operation)
    }

    /// `to` = the reduction of `from` over the dimensions in which `to` has the size 1, or over groups of heads.
    pub fn reduce(&mut self, how: Reduction, from: Tensor, to: Tensor) -> Result<()> {
        let settings = Descriptor::new(self.api, names::REDUCTION)?;
        settings.set(names::REDUCTION_PRECISION, &[DataType::F32])?;
        settings.set(names::REDUCTION_OPERATOR, &[how])?;
        settings.finalize()?;
        let operation = Descriptor::new(self.api, names::REDUCTION_OPERATION)?;
        operation.set(names::REDUCTION_OPERATION_X, &[from.raw])?;
        operation.set(names::REDUCTION_OPERATION_Y, &[to.raw])?;
        operation.link(names::REDUCTION_OPERATION_REDUCTION, &settings)?;
        self.add(settings, operation)
    }

    /// `to` = the elements of `from` with other dimensions and strides.
    pub fn reshape(&mut self, from: Tensor, to: Tensor) -> Result<()> {
        let operation = Descriptor::new(self.api, names::RESHAPE_OPERATION)?;
        operation.set(names::RESHAPE_OPERATION_X, &[from.raw])?;
        operation.set(names::RESHAPE_OPERATION_Y, &[to.raw])?;
        operation.finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// `to` = `x`, or `x` combined with `b`, element by element; dimensions of size 1 are broadcast.
    pub fn pointwise_to(
        &mut self,
        how: Pointwise,
        x: Tensor,
        b: Option<Tensor>,
        to: Tensor,
    ) -> Result<()> {
        let b = b.map(|b| (names::POINTWISE_OPERATION_B, b));
        let inputs = [Some((names::POINTWISE_OPERATION_X, x)), b];
        self.pointwise_with(how, DataType::F32, None, inputs.into_iter().flatten(), to)
    }

    /// The same with an f32 intermediate result of the shape of `x`.
    pub fn pointwise(&mut self, how: Pointwise, x: Tensor, b: Option<Tensor>) -> Result<Tensor> {
        let to = self.intermediate(DataType::F32, x.dims, x.strides)?;
        self.pointwise_to(how, x, b, to)?;
        Ok(to)
    }

    /// `x` where the index in dimension 2 is at least that in dimension 3, else `otherwise`.
    pub fn lower_triangle(&mut self, x: Tensor, otherwise: f32) -> Result<Tensor> {
        use names::{
            POINTWISE_OPERATION_B as B, POINTWISE_OPERATION_T as T, POINTWISE_OPERATION_X as X,
        };
        let otherwise = self.scalar(otherwise)?;
        let mut index = |axis| {
            let to = self.intermediate(DataType::I32, x.dims, x.strides)?;
            self.pointwise_with(Pointwise::Index, DataType::F32, Some(axis), [(X, x)], to)?;
            Ok(to)
        };
        let (row, column) = (index(2)?, index(3)?);
        let inside = self.intermediate(DataType::Bool, x.dims, x.strides)?;
        let inputs = [(X, row), (B, column)];
        self.pointwise_with(Pointwise::GreaterOrEqual, DataType::Bool, None, inputs, inside)?;
        let to = self.intermediate(DataType::F32, x.dims, x.strides)?;
        let inputs = [(X, x), (B, otherwise), (T, inside)];
        self.pointwise_with(Pointwise::Select, DataType::F32, None, inputs, to)?;
        Ok(to)
    }

    fn pointwise_with(
        &mut self,
        how: Pointwise,
        precision: DataType,
        axis: Option<i64>,
        inputs: impl IntoIterator<Item = (names::Attribute, Tensor)>,
        to: Tensor,
    ) -> Result<()> {
        let settings = Descriptor::new(self.api, names::POINTWISE)?;
        settings.set(names::POINTWISE_MODE, &[how])?;
        settings.set(names::POINTWISE_PRECISION, &[precision])?;
        if let Some(axis) = axis {
            settings.set(names::POINTWISE_AXIS, &[axis])?;
        }
        settings.finalize()?;
        let operation = Descriptor::new(self.api, names::POINTWISE_OPERATION)?;
        operation.link(names::POINTWISE_OPERATION_POINTWISE, &settings)?;
        for (attribute, tensor) in inputs {
            operation.set(attribute, &[tensor.raw])?;
        }
        operation.set(names::POINTWISE_OPERATION_Y, &[to.raw])?;
        operation.set(names::POINTWISE_OPERATION_ALPHA_1, &[1.0f32])?;
        operation.set(names::POINTWISE_OPERATION_ALPHA_2, &[1.0f32])?;
        self.add(settings, operation)
    }

    fn add(&mut self, settings: Descriptor, operation: Descriptor) -> Result<()> {
        operation.finalize()?;
        self.parts.push(settings);
        self.operations.push(operation);
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Storage {
    Memory,
    Virtual,
    Value,
}
