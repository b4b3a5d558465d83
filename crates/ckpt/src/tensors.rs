//! Named f32 tensors in memory, in a checkpoint or in a Hugging Face folder.

use crate::error::Result;
use lockstep_plan::model::{BlockParams, Param, Runs, Shape};
use std::collections::HashMap;

/// Global name, such as `layers.0.attention.q.weight`, and dims of a tensor.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Named {
    pub name: String,
    pub dims: Vec<usize>,
}

impl Named {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A set of tensors that are read one at a time.
pub trait Tensors {
    /// All tensors, in the best order for reading.
    fn list(&self) -> &[Named];

    /// Reads a tensor.
    ///
    /// # Panics
    /// If the tensor does not exist or differs in length from `out`.
    fn read(&self, name: &str, out: &mut [f32]) -> Result<()>;

    /// Reads some elements of a tensor, in order.
    ///
    /// # Panics
    /// As `read`, or if `runs` extend past the end of the tensor.
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
    /// If a slice and its dims differ in length.
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

/// The parameters of a model, in forward order.
pub fn params_of(shape: &Shape) -> Vec<Named> {
    let named = |block: &BlockParams, param: &Param| Named {
        name: format!("{}.{}", block.name, param.name),
        dims: param.dims.clone(),
    };
    let blocks = shape.blocks();
    blocks.iter().flat_map(|block| block.params.iter().map(|param| named(block, param))).collect()
}

/// Describes how a list of tensors differs from the expected one.
pub(crate) fn differences(found: &[Named], wanted: &[Named]) -> Vec<String> {
    let index = |list: &[Named]| -> HashMap<String, Vec<usize>> {
        list.iter().map(|named| (named.name.clone(), named.dims.clone())).collect()
    };
    let (found_dims, wanted_dims) = (index(found), index(wanted));
    let mut problems = Vec::new();
    for Named { name, dims } in wanted {
        match found_dims.get(name) {
            None => problems.push(format!("{name} {dims:?} is missing")),
            Some(found) if found != dims => {
                problems.push(format!("{name} has shape {found:?}, expected {dims:?}"))
            }
            Some(_) => {}
        }
    }
    let unknown = found.iter().filter(|named| !wanted_dims.contains_key(&named.name));
    problems.extend(
        unknown.map(|named| {
            format!("{} {:?} is not a parameter of this model", named.name, named.dims)
        }),
    );
    problems
}
