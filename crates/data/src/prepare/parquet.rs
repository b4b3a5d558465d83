//! Reads one text column of a parquet file, row group by row group. Rejects lists and structs.

use super::batch::Batch;
use super::input::Input;
use super::pipeline::Sink;
use crate::error::{Error, Result};
use parquet::basic::Type;
use parquet::data_type::ByteArrayType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::SchemaDescriptor;
use std::fs::File;

/// Rows decoded at a time.
const ROWS: usize = 256;

pub fn read<'a>(input: &'a Input, field: &str, sink: &mut Sink<'a>) -> Result<()> {
    if input.is_stdin() {
        return Err(Error::misuse("a parquet file cannot be read from a pipe; pass its path"));
    }
    let failed = |error: ParquetError| Error::file(&input.path, error.to_string());
    let file = File::open(&input.path).map_err(Error::system("opening", &input.path))?;
    let reader = SerializedFileReader::new(file).map_err(failed)?;
    let schema = reader.metadata().file_metadata().schema_descr();
    let column = find(schema, field).map_err(|what| Error::file(&input.path, what))?;
    let present = schema.column(column).max_def_level();

    let mut batch = Batch::new(input);
    let mut row = 0;
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(failed)?;
        let column = group.get_column_reader(column).map_err(failed)?;
        let mut column = parquet::column::reader::get_typed_column_reader::<ByteArrayType>(column);
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        loop {
            values.clear();
            levels.clear();
            let levels_wanted = (present > 0).then_some(&mut levels);
            let (rows, _, _) =
                column.read_records(ROWS, levels_wanted, None, &mut values).map_err(failed)?;
            if rows == 0 {
                break;
            }
            // A null row has a lower definition level and no value.
            let mut values = values.iter();
            for i in 0..rows {
                row += 1;
                match levels.get(i).is_none_or(|level| *level == present).then(|| values.next()) {
                    Some(Some(value)) => batch.add(row, value.data()),
                    _ => batch.add_bad(row, format!("\"{field}\" is null")),
                }
                if batch.is_full() {
                    sink.give(std::mem::replace(&mut batch, Batch::new(input)))?;
                }
            }
        }
        sink.taken(group.metadata().compressed_size().max(0) as u64);
    }
    sink.give(batch)
}

/// Index of the text column.
fn find(schema: &SchemaDescriptor, field: &str) -> std::result::Result<usize, String> {
    let names =
        || schema.columns().iter().map(|c| c.path().string()).collect::<Vec<_>>().join(", ");
    let at = schema.columns().iter().position(|column| column.path().string() == field);
    let at =
        at.ok_or_else(|| format!("no column \"{field}\" (--field); columns are: {}", names()))?;
    let column = schema.column(at);
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        return Err(format!(
            "column \"{field}\" must contain one string per row, but its type is {}",
            column.physical_type()
        ));
    }
    Ok(at)
}
