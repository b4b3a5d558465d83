//! Rotary position embedding (RoFormer, Su et al. 2021), in place on the heads of a matrix of tokens. Pairs
//! are (i, i + head_dim / 2), as in the Llama models of Hugging Face. Knows nothing of attention.

use super::vector::{Job, Vector, run};
use super::{Cpu, Level};
use crate::Float;

/// Cosines and sines of every position, computed once, in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    head_dim: usize,
    positions: usize,
    cos: Vec<f32>, // (positions, head_dim / 2)
    sin: Vec<f32>, // (positions, head_dim / 2)
}

/// How Llama 3.1 and later stretch the slow rotations to longer texts than they were first trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// How much slower the slowest rotations become.
    pub factor: f64,
    /// Rotations with fewer turns than this in the first context are slowed by the whole factor,
    pub low_freq_factor: f64,
    /// and those with more than this are left as they are.
    pub high_freq_factor: f64,
    /// The first context, in tokens.
    pub original_positions: usize,
}

/// The position of each row.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// Sequences of `len` rows: row r stands at `start + r % len`.
    From { start: usize, len: usize },
    /// Sequences of as many rows as there are positions here: row r stands at `list[r % list.len()]`.
    List(&'a [u32]),
}

/// What to turn: in each row, `heads` heads side by side from `offset` on. Queries and keys that lie beside
/// each other are one call with the heads of both.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    pub table: &'a Table,
    pub rows: usize,
    pub heads: usize,
    pub offset: usize,
    pub stride: usize,
    pub positions: Positions<'a>,
}

impl Table {
    /// # Panics
    /// When `head_dim` is odd.
    pub fn new(head_dim: usize, positions: usize, theta: f64, scaling: Option<Llama3>) -> Table {
        assert!(head_dim.is_multiple_of(2), "head_dim={head_dim} does not fall into pairs");
        let speeds: Vec<f64> = (0..head_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64))
            .map(|speed| scaling.map_or(speed, |scaling| scaling.slowed(speed)))
            .collect();
        let angles =
            (0..positions).flat_map(|at| speeds.iter().map(move |speed| at as f64 * speed));
        let (cos, sin) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        Table { head_dim, positions, cos, sin }
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// How many positions it has: 0 to one less.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Cosines and sines of one position. (head_dim / 2) each
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.head_dim / 2;
        let range = position * half..(position + 1) * half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

impl Llama3 {
    fn slowed(&self, speed: f64) -> f64 {
        let turns = self.original_positions as f64 * speed / std::f64::consts::TAU;
        let kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        let kept = kept.clamp(0.0, 1.0);
        speed * kept + speed / self.factor * (1.0 - kept)
    }
}

impl Positions<'_> {
    fn of(&self, row: usize) -> usize {
        match self {
            Positions::From { start, len } => start + row % len,
            Positions::List(list) => list[row % list.len()] as usize,
        }
    }

    /// One more than the last that any row has.
    fn end(&self, rows: usize) -> usize {
        match self {
            _ if rows == 0 => 0,
            Positions::From { start, len } => start + rows.min(*len),
            Positions::List(list) => {
                list.iter().take(rows).max().map_or(0, |last| *last as usize + 1)
            }
        }
    }
}

/// Turns every pair by its position's angle.
///
/// # Panics
/// When the matrix is smaller than `rope` says, or a position is beyond the table.
pub fn forward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    turn(cpu, data, rope, 1.0);
}

/// Turns gradients back by the same angles: a rotation's transpose is its inverse.
///
/// # Panics
/// As `forward`.
pub fn backward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    turn(cpu, data, rope, -1.0);
}

fn turn<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>, sign: f32) {
    let Rope { table, rows, heads, offset, stride, positions } = *rope;
    let width = offset + heads * table.head_dim;
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + width };
    assert!(
        width <= stride && needed <= data.len(),
        "{rows} rows of {width} with stride {stride} need {needed} elements, not {}",
        data.len()
    );
    let end = positions.end(rows);
    assert!(
        end <= table.positions,
        "position {} is beyond the table's {}; make it with more",
        end - 1,
        table.positions
    );
    let start = Start(data.as_mut_ptr());
    let grain = (4096 / (heads * table.head_dim).max(1)).max(1);
    cpu.team.split(rows, grain, &|mine| {
        for row in mine {
            // SAFETY: rows are apart, each is one member's, and the last ends inside the matrix.
            unsafe { turn_row(cpu.level, start.row(row * stride + offset), rope, row, sign) };
        }
    });
}

/// Where the matrix starts, for all members.
struct Start<E>(*mut E);

// SAFETY: the members reach rows of their own only.
unsafe impl<E: Send> Sync for Start<E> {}

impl<E> Start<E> {
    fn row(&self, at: usize) -> *mut E {
        self.0.wrapping_add(at)
    }
}

unsafe fn turn_row<E: Float>(level: Level, row: *mut E, rope: &Rope<'_>, number: usize, sign: f32) {
    let (cos, sin) = rope.table.at(rope.positions.of(number));
    // SAFETY: handed on.
    unsafe { run(level, Turn { row, heads: rope.heads, cos, sin, sign }) };
}

struct Turn<'a, E> {
    row: *mut E, // (heads, head_dim)
    heads: usize,
    cos: &'a [f32], // (head_dim / 2)
    sin: &'a [f32], // (head_dim / 2)
    sign: f32,
}

impl<E: Float> Job for Turn<'_, E> {
    /// # Safety
    /// The row is there and nobody else's.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let half = self.cos.len();
        for head in 0..self.heads {
            // SAFETY: as above; the two halves are apart.
            let (low, high) = unsafe {
                let low = self.row.add(head * 2 * half);
                let high = low.add(half);
                (
                    std::slice::from_raw_parts_mut(low, half),
                    std::slice::from_raw_parts_mut(high, half),
                )
            };
            for (((x, y), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                let (a, b, sin) = (x.as_f32(), y.as_f32(), sin * self.sign);
                *x = E::round_from(a * cos - b * sin);
                *y = E::round_from(b * cos + a * sin);
            }
        }
    }
}
