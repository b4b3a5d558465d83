//! Rows of a table by token id.

use super::{Device, Operation, with_float};
use crate::cpu::embedding::{self, Held, Place};
use crate::{View, ViewMut};

impl Device {
    /// The table's row of each id (tokens, dim), plus that of its position: `start + row % len`.
    pub fn embed(
        &self,
        ids: View<'_>,
        table: View<'_>,
        positions: Option<View<'_>>,
        start: usize,
        len: usize,
        out: ViewMut<'_>,
    ) {
        let held = Held::all(table.rows());
        with_float!(table.dtype(), E => self.on_cpu(Operation::Embedding, |cpu| {
            let positions = positions.map(|positions| (positions.host::<E>(), Place { start, len }));
            embedding::forward::<E>(cpu, ids.host(), table.host(), held, positions, out.host())
        }))
    }

    /// Adds each row of `dy` to the row of its id; the table's gradient is cleared before, unless `accumulate`.
    pub fn embed_backward(
        &self,
        ids: View<'_>,
        dy: View<'_>,
        dtable: ViewMut<'_>,
        accumulate: bool,
    ) {
        let held = Held::all(dtable.rows());
        with_float!(dy.dtype(), E => self.on_cpu(Operation::Embedding, |cpu| {
            embedding::backward::<E>(cpu, ids.host(), dy.host(), held, dtable.host(), accumulate)
        }))
    }

    /// The gradient of the positions of sequences of `len`.
    pub fn embed_positions_backward(
        &self,
        dy: View<'_>,
        len: usize,
        dpositions: ViewMut<'_>,
        accumulate: bool,
    ) {
        let (dim, place) = (dy.cols(), Place { start: 0, len });
        with_float!(dy.dtype(), E => self.on_cpu(Operation::Embedding, |cpu| {
            embedding::positions_backward::<E>(cpu, dy.host(), dim, place, dpositions.host(), accumulate)
        }))
    }
}
