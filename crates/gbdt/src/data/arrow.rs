//! Arrow IPC, as a file (Feather version 2) or a stream. The file is mapped, and each rank decodes the record batches that
//! contain its rows. Columns are numbers, booleans or, for categories, text or dictionaries.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow_array::Array;
use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_buffer::Buffer;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{Block, MessageHeader, MetadataVersion};
use arrow_schema::{ArrowError, DataType, SchemaRef};

use crate::data::cell::{self, Cell};
use crate::data::piece::Piece;
use crate::data::read::Reader;
use crate::data::schema::Role;
use crate::data::text::map;
use crate::error::{Error, Result};
use crate::par;

/// Largest buffer of a batch before compression.
const MAX_BUFFER: i64 = 1 << 30;
/// Marks the start of a message.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Start and end of a file. A stream has none.
const MAGIC: &[u8] = b"ARROW1";

/// A problem of a file.
type Wrong = String;

/// The rows of a rank and the names of the features.
pub(crate) fn read(
    path: &Path,
    options: &Reader<'_>,
    part: (usize, usize),
) -> Result<(Vec<String>, Vec<Piece>)> {
    let wrong = |what: Wrong| Error::file(path, what);
    let document = Document::open(path)?;
    let names: Vec<String> =
        document.schema.fields().iter().map(|field| field.name().clone()).collect();
    let roles = options.schema.assign(&names, options.labeled);
    let roles = roles.map_err(|(_, what)| wrong(what))?;
    let used = |column: &usize| roles.roles[*column] != Role::Ignored;
    let used: Vec<usize> = (0..names.len()).filter(used).collect();
    for column in &used {
        let kind = document.schema.field(*column).data_type();
        if !is_supported(kind) {
            return Err(wrong(format!(
                "column {:?} has the type {kind}; convert it to a number or text, or list it in data.ignore",
                names[*column]
            )));
        }
    }
    let sizes: Vec<usize> = document.batches.iter().map(|(_, rows)| *rows).collect();
    let groups = match roles.roles.iter().position(|role| *role == Role::Group) {
        Some(column) => {
            let decoder = document.decoder(vec![column]).map_err(wrong)?;
            let mut cells = Vec::new();
            for (block, rows) in &document.batches {
                let batch = document.decode(&decoder, block).map_err(wrong)?;
                cells.extend(cells_of(batch.column(0), 0..*rows));
            }
            Some(cells)
        }
        None => None,
    };
    let decoder = document.decoder(used.clone()).map_err(wrong)?;
    let blocks = cell::rows_of_part(&sizes, part, groups.as_deref());
    let pieces = par::map(options.team, blocks.len(), &|index| {
        let rows = &blocks[index];
        let (block, _) = &document.batches[rows.block];
        let batch = document.decode(&decoder, block).map_err(wrong)?;
        cell::piece(path, &roles, rows, &|column| {
            let place = used.binary_search(&column).expect("columns that are not ignored");
            Ok(cells_of(batch.column(place), rows.rows.clone()))
        })
    });
    Ok((roles.features, pieces.into_iter().collect::<Result<_>>()?))
}

/// A mapped file whose messages have been located and checked.
struct Document {
    bytes: Buffer,
    schema: SchemaRef,
    version: MetadataVersion,
    dictionaries: Vec<Block>,
    /// Dictionaries that have been located.
    ids: HashSet<i64>,
    /// Batches and their rows.
    batches: Vec<(Block, usize)>,
}

impl Document {
    fn open(path: &Path) -> Result<Document> {
        let map = map(path)?.ok_or_else(|| Error::file(path, "the file is empty"))?;
        let start = NonNull::new(map.as_ptr().cast_mut()).expect("a map has an address");
        // SAFETY: the buffer only reads, and keeps the map alive. A file that changes meanwhile gives wrong values.
        let bytes = unsafe { Buffer::from_custom_allocation(start, map.len(), Arc::new(map)) };
        let located = match bytes.starts_with(MAGIC) {
            true => Document::of_file(bytes),
            false => Document::of_stream(bytes),
        };
        located.map_err(|what| Error::file(path, what))
    }

    fn new(
        bytes: &Buffer,
        schema: arrow_ipc::Schema<'_>,
        version: MetadataVersion,
    ) -> std::result::Result<Document, Wrong> {
        Ok(Document {
            bytes: bytes.clone(),
            schema: schema_of(schema)?,
            version,
            dictionaries: Vec::new(),
            ids: HashSet::new(),
            batches: Vec::new(),
        })
    }

