//! Named f32 tensors, wherever they lie: in memory, in a checkpoint, in a Hugging Face folder.

use crate::error::Result;
use lockstep_plan::model::{BlockParams, Param, Runs, Shape};
use std::collections::HashMap;

/// What a tensor is called and how large it is. The name is global: `layers.0.attention.q.weight`.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Named {
    pub name: String,
    pub dims: Vec<usize>,
}

impl Named {
    /// Elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Tensors that are read one at a time.
pub trait Tensors {
    /// All of them, in the order in which they are best read.
    fn list(&self) -> &[Named];

    /// Copies one out.
    ///
    /// # Panics
    /// When there is none of that name, or it has another number of elements than `out`.
    fn read(&self, name: &str, out: &mut [f32]) -> Result<()>;

    /// Copies some of its elements out, in order. Who can reads no others.
    ///
    /// # Panics
    /// As `read`, or when `runs` reach past the tensor's end.
    fn read_runs(&self, name: &str, runs: &[Runs], out: &mut [f32]) -> Result<()> {
        let named = self.list().iter().find(|named| named.name == name);
        let mut whole = vec![0.0; named.unwrap_or_else(|| panic!("no tensor {name}")).len()];
        self.read(name, &mut whole)?;
        let mut at = 0;
        for run in runs.iter().flat_map(|runs| runs.ranges()) {
            out[at..at + run.len()].copy_from_slice(&whole[run.clone()]);
            at += run.len();
        }
        Ok(())
    }
}

/// Tensors in memory.
pub struct Slices<'a> {
    list: Vec<Named>,
    data: HashMap<String, &'a [f32]>,
}

impl<'a> Slices<'a> {
    /// # Panics
    /// When a slice has another number of elements than its dims.
    pub fn new(tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>) -> Slices<'a> {
        let (mut list, mut all) = (Vec::new(), HashMap::new());
        for (name, dims, data) in tensors {
            let named = Named { name, dims };
            assert_eq!(named.len(), data.len(), "{} {:?}", named.name, named.dims);
            all.insert(named.name.clone(), data);
            list.push(named);
        }
        Slices { list, data: all }
    }
}

impl Tensors for Slices<'_> {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let data = self.data.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        out.copy_from_slice(data);
        Ok(())
    }
}

/// The parameters of a model under their global names, in the order of the forward pass.
pub fn params_of(shape: &Shape) -> Vec<Named> {
    let named = |block: &BlockParams, param: &Param| Named {
        name: format!("{}.{}", block.name, param.name),
        dims: param.dims.clone(),
    };
    let blocks = shape.blocks();
    blocks.iter().flat_map(|block| block.params.iter().map(|param| named(block, param))).collect()
}

/// How a list differs from the one that is wanted.
pub(crate) fn differences(found: &[Named], wanted: &[Named]) -> Vec<String> {
    let index = |list: &[Named]| -> HashMap<String, Vec<usize>> {
        list.iter().map(|named| (named.name.clone(), named.dims.clone())).collect()
    };
    let (found_dims, wanted_dims) = (index(found), index(wanted));
    let mut mistakes = Vec::new();
    for Named { name, dims } in wanted {
        match found_dims.get(name) {
            None => mistakes.push(format!("{name} {dims:?} is missing")),
            Some(found) if found != dims => {
                mistakes.push(format!("{name} is {found:?}, the model's is {dims:?}"))
            }
            Some(_) => {}
        }
    }
    let unknown = found.iter().filter(|named| !wanted_dims.contains_key(&named.name));
    mistakes.extend(
        unknown
            .map(|named| format!("{} {:?} is no parameter of this model", named.name, named.dims)),
    );
    mistakes
}
