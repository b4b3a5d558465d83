//! Parquet: each rank reads the row groups that contain its rows. Columns are numbers, booleans or, for categories, text.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use ::parquet::column::reader::ColumnReader;
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use crate::data::cell::{self, BlockRows, Cell};
use crate::data::piece::Piece;
use crate::data::read::Reader;
use crate::data::schema::Role;
use crate::error::{Error, Result};
use crate::par;

/// The rows of a rank and the names of the features.
pub(crate) fn read(
    path: &Path,
    options: &Reader<'_>,
    part: (usize, usize),
) -> Result<(Vec<String>, Vec<Piece>)> {
    let failed = |error: ParquetError| Error::file(path, error.to_string());
    let open = || {
        let file = File::open(path).map_err(Error::system("open", path))?;
        SerializedFileReader::new(file).map_err(failed)
    };
    let reader = open()?;
    let described = reader.metadata().file_metadata().schema_descr_ptr();
    if let Some(column) = described.columns().iter().find(|column| column.max_rep_level() > 0) {
        let what =
            format!("column {} is a list; only plain columns are read", column.path().string());
        return Err(Error::file(path, what));
    }
    let names: Vec<String> = described.columns().iter().map(|c| c.path().string()).collect();
    let roles = options.schema.assign(&names, options.labeled);
    let roles = roles.map_err(|(_, what)| Error::file(path, what))?;
    let sizes = reader.metadata().row_groups().iter();
    let sizes: Vec<usize> = sizes.map(|group| group.num_rows().max(0) as usize).collect();
    let groups = match roles.roles.iter().position(|role| *role == Role::Group) {
        Some(column) => Some(all_cells(&reader, column).map_err(failed)?),
        None => None,
    };
    let blocks = cell::rows_of_part(&sizes, part, groups.as_deref());
    // A reader has one position in the file, so each thread has its own.
    let runs = par::pieces(blocks.len(), 1, options.team.size());
    let pieces = par::map(options.team, runs.len(), &|index| {
        let reader = open()?;
        let piece = |block: &BlockRows| {
            let group = reader.get_row_group(block.block).map_err(failed)?;
            cell::piece(path, &roles, block, &|column| {
                read_column(&*group, column, block.rows.clone()).map_err(failed)
            })
        };
        blocks[runs[index].clone()].iter().map(piece).collect::<Result<Vec<Piece>>>()
    });
    let pieces = pieces.into_iter().collect::<Result<Vec<Vec<Piece>>>>()?;
    Ok((roles.features, pieces.into_iter().flatten().collect()))
}

/// All cells of one column.
fn all_cells(
    reader: &dyn FileReader,
    column: usize,
) -> std::result::Result<Vec<Cell>, ParquetError> {
    let mut cells = Vec::new();
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group)?;
        let rows = group.metadata().num_rows().max(0) as usize;
        cells.extend(read_column(&*group, column, 0..rows)?);
    }
    Ok(cells)
}

/// Cells of some rows of a column of a row group.
fn read_column(
    group: &dyn RowGroupReader,
    column: usize,
    range: Range<usize>,
) -> std::result::Result<Vec<Cell>, ParquetError> {
    let present = group.metadata().column(column).column_descr().max_def_level();
    macro_rules! cells {
        ($reader:expr, $cell:expr) => {{
            let mut reader = $reader;
            reader.skip_records(range.start)?;
            let (mut values, mut levels) = (Vec::new(), Vec::new());
            while levels.len().max(values.len()) < range.len() {
                let left = range.len() - levels.len().max(values.len());
                let wanted = (present > 0).then_some(&mut levels);
                let (rows, _, _) = reader.read_records(left, wanted, None, &mut values)?;
                if rows == 0 {
                    break;
                }
            }
            let mut values = values.into_iter();
            let cells = (0..range.len()).map(|row| {
                match levels.get(row).is_none_or(|level| *level == present).then(|| values.next()) {
                    Some(Some(value)) => $cell(value),
                    _ => Cell::Missing,
                }
            });
            Ok(cells.collect())
        }};
    }
    match group.get_column_reader(column)? {
        ColumnReader::BoolColumnReader(reader) => {
            cells!(reader, |value: bool| Cell::Integer(i128::from(value)))
        }
        ColumnReader::Int32ColumnReader(reader) => {
            cells!(reader, |value: i32| Cell::Integer(i128::from(value)))
        }
        ColumnReader::Int64ColumnReader(reader) => {
            cells!(reader, |value: i64| Cell::Integer(i128::from(value)))
        }
        ColumnReader::FloatColumnReader(reader) => {
            cells!(reader, |value: f32| Cell::number(f64::from(value)))
        }
        ColumnReader::DoubleColumnReader(reader) => cells!(reader, Cell::number),
        ColumnReader::ByteArrayColumnReader(reader) => {
            cells!(reader, |value: ::parquet::data_type::ByteArray| Cell::Text(
                value.data().to_vec()
            ))
        }
        _ => Err(ParquetError::General(format!("column {} has an unsupported type", column + 1))),
    }
}