    /// The end of a file lists its messages.
    fn of_file(bytes: Buffer) -> std::result::Result<Document, Wrong> {
        let truncated = || "the Arrow file is truncated".to_string();
        let end = bytes.len().checked_sub(10).ok_or_else(truncated)?;
        let trailer = bytes[end..].try_into().expect("ten bytes");
        let len = read_footer_length(trailer).map_err(|_| truncated())?;
        let start = end.checked_sub(len).ok_or_else(truncated)?;
        let footer = arrow_ipc::root_as_footer(&bytes[start..end]);
        let footer = footer.map_err(|error| format!("invalid Arrow footer: {error}"))?;
        let schema = footer.schema().ok_or("the Arrow file has no schema")?;
        let dictionaries = footer.dictionaries().into_iter().flatten().copied();
        let batches = footer.recordBatches().into_iter().flatten().copied();
        let mut document = Document::new(&bytes, schema, footer.version())?;
        for block in dictionaries.chain(batches) {
            document.add(block)?;
        }
        Ok(document)
    }

    /// The messages of a stream follow each other; the first one is the schema.
    fn of_stream(bytes: Buffer) -> std::result::Result<Document, Wrong> {
        let not = || "it is not an Arrow IPC file or stream".to_string();
        let mut document: Option<Document> = None;
        let mut at = 0;
        while at < bytes.len() {
            let truncated = || format!("the Arrow message at byte {at} is truncated");
            let head = bytes.get(at..at + 8).ok_or_else(truncated)?;
            if head[..4] != CONTINUATION {
                return Err(match document {
                    None => not(),
                    Some(_) => format!("the Arrow message at byte {at} is invalid"),
                });
            }
            let len = i32::from_le_bytes(head[4..].try_into().expect("four bytes"));
            if len == 0 {
                break;
            }
            let whole = len.checked_add(8).filter(|_| len > 0).ok_or_else(not)?;
            let end = at + whole as usize;
            let metadata = bytes.get(at + 8..end).ok_or_else(truncated)?;
            let message = arrow_ipc::root_as_message(metadata);
            let message =
                message.map_err(|error| format!("Arrow message at byte {at}: {error}"))?;
            let body = usize::try_from(message.bodyLength()).map_err(|_| truncated())?;
            match (&mut document, message.header_as_schema()) {
                (None, Some(schema)) => {
                    document = Some(Document::new(&bytes, schema, message.version())?);
                }
                (Some(document), None) => {
                    document.add(Block::new(at as i64, whole, body as i64))?;
                }
                _ => return Err(not()),
            }
            at = end.checked_add(body).ok_or_else(truncated)?;
        }
        document.ok_or_else(not)
    }

    /// Checks a message and adds it. The decoder trusts the ranges of buffers.
    fn add(&mut self, block: Block) -> std::result::Result<(), Wrong> {
        let truncated = || format!("the Arrow message at byte {} is truncated", block.offset());
        let bytes = self.bytes.clone();
        let (metadata, body) = split(&bytes, &block).ok_or_else(truncated)?;
        let skip = if metadata.starts_with(&CONTINUATION) { 8 } else { 4 };
        let message = arrow_ipc::root_as_message(&metadata[skip..])
            .map_err(|error| format!("Arrow message at byte {}: {error}", block.offset()))?;
        match message.header_type() {
            MessageHeader::DictionaryBatch => {
                let batch = message.header_as_dictionary_batch().ok_or_else(truncated)?;
                check_buffers(&batch.data().ok_or_else(truncated)?, body)?;
                if !self.ids.insert(batch.id()) && !batch.isDelta() {
                    return Err(
                        "a dictionary is replaced within the stream; write the Arrow file format"
                            .into(),
                    );
                }
                self.dictionaries.push(block);
            }
            MessageHeader::RecordBatch => {
                let batch = message.header_as_record_batch().ok_or_else(truncated)?;
                let rows = check_buffers(&batch, body)?;
                self.batches.push((block, rows));
            }
            other => return Err(format!("unexpected Arrow message: {other:?}")),
        }
        Ok(())
    }

    fn message(&self, block: &Block) -> Buffer {
        let len = block.metaDataLength() as usize + block.bodyLength() as usize;
        self.bytes.slice_with_length(block.offset() as usize, len)
    }

    /// A decoder of some columns, with all dictionaries.
    fn decoder(&self, columns: Vec<usize>) -> std::result::Result<FileDecoder, Wrong> {
        let decoder = FileDecoder::new(self.schema.clone(), self.version);
        let mut decoder = decoder.with_projection(columns);
        for block in &self.dictionaries {
            let read = decoder.read_dictionary(block, &self.message(block));
            read.map_err(|error| error.to_string())?;
        }
        Ok(decoder)
    }

    fn decode(
        &self,
        decoder: &FileDecoder,
        block: &Block,
    ) -> std::result::Result<arrow_array::RecordBatch, Wrong> {
        let batch = decoder.read_record_batch(block, &self.message(block));
        let batch = batch.map_err(|error: ArrowError| error.to_string())?;
        batch.ok_or_else(|| "an Arrow record batch is empty".to_string())
    }
}

