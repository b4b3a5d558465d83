//! Histograms: sums of packed pairs by slot.

use std::ops::Range;

use lockstep_kernels::Team;

use crate::matrix::Matrix;
use crate::par::{Disjoint, for_each, pieces};

/// Features that a tree uses, by storage: (column in its block, first slot).
pub struct Columns {
    bytes: Vec<(u32, u32)>,
    words: Vec<(u32, u32)>,
    /// First slots of the byte columns, if all of them are used.
    all_bytes: Option<Vec<u32>>,
    sparse: bool,
}

impl Columns {
    /// The columns of the features for which `used` is true. Sparse columns are always summed: their entries are
    /// not ordered by feature.
    pub fn new(matrix: &Matrix, used: &[bool]) -> Columns {
        let list = |features: &[u32]| {
            let each = features.iter().enumerate().filter(|(_, feature)| used[**feature as usize]);
            each.map(|(column, feature)| (column as u32, matrix.layout.starts[*feature as usize]))
                .collect::<Vec<_>>()
        };
        let bytes = list(&matrix.byte_features);
        let all_bytes = (bytes.len() == matrix.byte_features.len())
            .then(|| bytes.iter().map(|(_, start)| *start).collect());
        Columns {
            bytes,
            words: list(&matrix.word_features),
            all_bytes,
            sparse: !matrix.entry_starts.is_empty(),
        }
    }
}

/// Rows between a row and the one whose memory is prefetched.
const AHEAD: usize = 16;

/// Rows of a node from which on its rows are divided between threads.
const SPLIT_ROWS: usize = 1 << 15;

/// A node whose histogram is built.
pub struct Task {
    /// Positions in the list of rows.
    pub rows: Range<usize>,
}

/// A zeroed histogram.
pub fn zeroed(matrix: &Matrix) -> Vec<i64> {
    vec![0; matrix.layout.slots()]
}

/// Builds histograms of several nodes into zeroed buffers. Large nodes are divided between threads, small ones are
/// distributed over them.
pub fn build(
    team: &Team,
    matrix: &Matrix,
    columns: &Columns,
    (rows, packed): (&[u32], &[i64]),
    tasks: &[Task],
    out: &mut [Vec<i64>],
) {
    let slots = matrix.layout.slots();
    let threads = team.size();
    for (task, out) in tasks.iter().zip(out.iter_mut()) {
        if threads == 1 || task.rows.len() < SPLIT_ROWS {
            continue;
        }
        let parts = pieces(task.rows.len(), SPLIT_ROWS / 4, threads);
        let mut extra: Vec<Vec<i64>> = vec![zeroed(matrix); parts.len() - 1];
        {
            let mut buffers: Vec<&mut Vec<i64>> = vec![out];
            buffers.extend(extra.iter_mut());
            let buffers = Disjoint::new(&mut buffers);
            for_each(team, parts.len(), &|part| {
                let range = task.rows.start + parts[part].start..task.rows.start + parts[part].end;
                // SAFETY: each part has its own buffer.
                let buffer = unsafe { buffers.element(part) };
                add(matrix, columns, &rows[range], packed, buffer);
            });
        }
        let sums = Disjoint::new(out);
        let ranges = pieces(slots, 4096, 4 * threads);
        for_each(team, ranges.len(), &|index| {
            // SAFETY: the ranges are disjoint.
            let sums = unsafe { sums.range(ranges[index].clone()) };
            for part in &extra {
                for (sum, value) in sums.iter_mut().zip(&part[ranges[index].clone()]) {
                    *sum += value;
                }
            }
        });
    }
    let small: Vec<usize> = (0..tasks.len())
        .filter(|task| threads == 1 || tasks[*task].rows.len() < SPLIT_ROWS)
        .collect();
    let out = Disjoint::new(out);
    for_each(team, small.len(), &|index| {
        let task = small[index];
        // SAFETY: each task has its own buffer.
        let buffer = unsafe { out.element(task) };
        add(matrix, columns, &rows[tasks[task].rows.clone()], packed, buffer);
    });
}

