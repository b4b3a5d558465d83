//! Two checkpoints side by side: which tensors differ, and by how much. Whatever their layouts were.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::manifest::Kind;
use crate::tensors::{Named, Tensors};
use serde::Serialize;

/// A tensor that is not the same in both.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Apart {
    pub kind: Kind,
    pub name: String,
    /// Elements of other bits, of how many.
    pub elements: usize,
    pub of: usize,
    /// The largest difference; none where one of the numbers is none.
    pub max_abs: Option<f64>,
    /// The first element that differs, flattened, and its two values.
    pub first: (usize, f32, f32),
}

/// All tensors that both have and that differ in a bit, one at a time in the order of the forward pass.
pub fn diff<'a>(
    one: &'a Checkpoint,
    other: &'a Checkpoint,
) -> impl Iterator<Item = Result<Apart>> + 'a {
    let kinds = [Kind::Param, Kind::First, Kind::Second].into_iter();
    let both = kinds.filter_map(|kind| Some((kind, one.tensors(kind)?, other.tensors(kind)?)));
    both.flat_map(|(kind, a, b)| {
        let named = a.list_of().iter().filter(move |named| b.list_of().contains(named));
        named.filter_map(move |named| apart(kind, named, &a, &b).transpose())
    })
}

fn apart(
    kind: Kind,
    named: &Named,
    one: &dyn Tensors,
    other: &dyn Tensors,
) -> Result<Option<Apart>> {
    let (mut a, mut b) = (vec![0.0; named.len()], vec![0.0; named.len()]);
    one.read(&named.name, &mut a)?;
    other.read(&named.name, &mut b)?;
    let differ = |at: &usize| a[*at].to_bits() != b[*at].to_bits();
    let Some(first) = (0..a.len()).find(differ) else { return Ok(None) };
    let far = a.iter().zip(&b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    let max = far.fold(
        0.0,
        |most: f64, far| if far.is_nan() || most.is_nan() { f64::NAN } else { most.max(far) },
    );
    Ok(Some(Apart {
        kind,
        name: named.name.clone(),
        elements: (0..a.len()).filter(differ).count(),
        of: a.len(),
        max_abs: max.is_finite().then_some(max),
        first: (first, a[first], b[first]),
    }))
}
