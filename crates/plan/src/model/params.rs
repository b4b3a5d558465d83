//! Parameters of a block: names, shapes, initialization, and how ranks split them.
//!
//! The parameters of a block are stored in one flat buffer, in the order of its list. A matrix is (out, in) in
//! row-major order. Weights that one multiply can use together are adjacent: q, k and v are one (q + k + v, dim)
//! matrix to the kernel and three tensors to a checkpoint; the same holds for gate and up.

use std::ops::Range;

use crate::cut;
use crate::mesh::{Coord, Mesh};

/// A named tensor in the flat buffer of a block.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Name within the block: `attention.q.weight`.
    pub name: String,
    pub dims: Vec<usize>,
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to gains and biases.
    pub decay: bool,
    /// How the ranks of the tensor axis split it.
    pub split: Split,
    /// Expert that it belongs to; the ranks of the expert axis divide the experts among them.
    pub expert: Option<usize>,
    /// A copy of it is on the first and on the last pipeline stage, and their gradients are summed.
    pub tied: bool,
    /// The tensor that this is a slice of.
    pub whole: Whole,
}

/// A tensor as a checkpoint stores it, and where a rank's slice of it starts.
#[derive(Clone, PartialEq, Debug)]
pub struct Whole {
    /// Name with the block: `layers.0.attention.q.weight`.
    pub name: String,
    pub dims: Vec<usize>,
    /// Index among all tensors of the model; selects the random numbers of its initial values.
    pub number: u64,
    /// Dimension along which the slice is cut, and its first index there.
    pub dim: usize,
    pub start: usize,
}

/// How the ranks of the tensor axis split a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Every rank has all of it and computes the same gradient.
    Replicated,
    /// Every rank has all of it. With sequence parallelism each computes the gradient of its own tokens.
    Norm,
    /// Evenly by rows.
    Rows,
    /// Evenly by columns.
    Cols,
    /// By rows that belong to key/value heads; with fewer heads than ranks, several ranks have the same rows.
    Keys,
    /// By rows; some ranks may have one more than others.
    Vocab,
}

/// Value of a parameter before the first step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    Zeros,
    Ones,
    /// Normally distributed with mean zero and this standard deviation.
    Normal(f32),
}

/// Parameters of one block: the unit that is bucketed, gathered and released, recomputed, and placed on a pipeline
/// stage.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockParams {
    /// `embed`, `layers.0`, …, `head`; unique in the model.
    pub name: String,
    /// Index among the blocks of the model.
    pub number: usize,
    pub params: Vec<Param>,
    /// A parameter of an earlier block that this block also computes with.
    pub tied: Option<Tied>,
}

/// A parameter that a block shares with an earlier one, such as an output projection that is the token embedding.
///
/// If there are several pipeline stages, the earlier block is the model's first, this block its last, and each gets a
/// copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tied {
    /// Name of the copy in this block, where it has one.
    pub name: String,
    /// The block and the parameter that it shares.
    pub block: String,
    pub param: String,
}

impl Param {
    /// A matrix (rows, cols), initialized from a normal distribution. Weight decay applies.
    pub fn matrix(name: &str, dims: [usize; 2], std: f32, split: Split) -> Param {
        Param::new(name, dims.to_vec(), Init::Normal(std), split)
    }

    /// A gain or a bias. Weight decay does not apply.
    pub fn vector(name: &str, len: usize, init: Init, split: Split) -> Param {
        Param::new(name, vec![len], init, split)
    }

    fn new(name: &str, dims: Vec<usize>, init: Init, split: Split) -> Param {
        // `number_tensors` sets name and number.
        let whole = Whole { name: String::new(), dims: dims.clone(), number: 0, dim: 0, start: 0 };
        let decay = dims.len() > 1;
        Param { name: name.into(), dims, init, decay, split, expert: None, tied: false, whole }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether all ranks of the tensor axis compute the same gradient, rather than slices or parts of a sum.
    pub fn same_on_tensor(&self, sequence: bool) -> bool {
        match self.split {
            Split::Replicated => true,
            Split::Norm => !sequence,
            Split::Rows | Split::Cols | Split::Keys | Split::Vocab => false,
        }
    }

    /// The slice of the rank at `coord` along the tensor axis.
    pub(super) fn on_tensor_rank(&self, mesh: &Mesh, coord: Coord) -> Param {
        let slice = |dim: usize, parts: usize, index: usize| {
            let range = cut(self.dims[dim], parts, index);
            let mut dims = self.dims.clone();
            dims[dim] = range.len();
            let whole = Whole { dim, start: range.start, ..self.whole.clone() };
            Param { dims, whole, ..self.clone() }
        };
        match self.split {
            Split::Replicated | Split::Norm => self.clone(),
            Split::Rows | Split::Vocab => slice(0, mesh.tensor, coord.tensor),
            Split::Cols => slice(1, mesh.tensor, coord.tensor),
            Split::Keys => slice(0, mesh.tensor / mesh.keys, coord.tensor / mesh.keys),
        }
    }

    /// The contiguous runs of a slice in the whole tensor: where each starts there, and its range in the slice.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let Whole { dim, start, dims: whole, .. } = &self.whole;
        let inner: usize = self.dims[*dim..].iter().product();
        let (stride, first) = match self.dims.get(dim + 1..) {
            Some(rest) => {
                let below: usize = rest.iter().product();
                (whole[*dim] * below, start * below)
            }
            None => (0, *start),
        };
        let count: usize = self.dims[..*dim].iter().product();
        (0..count).map(move |run| (run * stride + first, run * inner..(run + 1) * inner))
    }
}

impl BlockParams {
    pub fn new(name: impl Into<String>, params: Vec<Param>) -> BlockParams {
        BlockParams { name: name.into(), number: 0, params, tied: None }
    }

    /// Elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.params.iter().map(Param::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Each parameter with its offset in the flat buffer.
    pub fn placed(&self) -> impl Iterator<Item = (usize, &Param)> {
        self.params.iter().scan(0, |end, param| {
            let start = *end;
            *end += param.len();
            Some((start, param))
        })
    }

    /// The parameter of this name, if the block has one.
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|param| param.name == name)
    }

    /// Range of a parameter in the flat buffer.
    ///
    /// # Panics
    /// If the block has no parameter of that name.
    pub fn range(&self, name: &str) -> Range<usize> {
        let (start, param) = self
            .placed()
            .find(|(_, param)| param.name == name)
            .unwrap_or_else(|| panic!("block {} has no parameter {name}", self.name));
        start..start + param.len()
    }
}

/// Numbers blocks and tensors in order, and gives tensors their names in the model.
pub(super) fn number_tensors(blocks: &mut [BlockParams]) {
    let mut count = 0;
    for (number, block) in blocks.iter_mut().enumerate() {
        block.number = number;
        for param in &mut block.params {
            param.whole.name = format!("{}.{}", block.name, param.name);
            param.whole.number = count;
            count += 1;
        }
    }
}