/// Metadata and body of a message; `None` if they are not inside of the file.
fn split<'a>(bytes: &'a [u8], block: &Block) -> Option<(&'a [u8], &'a [u8])> {
    let start = usize::try_from(block.offset()).ok()?;
    let metadata = usize::try_from(block.metaDataLength()).ok().filter(|len| *len >= 8)?;
    let body = usize::try_from(block.bodyLength()).ok()?;
    let end = start.checked_add(metadata)?.checked_add(body)?;
    bytes.get(start..end).map(|bytes| bytes.split_at(metadata))
}

fn schema_of(schema: arrow_ipc::Schema<'_>) -> std::result::Result<SchemaRef, Wrong> {
    if schema.endianness() != arrow_ipc::Endianness::Little {
        return Err("the Arrow data is big-endian; write it little-endian".into());
    }
    let schema = arrow_ipc::convert::try_fb_to_schema(schema);
    Ok(Arc::new(schema.map_err(|error| format!("invalid Arrow schema: {error}"))?))
}

/// Checks that the buffers of a batch are inside of its body and returns its rows.
fn check_buffers(
    batch: &arrow_ipc::RecordBatch<'_>,
    body: &[u8],
) -> std::result::Result<usize, Wrong> {
    let outside = || "a buffer of an Arrow record batch is outside of the batch".to_string();
    let mut total: i64 = 0;
    for buffer in batch.buffers().into_iter().flatten() {
        let start = usize::try_from(buffer.offset()).map_err(|_| outside())?;
        let len = usize::try_from(buffer.length()).map_err(|_| outside())?;
        let bytes = start.checked_add(len).and_then(|end| body.get(start..end));
        let bytes = bytes.ok_or_else(outside)?;
        let size = match (batch.compression(), bytes.first_chunk::<8>()) {
            (Some(_), Some(size)) => match i64::from_le_bytes(*size) {
                -1 => len as i64 - 8,
                size => size,
            },
            (Some(_), None) if len > 0 => return Err(outside()),
            _ => len as i64,
        };
        if !(0..=MAX_BUFFER).contains(&size) {
            return Err(format!(
                "a buffer of an Arrow record batch has {size} bytes, at most {MAX_BUFFER} are supported; write smaller batches"
            ));
        }
        total += size;
    }
    // A row has at least one bit.
    let most = total.saturating_mul(8);
    match usize::try_from(batch.length()) {
        Ok(rows) if rows as i64 <= most => Ok(rows),
        _ => Err(format!(
            "an Arrow record batch of {total} bytes cannot have {} rows",
            batch.length()
        )),
    }
}

fn is_supported(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => is_text(values) || is_number(values),
        kind => is_text(kind) || is_number(kind) || *kind == DataType::Null,
    }
}

fn is_text(kind: &DataType) -> bool {
    matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

fn is_number(kind: &DataType) -> bool {
    kind.is_integer() || kind.is_floating() || *kind == DataType::Boolean
}

/// Cells of some rows of a supported column.
fn cells_of(column: &dyn Array, rows: Range<usize>) -> Vec<Cell> {
    macro_rules! cells {
        ($array:expr, $cell:expr) => {{
            let array = $array;
            let cell = |row: usize| match array.is_null(row) {
                true => Cell::Missing,
                false => $cell(array.value(row)),
            };
            rows.map(cell).collect()
        }};
    }
    macro_rules! integers {
        ($kind:ty) => {
            cells!(column.as_primitive::<$kind>(), |value| Cell::Integer(i128::from(value)))
        };
    }
    match column.data_type() {
        DataType::Boolean => {
            cells!(column.as_boolean(), |value| Cell::Integer(i128::from(value)))
        }
        DataType::Int8 => integers!(Int8Type),
        DataType::Int16 => integers!(Int16Type),
        DataType::Int32 => integers!(Int32Type),
        DataType::Int64 => integers!(Int64Type),
        DataType::UInt8 => integers!(UInt8Type),
        DataType::UInt16 => integers!(UInt16Type),
        DataType::UInt32 => integers!(UInt32Type),
        DataType::UInt64 => integers!(UInt64Type),
        DataType::Float16 => {
            cells!(column.as_primitive::<Float16Type>(), |value| Cell::number(f64::from(value)))
        }
        DataType::Float32 => {
            cells!(column.as_primitive::<Float32Type>(), |value| Cell::number(f64::from(value)))
        }
        DataType::Float64 => cells!(column.as_primitive::<Float64Type>(), Cell::number),
        DataType::Utf8 => cells!(column.as_string::<i32>(), text),
        DataType::LargeUtf8 => cells!(column.as_string::<i64>(), text),
        DataType::Utf8View => cells!(column.as_string_view(), text),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let values = cells_of(dictionary.values(), 0..dictionary.values().len());
            let keys = dictionary.normalized_keys();
            let cell = |row: usize| match column.is_null(row) {
                true => Cell::Missing,
                false => values[keys[row]].clone(),
            };
            rows.map(cell).collect()
        }
        _ => vec![Cell::Missing; rows.len()],
    }
}

fn text(text: &str) -> Cell {
    Cell::Text(text.as_bytes().to_vec())
}
