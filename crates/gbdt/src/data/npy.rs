//! NumPy arrays: `.npy` files of versions 1 and 2 with numbers, in C or Fortran order.

use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::data::text::map;
use crate::error::{Error, Result};

/// A mapped array of one or two dimensions.
pub(crate) struct Array {
    map: Arc<Mmap>,
    start: usize,
    kind: Kind,
    fortran: bool,
    pub rows: usize,
    pub columns: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    F32,
    F64,
    I8,
    U8,
    I16,
    I32,
    I64,
    U32,
}

impl Kind {
    fn of(descr: &str) -> Option<Kind> {
        Some(match descr {
            "<f4" => Kind::F32,
            "<f8" => Kind::F64,
            "|i1" => Kind::I8,
            "|u1" | "|b1" => Kind::U8,
            "<i2" => Kind::I16,
            "<i4" => Kind::I32,
            "<i8" => Kind::I64,
            "<u4" => Kind::U32,
            _ => return None,
        })
    }

    fn bytes(self) -> usize {
        match self {
            Kind::I8 | Kind::U8 => 1,
            Kind::I16 => 2,
            Kind::F32 | Kind::I32 | Kind::U32 => 4,
            Kind::F64 | Kind::I64 => 8,
        }
    }
}

impl Array {
    pub fn open(path: &Path) -> Result<Array> {
        let map = map(path)?.ok_or_else(|| Error::file(path, "the file is empty"))?;
        let header = header(&map).map_err(|what| Error::file(path, what))?;
        let Header { start, kind, fortran, rows, columns } = header;
        let bytes = rows.checked_mul(columns).and_then(|values| values.checked_mul(kind.bytes()));
        if bytes.and_then(|bytes| bytes.checked_add(start)) != Some(map.len()) {
            let what = format!(
                "the file has {} bytes, but the header describes {rows} × {columns} values of {} bytes",
                map.len(),
                kind.bytes()
            );
            return Err(Error::file(path, what));
        }
        Ok(Array { map, start, kind, fortran, rows, columns })
    }

    /// The mapped values, if they are f32 in C order: (map, byte offset).
    pub fn mapped(&self) -> Option<(Arc<Mmap>, usize)> {
        let aligned = self.start.is_multiple_of(4);
        (self.kind == Kind::F32 && !self.fortran && aligned).then(|| (self.map.clone(), self.start))
    }

    pub fn get(&self, row: usize, column: usize) -> f32 {
        let index = match self.fortran {
            true => column * self.rows + row,
            false => row * self.columns + column,
        };
        let at = self.start + index * self.kind.bytes();
        let bytes = &self.map[at..at + self.kind.bytes()];
        macro_rules! number {
            ($t:ty) => {
                <$t>::from_le_bytes(bytes.try_into().expect("the size of the type")) as f32
            };
        }
        match self.kind {
            Kind::F32 => number!(f32),
            Kind::F64 => number!(f64),
            Kind::I8 => number!(i8),
            Kind::U8 => number!(u8),
            Kind::I16 => number!(i16),
            Kind::I32 => number!(i32),
            Kind::I64 => number!(i64),
            Kind::U32 => number!(u32),
        }
    }
}

struct Header {
    start: usize,
    kind: Kind,
    fortran: bool,
    rows: usize,
    columns: usize,
}

fn header(bytes: &[u8]) -> std::result::Result<Header, String> {
    let not = || "it is not a .npy file of version 1 or 2".to_string();
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or_else(not)?;
    let (start, len) = match rest {
        [1, _, a, b, ..] => (10, u16::from_le_bytes([*a, *b]) as usize),
        [2 | 3, _, a, b, c, d, ..] => (12, u32::from_le_bytes([*a, *b, *c, *d]) as usize),
        _ => return Err(not()),
    };
    let text =
        bytes.get(start..start + len).ok_or_else(|| "the header is truncated".to_string())?;
    let text = std::str::from_utf8(text).map_err(|_| not())?;
    let after =
        |key: &str| text.split_once(key).map(|(_, rest)| rest.trim_start_matches([':', ' ']));
    let descr = after("'descr'").and_then(|rest| rest.strip_prefix('\'')?.split('\'').next());
    let descr = descr.ok_or_else(|| "the header has no descr".to_string())?;
    let kind = Kind::of(descr).ok_or_else(|| {
        format!("values of type {descr} are not supported; convert the array to float32")
    })?;
    let fortran = after("'fortran_order'").is_some_and(|rest| rest.starts_with("True"));
    let shape = after("'shape'").and_then(|rest| rest.strip_prefix('(')?.split(')').next());
    let shape = shape.ok_or_else(|| "the header has no shape".to_string())?;
    let dims = shape.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    let dims: Vec<usize> =
        dims.map(str::parse).collect::<std::result::Result<_, _>>().map_err(|_| not())?;
    let (rows, columns) = match dims[..] {
        [_, 0] => return Err("the array has no columns".into()),
        [rows] => (rows, 1),
        [rows, columns] => (rows, columns),
        _ => return Err(format!("the array has {} dimensions, expected 1 or 2", dims.len())),
    };
    Ok(Header { start: start + len, kind, fortran, rows, columns })
}
