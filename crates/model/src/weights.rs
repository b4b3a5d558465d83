//! The parameters of a model in device memory: one flat buffer per block, f32, and a copy in the type that
//! is computed with when that is another.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Tag, Tensor, View};
use lockstep_plan::model::{BlockParams, Init, Param, Shape};

/// All parameters, block by block.
pub struct Weights {
    /// What each block holds, and in which order.
    pub layout: Vec<BlockParams>,
    masters: Vec<Tensor>,
    copies: Option<Vec<Tensor>>,
}

impl Weights {
    /// Random ones. Each element is a function of (seed, its tensor, its place in it), so that any layout
    /// starts alike.
    pub fn init(device: &Device, shape: &Shape, dtype: Dtype, seed: u64) -> Weights {
        let mut weights = Weights::empty(device, shape, dtype);
        let mut stream = 0;
        for (block, master) in weights.layout.iter().zip(&mut weights.masters) {
            for (start, param) in block.placed() {
                let part = master.view_mut().part(start..start + param.len());
                match param.init {
                    Init::Zeros => device.fill(part, 0.0),
                    Init::Ones => device.fill(part, 1.0),
                    Init::Normal(std) => device.normal(part, seed, stream, 0, std),
                }
                stream += 1;
            }
        }
        weights.refresh(device);
        weights
    }

    /// From elsewhere: `read` is called with each tensor's global name and where to put it.
    pub fn load<E>(
        device: &Device,
        shape: &Shape,
        dtype: Dtype,
        mut read: impl FnMut(&str, &Param, &mut [f32]) -> Result<(), E>,
    ) -> Result<Weights, E> {
        let mut weights = Weights::empty(device, shape, dtype);
        for (block, master) in weights.layout.iter().zip(&mut weights.masters) {
            for (start, param) in block.placed() {
                let mut values = vec![0.0; param.len()];
                read(&format!("{}.{}", block.name, param.name), param, &mut values)?;
                device.write(master.view_mut().part(start..start + param.len()), &values);
            }
        }
        weights.refresh(device);
        Ok(weights)
    }

    fn empty(device: &Device, shape: &Shape, dtype: Dtype) -> Weights {
        let layout = shape.blocks();
        let buffers = |dtype| -> Vec<Tensor> {
            layout
                .iter()
                .map(|block| device.empty(1, block.len(), dtype, Tag::Parameters))
                .collect()
        };
        let masters = buffers(Dtype::F32);
        let copies = (dtype != Dtype::F32).then(|| buffers(dtype));
        Weights { layout, masters, copies }
    }

    /// Makes the copies follow the masters.
    pub fn refresh(&mut self, device: &Device) {
        for (copy, master) in self.copies.iter_mut().flatten().zip(&self.masters) {
            device.cast(master.view(), copy.view_mut());
        }
    }

    /// What a block computes with.
    pub fn block(&self, block: usize) -> View<'_> {
        self.copies.as_ref().unwrap_or(&self.masters)[block].view()
    }

    /// What the optimizer keeps: f32.
    pub fn master(&self, block: usize) -> View<'_> {
        self.masters[block].view()
    }

    /// A block's f32 values and the copy that must follow them.
    pub fn master_mut(&mut self, block: usize) -> (&mut Tensor, Option<&mut Tensor>) {
        (&mut self.masters[block], self.copies.as_mut().map(|copies| &mut copies[block]))
    }

    /// Flat buffers: embedding, layers, head.
    pub fn blocks(&self) -> usize {
        self.masters.len()
    }

    /// Every tensor: global name, dimensions, the block it is in and where.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &Param, usize, Range<usize>)> {
        self.layout.iter().enumerate().flat_map(|(index, block)| {
            block.placed().map(move |(start, param)| {
                (format!("{}.{}", block.name, param.name), param, index, start..start + param.len())
            })
        })
    }
}