/// Adds the packed pairs of some rows to a histogram.
fn add(matrix: &Matrix, columns: &Columns, rows: &[u32], packed: &[i64], out: &mut [i64]) {
    assert!(out.len() >= matrix.layout.slots(), "the histogram has all slots");
    assert!(packed.len() == matrix.rows, "every row has a pair");
    match &columns.all_bytes {
        Some(starts) if !starts.is_empty() => {
            add_all_bytes(&matrix.bytes, starts, rows, packed, out)
        }
        _ if columns.bytes.is_empty() => {}
        _ => add_listed(
            &matrix.bytes,
            matrix.byte_features.len(),
            &columns.bytes,
            (rows, packed),
            out,
        ),
    }
    if !columns.words.is_empty() {
        let stride = matrix.word_features.len();
        add_listed(&matrix.words, stride, &columns.words, (rows, packed), out);
    }
    if columns.sparse {
        for row in rows {
            let row = *row as usize;
            let entries = matrix.entry_starts[row] as usize..matrix.entry_starts[row + 1] as usize;
            let pair = packed[row];
            for slot in &matrix.entries[entries] {
                out[*slot as usize] += pair;
            }
        }
    }
}

/// Slots of a byte column in the loop over rows.
const STRIDE: usize = 256;

/// All byte columns. Large nodes are summed with a fixed number of slots per column, which needs no table of starts.
fn add_all_bytes(bytes: &[u8], starts: &[u32], rows: &[u32], packed: &[i64], out: &mut [i64]) {
    let columns = starts.len();
    let is_fixed =
        starts.iter().enumerate().all(|(column, start)| *start as usize == column * STRIDE);
    if is_fixed && out.len() >= columns * STRIDE {
        return add_fixed(bytes, columns, rows, packed, out);
    }
    if rows.len() < 2 * STRIDE {
        let columns: Vec<(u32, u32)> = (0..).zip(starts.iter().copied()).collect();
        return add_listed(bytes, starts.len(), &columns, (rows, packed), out);
    }
    let mut sums = vec![0; columns * STRIDE];
    add_fixed(bytes, columns, rows, packed, &mut sums);
    for (sums, start) in sums.chunks_exact(STRIDE).zip(starts) {
        // Slots beyond those of the column are zero.
        let out = &mut out[*start as usize..];
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
}

/// Adds rows to a histogram with 256 slots per column.
fn add_fixed(bytes: &[u8], columns: usize, rows: &[u32], packed: &[i64], out: &mut [i64]) {
    assert!(out.len() >= columns * STRIDE, "every column has 256 slots");
    for (index, row) in rows.iter().enumerate() {
        if let Some(ahead) = rows.get(index + AHEAD) {
            prefetch(bytes, *ahead as usize * columns);
            prefetch(bytes, *ahead as usize * columns + columns - 1);
            prefetch(packed, *ahead as usize);
        }
        let row = *row as usize;
        let (bins, pair) = (&bytes[row * columns..][..columns], packed[row]);
        let (eights, rest) = bins.as_chunks::<8>();
        let mut first = 0;
        for eight in eights {
            let word = u64::from_le_bytes(*eight);
            for column in 0..8 {
                let bin = (word >> (8 * column)) as usize & 0xff;
                // SAFETY: first is a multiple of 256 below columns * 256 - 7 * 256, and the bin is below 256.
                unsafe { *out.get_unchecked_mut(first + column * STRIDE + bin) += pair };
            }
            first += 8 * STRIDE;
        }
        for bin in rest {
            // SAFETY: first is a multiple of 256 below columns * 256, and the bin is below 256.
            unsafe { *out.get_unchecked_mut(first + *bin as usize) += pair };
            first += STRIDE;
        }
    }
}

/// Some columns of a block of dense columns.
fn add_listed<T: Copy + Into<u32>>(
    bins: &[T],
    stride: usize,
    columns: &[(u32, u32)],
    (rows, packed): (&[u32], &[i64]),
    out: &mut [i64],
) {
    for (index, row) in rows.iter().enumerate() {
        if let Some(ahead) = rows.get(index + AHEAD) {
            prefetch(bins, *ahead as usize * stride);
            prefetch(packed, *ahead as usize);
        }
        let row = *row as usize;
        let (bins, pair) = (&bins[row * stride..][..stride], packed[row]);
        for (column, start) in columns {
            let bin: u32 = bins[*column as usize].into();
            out[(*start + bin) as usize] += pair;
        }
    }
}

/// Loads an element into the cache.
#[inline(always)]
fn prefetch<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if index < values.len() {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the element is in bounds, and a prefetch has no effect on values.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().add(index).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}
