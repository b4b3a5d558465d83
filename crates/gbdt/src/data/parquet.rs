//! Parquet: each rank reads the row groups that contain its rows. Columns are numbers, booleans or, for categories, text.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use ::parquet::column::reader::ColumnReader;
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use crate::data::piece::{Piece, group_id};
use crate::data::schema::{Role, Roles, Schema};
use crate::data::table::{Store, Values};
use crate::error::{Error, Result};

/// One cell.
enum Cell {
    Missing,
    Number(f32),
    Text(Vec<u8>),
}

impl Cell {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Cell::Missing => Vec::new(),
            Cell::Number(value) => value.to_string().into_bytes(),
            Cell::Text(text) => text.clone(),
        }
    }
}

/// The rows of a rank and the names of the features.
pub(crate) fn read(
    path: &Path,
    schema: &Schema,
    labeled: bool,
    part: (usize, usize),
) -> Result<(Vec<String>, Vec<Piece>)> {
    let failed = |error: ParquetError| Error::file(path, error.to_string());
    let file = File::open(path).map_err(Error::system("open", path))?;
    let reader = SerializedFileReader::new(file).map_err(failed)?;
    let described = reader.metadata().file_metadata().schema_descr_ptr();
    if let Some(column) = described.columns().iter().find(|column| column.max_rep_level() > 0) {
        let what =
            format!("column {} is a list; only plain columns are read", column.path().string());
        return Err(Error::file(path, what));
    }
    let names: Vec<String> = described.columns().iter().map(|c| c.path().string()).collect();
    let roles = schema.assign(&names, labeled).map_err(|(_, what)| Error::file(path, what))?;
    let sizes: Vec<usize> = reader
        .metadata()
        .row_groups()
        .iter()
        .map(|group| group.num_rows().max(0) as usize)
        .collect();
    let total: usize = sizes.iter().sum();
    let group_column = roles.roles.iter().position(|role| *role == Role::Group);
    let groups = match group_column {
        Some(column) => Some(all_cells(&reader, column).map_err(failed)?),
        None => None,
    };
    let cut = |part: usize, parts: usize| {
        let mut row = (total as u128 * part as u128 / parts as u128) as usize;
        let same = |row: usize| {
            groups.as_ref().is_some_and(|ids| ids[row].bytes() == ids[row - 1].bytes())
        };
        while row > 0 && row < total && same(row) {
            row += 1;
        }
        row
    };
    let mine = cut(part.0, part.1)..cut(part.0 + 1, part.1);
    let (mut pieces, mut first) = (Vec::new(), 0);
    for (index, size) in sizes.into_iter().enumerate() {
        let range = mine.start.clamp(first, first + size) - first
            ..mine.end.clamp(first, first + size) - first;
        if !range.is_empty() {
            let group = reader.get_row_group(index).map_err(failed)?;
            pieces.push(read_group(path, &*group, &roles, range, first)?);
        }
        first += size;
    }
    Ok((roles.features, pieces))
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

fn read_group(
    path: &Path,
    group: &dyn RowGroupReader,
    roles: &Roles,
    range: Range<usize>,
    first: usize,
) -> Result<Piece> {
    let mut piece = Piece { rows: range.len(), ..Piece::default() };
    let mut columns: Vec<Vec<f32>> = vec![Vec::new(); roles.features.len()];
    let mut words = BTreeMap::new();
    for (column, role) in roles.roles.iter().enumerate() {
        if *role == Role::Ignored {
            continue;
        }
        let cells = read_column(group, column, range.clone())
            .map_err(|error| Error::file(path, error.to_string()))?;
        let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
        for (row, cell) in cells.into_iter().enumerate() {
            let wrong = |what: &str| Error::Data {
                path: path.to_path_buf(),
                line: (first + range.start + row) as u64 + 1,
                column: column as u64 + 1,
                what: what.to_string(),
            };
            match (role, cell) {
                (Role::Category(feature), Cell::Missing) => columns[*feature].push(f32::NAN),
                (Role::Category(feature), cell) => {
                    let count = known.len();
                    let code = *known.entry(cell.bytes()).or_insert(count);
                    columns[*feature].push(code as f32);
                }
                (Role::Group, cell) => piece.group.push(group_id(&cell.bytes())),
                (_, Cell::Text(_)) => {
                    return Err(wrong(
                        "text in a numeric column; list it in data.categorical or data.ignore",
                    ));
                }
                (Role::Feature(feature), Cell::Missing) => columns[*feature].push(f32::NAN),
                (Role::Feature(_), Cell::Number(value)) if value.is_infinite() => {
                    return Err(wrong("the value is not finite"));
                }
                (Role::Feature(feature), Cell::Number(value)) => columns[*feature].push(value),
                (Role::Label, Cell::Number(value)) if value.is_finite() => piece.label.push(value),
                (Role::Label, _) => return Err(wrong("the label is not a finite number")),
                (Role::Weight, Cell::Number(value)) if value.is_finite() && value >= 0.0 => {
                    piece.weight.push(value)
                }
                (Role::Weight, _) => {
                    return Err(wrong("the weight is not a finite number of at least 0"));
                }
                (Role::Ignored, _) => {}
            }
        }
        if let Role::Category(feature) = role {
            let mut list = vec![Vec::new(); known.len()];
            known.into_iter().for_each(|(word, code)| list[code] = word);
            words.insert(*feature, list);
        }
    }
    piece.values = Values::Columns { store: Store::Memory(columns.concat()), first: 0 };
    piece.words = words;
    Ok(piece)
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
    let number = |value: f64| match value.is_nan() {
        true => Cell::Missing,
        false => Cell::Number(value as f32),
    };
    match group.get_column_reader(column)? {
        ColumnReader::BoolColumnReader(reader) => {
            cells!(reader, |value: bool| number(f64::from(u8::from(value))))
        }
        ColumnReader::Int32ColumnReader(reader) => {
            cells!(reader, |value: i32| number(f64::from(value)))
        }
        ColumnReader::Int64ColumnReader(reader) => {
            cells!(reader, |value: i64| number(value as f64))
        }
        ColumnReader::FloatColumnReader(reader) => {
            cells!(reader, |value: f32| number(f64::from(value)))
        }
        ColumnReader::DoubleColumnReader(reader) => cells!(reader, |value: f64| number(value)),
        ColumnReader::ByteArrayColumnReader(reader) => {
            cells!(reader, |value: ::parquet::data_type::ByteArray| Cell::Text(
                value.data().to_vec()
            ))
        }
        _ => Err(ParquetError::General(format!("column {} has an unsupported type", column + 1))),
    }
}
