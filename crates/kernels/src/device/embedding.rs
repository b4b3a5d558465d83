//! Rows of a table by token id.

use super::{Device, OpClass, with_float};
use crate::cpu::embedding::{self, Place};
use crate::{View, ViewMut};

/// Which rows of a vocabulary a table holds.
pub use crate::cpu::embedding::Held as Vocabulary;

impl Device {
    /// The table's row of each id (tokens, dim), or zeros where another rank holds it, plus that of its
    /// position: `start + row % len`.
    #[allow(clippy::too_many_arguments)] // the table, the positions, and where each begins
    pub fn embed(
        &self,
        ids: View<'_>,
        table: View<'_>,
        held: Vocabulary,
        positions: Option<View<'_>>,
        start: usize,
        len: usize,
        out: ViewMut<'_>,
    ) {
        with_float!(table.dtype(), E => self.on_cpu(OpClass::Embedding, |cpu| {
            let positions = positions.map(|positions| (positions.host::<E>(), Place { start, len }));
            embedding::forward::<E>(cpu, ids.host(), table.host(), held, positions, out.host())
        }))
    }

    /// Adds each row of `dy` to the row of its id; the table's gradient is cleared before, unless `accumulate`.
    pub fn embed_backward(
        &self,
        ids: View<'_>,
        dy: View<'_>,
        held: Vocabulary,
        dtable: ViewMut<'_>,
        accumulate: bool,
    ) {
        with_float!(dy.dtype(), E => self.on_cpu(OpClass::Embedding, |cpu| {
            embedding::backward::<E>(cpu, ids.host(), dy.host(), held, dtable.host(), accumulate)
        }))
    }

    /// The gradient of the positions `start..` of sequences of `len`.
    pub fn embed_positions_backward(
        &self,
        dy: View<'_>,
        start: usize,
        len: usize,
        dpositions: ViewMut<'_>,
        accumulate: bool,
    ) {
        let (dim, place) = (dy.cols(), Place { start, len });
        with_float!(dy.dtype(), E => self.on_cpu(OpClass::Embedding, |cpu| {
            embedding::positions_backward::<E>(cpu, dy.host(), dim, place, dpositions.host(), accumulate)
        }))
    }
}
