//! Columns of typed cells → pieces. For formats that store rows in blocks, such as parquet and Arrow.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::data::piece::{Piece, group_id};
use crate::data::schema::{Role, Roles};
use crate::data::table::{Store, Values};
use crate::error::{Error, Result};

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cell {
    Missing,
    Integer(i128),
    Number(f64),
    Text(Vec<u8>),
}

impl Cell {
    /// A number; NaN is missing.
    pub fn number(value: f64) -> Cell {
        if value.is_nan() { Cell::Missing } else { Cell::Number(value) }
    }

    fn value(&self) -> Option<f32> {
        match self {
            Cell::Integer(value) => Some(*value as f32),
            Cell::Number(value) => Some(*value as f32),
            Cell::Missing | Cell::Text(_) => None,
        }
    }

    /// The text of a category or of a group.
    fn bytes(&self) -> Vec<u8> {
        match self {
            Cell::Missing => Vec::new(),
            Cell::Integer(value) => value.to_string().into_bytes(),
            Cell::Number(value) => value.to_string().into_bytes(),
            Cell::Text(text) => text.clone(),
        }
    }
}

/// Consecutive rows of one block of a file.
pub(crate) struct BlockRows {
    pub block: usize,
    /// Rows of the block.
    pub rows: Range<usize>,
    /// Row of the file at which the block starts.
    pub first: usize,
}

/// The rows of part `part.0` of `part.1`, block by block. `sizes` are the rows of each block. A group that starts in a part
/// belongs to it completely.
pub(crate) fn rows_of_part(
    sizes: &[usize],
    part: (usize, usize),
    groups: Option<&[Cell]>,
) -> Vec<BlockRows> {
    let total: usize = sizes.iter().sum();
    let cut = |part: usize, parts: usize| {
        let mut row = (total as u128 * part as u128 / parts as u128) as usize;
        let same = |row: usize| groups.is_some_and(|ids| ids[row] == ids[row - 1]);
        while row > 0 && row < total && same(row) {
            row += 1;
        }
        row
    };
    let mine = cut(part.0, part.1)..cut(part.0 + 1, part.1);
    let mut first = 0;
    let blocks = sizes.iter().enumerate().map(|(block, size)| {
        let inside = |row: usize| row.clamp(first, first + size) - first;
        let rows = BlockRows { block, rows: inside(mine.start)..inside(mine.end), first };
        first += size;
        rows
    });
    blocks.filter(|block| !block.rows.is_empty()).collect()
}

/// Some rows of a block. `column` returns the cells of a column of these rows.
pub(crate) fn piece(
    path: &Path,
    roles: &Roles,
    block: &BlockRows,
    column: &dyn Fn(usize) -> Result<Vec<Cell>>,
) -> Result<Piece> {
    let mut piece = Piece { rows: block.rows.len(), ..Piece::default() };
    let mut columns: Vec<Vec<f32>> = vec![Vec::new(); roles.features.len()];
    for (index, role) in roles.roles.iter().enumerate() {
        if *role == Role::Ignored {
            continue;
        }
        let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
        for (row, cell) in column(index)?.into_iter().enumerate() {
            let wrong = |what: &str| Error::Data {
                path: path.to_path_buf(),
                line: (block.first + block.rows.start + row) as u64 + 1,
                column: index as u64 + 1,
                what: what.to_string(),
            };
            match (role, &cell, cell.value()) {
                (Role::Category(feature), Cell::Missing, _) => columns[*feature].push(f32::NAN),
                (Role::Category(feature), ..) => {
                    let count = known.len();
                    let code = *known.entry(cell.bytes()).or_insert(count);
                    columns[*feature].push(code as f32);
                }
                (Role::Group, ..) => piece.group.push(group_id(&cell.bytes())),
                (_, Cell::Text(_), _) => {
                    return Err(wrong(
                        "text in a numeric column; list it in data.categorical or data.ignore",
                    ));
                }
                (Role::Feature(feature), _, None) => columns[*feature].push(f32::NAN),
                (Role::Feature(_), _, Some(value)) if value.is_infinite() => {
                    return Err(wrong("the value is not finite"));
                }
                (Role::Feature(feature), _, Some(value)) => columns[*feature].push(value),
                (Role::Label, _, Some(value)) if value.is_finite() => piece.label.push(value),
                (Role::Label, ..) => return Err(wrong("the label is not a finite number")),
                (Role::Weight, _, Some(value)) if value.is_finite() && value >= 0.0 => {
                    piece.weight.push(value)
                }
                (Role::Weight, ..) => {
                    return Err(wrong("the weight is not a finite number of at least 0"));
                }
                (Role::Ignored, ..) => {}
            }
        }
        if let Role::Category(feature) = role {
            let mut words = vec![Vec::new(); known.len()];
            known.into_iter().for_each(|(word, code)| words[code] = word);
            piece.words.insert(*feature, words);
        }
    }
    piece.values = Values::Columns { store: Store::Memory(columns.concat()), first: 0 };
    Ok(piece)
}
