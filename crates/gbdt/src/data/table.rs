//! Rows of one rank before binning. Values are f32; missing values are NaN in dense chunks and absent in sparse ones.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

/// Rows of one rank, in the order of the file.
#[derive(Default)]
pub struct Table {
    /// Names of the features.
    pub names: Vec<String>,
    /// For each feature: its categories in the order of their codes, if it is categorical.
    pub categories: Vec<Option<Vec<String>>>,
    pub chunks: Vec<Chunk>,
    /// Empty if the data has no labels.
    pub label: Vec<f32>,
    pub weight: Option<Vec<f32>>,
    /// Group (query) of each row; the rows of a group are consecutive.
    pub group: Option<Vec<u64>>,
}

impl Table {
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.rows).sum()
    }

    pub fn features(&self) -> usize {
        self.names.len()
    }

    /// A table of dense values in row order (rows × names). NaN is a missing value.
    pub fn dense(names: Vec<String>, values: Vec<f32>, label: Vec<f32>) -> Table {
        let columns = names.len();
        let rows = values.len().checked_div(columns).unwrap_or(label.len());
        let values = Values::Rows { store: Store::Memory(values), stride: columns, first: 0 };
        Table {
            categories: vec![None; columns],
            names,
            chunks: vec![Chunk::new(rows, values)],
            label,
            ..Table::default()
        }
    }

    /// Names `f0`, `f1`, ….
    pub fn numbered(features: usize) -> Vec<String> {
        (0..features).map(|feature| format!("f{feature}")).collect()
    }
}

/// Consecutive rows of a table.
pub struct Chunk {
    pub rows: usize,
    pub values: Values,
    /// For categorical features: the code of each value of this chunk.
    pub codes: BTreeMap<usize, Vec<f32>>,
}

pub enum Values {
    /// Row by row: element (r, c) is at `first + r * stride + c`.
    Rows { store: Store, stride: usize, first: usize },
    /// Column by column: element (r, c) is at `first + c * rows + r`.
    Columns { store: Store, first: usize },
    /// The entries of column c are `starts[c]..starts[c + 1]`, by increasing row.
    Sparse { starts: Vec<u32>, rows: Vec<u32>, values: Vec<f32> },
}

/// Memory of dense values.
pub enum Store {
    Memory(Vec<f32>),
    /// A mapped file; the values start at a byte offset that is a multiple of four.
    Mapped(Arc<Mmap>, usize),
}

impl Store {
    pub fn values(&self) -> &[f32] {
        match self {
            Store::Memory(values) => values,
            Store::Mapped(map, offset) => {
                let bytes = &map[*offset..];
                // SAFETY: every bit pattern is a valid f32. Only whole, aligned values are returned.
                let (head, values, _) = unsafe { bytes.align_to::<f32>() };
                assert!(head.is_empty(), "the values are aligned");
                values
            }
        }
    }
}

impl Chunk {
    pub fn new(rows: usize, values: Values) -> Chunk {
        Chunk { rows, values, codes: BTreeMap::new() }
    }

    /// Calls `visit` with the row and value of each present value of a column.
    pub fn column(&self, column: usize, rows: Range<usize>, mut visit: impl FnMut(usize, f32)) {
        match self.codes.get(&column) {
            None => self.stored(column, rows, visit),
            Some(codes) => self.stored(column, rows, |row, value| {
                let code = codes[value as usize];
                if !code.is_nan() {
                    visit(row, code);
                }
            }),
        }
    }

    fn stored(&self, column: usize, range: Range<usize>, mut visit: impl FnMut(usize, f32)) {
        match &self.values {
            Values::Rows { store, stride, first } => {
                let values = store.values();
                for row in range {
                    let value = values[first + row * stride + column];
                    if !value.is_nan() {
                        visit(row, value);
                    }
                }
            }
            Values::Columns { store, first } => {
                let values = &store.values()[first + column * self.rows..][..self.rows];
                for row in range {
                    if !values[row].is_nan() {
                        visit(row, values[row]);
                    }
                }
            }
            Values::Sparse { starts, rows, values } => {
                // A column beyond the largest index of the chunk has no values.
                let at = |column: usize| {
                    starts.get(column).or(starts.last()).map_or(0, |start| *start as usize)
                };
                let (from, to) = (at(column), at(column + 1));
                let skip = rows[from..to].partition_point(|row| (*row as usize) < range.start);
                for entry in from + skip..to {
                    let row = rows[entry] as usize;
                    if row >= range.end {
                        break;
                    }
                    if !values[entry].is_nan() {
                        visit(row, values[entry]);
                    }
                }
            }
        }
    }
}
