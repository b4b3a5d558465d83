//! Compares two checkpoints of any layouts tensor by tensor.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::manifest::TensorKind;
use crate::tensors::{Named, Tensors};
use serde::Serialize;

/// A tensor that differs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TensorDiff {
    pub kind: TensorKind,
    pub name: String,
    /// Number of elements with different bits, and number of elements.
    pub elements: usize,
    pub of: usize,
    /// Largest absolute difference; `None` if it is not finite.
    pub max_abs: Option<f64>,
    /// Flat index of the first difference, and the two values.
    pub first: (usize, f32, f32),
}

/// The tensors that both checkpoints have and that differ in at least one bit, in forward order.
pub fn diff<'a>(
    one: &'a Checkpoint,
    other: &'a Checkpoint,
) -> impl Iterator<Item = Result<TensorDiff>> + 'a {
    let kinds = [TensorKind::Param, TensorKind::First, TensorKind::Second].into_iter();
    let both = kinds.filter_map(|kind| Some((kind, one.tensors(kind)?, other.tensors(kind)?)));
    both.flat_map(|(kind, a, b)| {
        let named = a.list_of().iter().filter(move |named| b.list_of().contains(named));
        named.filter_map(move |named| compare(kind, named, &a, &b).transpose())
    })
}

fn compare(
    kind: TensorKind,
    named: &Named,
    one: &dyn Tensors,
    other: &dyn Tensors,
) -> Result<Option<TensorDiff>> {
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
    Ok(Some(TensorDiff {
        kind,
        name: named.name.clone(),
        elements: (0..a.len()).filter(differ).count(),
        of: a.len(),
        max_abs: max.is_finite().then_some(max),
        first: (first, a[first], b[first]),
    }))
}
