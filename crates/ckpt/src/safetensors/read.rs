//! Memory-mapped reader.

use super::METADATA;
use super::dtype::{Dtype, decode};
use crate::error::{Error, Result};
use crate::regular;
use memmap2::Mmap;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A mapped file with a valid header.
pub struct File {
    path: PathBuf,
    map: Mmap,
    tensors: BTreeMap<String, Info>,
}

struct Info {
    dtype: Dtype,
    dims: Vec<usize>,
    /// Byte range in the file.
    bytes: Range<usize>,
}

/// A tensor in a mapped file.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    pub dims: &'a [usize],
    pub bytes: &'a [u8],
}

impl Tensor<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Reads elements starting at `start` as f32.
    ///
    /// # Panics
    /// If the type does not fit in f32 or the tensor is too short.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let size = self.dtype.bytes();
        decode(self.dtype, &self.bytes[start * size..(start + out.len()) * size], out);
    }

    /// The elements of an I32 tensor: token ids.
    ///
    /// # Panics
    /// If the tensor has another type.
    pub fn i32s(&self) -> Vec<i32> {
        assert_eq!(self.dtype, Dtype::I32);
        let (elements, _) = self.bytes.as_chunks();
        elements.iter().map(|element| i32::from_le_bytes(*element)).collect()
    }
}

impl File {
    pub fn open(path: &Path) -> Result<File> {
        let file = regular::open(path)?;
        // SAFETY: the map is private and read-only. As for every reader of mapped weights, no other program may
        // truncate the file meanwhile; that would end this process with SIGBUS, not with wrong values, because bytes
        // are copied before they are used.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("map", path))?;
        let tensors = header(&map).map_err(|what| Error::malformed(path, what))?;
        Ok(File { path: path.to_path_buf(), map, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let info = self.tensors.get(name)?;
        Some(Tensor { dtype: info.dtype, dims: &info.dims, bytes: &self.map[info.bytes.clone()] })
    }
}

/// Maximum header size, as in the reference implementation.
const MAX_HEADER: usize = 100_000_000;

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// Parses the header. The tensors must cover the data exactly, without overlap or gap.
fn header(file: &[u8]) -> std::result::Result<BTreeMap<String, Info>, String> {
    let (length, rest) = file.split_first_chunk().ok_or("too short to be a safetensors file")?;
    let length = u64::from_le_bytes(*length);
    let length = usize::try_from(length).ok().filter(|n| *n <= rest.len().min(MAX_HEADER)).ok_or_else(
        || format!("header length {length} exceeds the file size {}; the file is truncated or not a safetensors file", file.len()),
    )?;
    let start = 8 + length;
    let raw: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&rest[..length])
            .map_err(|error| format!("the header is not a JSON object: {error}"))?;

    let mut tensors = BTreeMap::new();
    for (name, value) in raw {
        if name != METADATA {
            let info = info(value, start).map_err(|what| format!("tensor {name}: {what}"))?;
            tensors.insert(name, info);
        }
    }

    let mut places: Vec<_> =
        tensors.iter().map(|(name, info)| (info.bytes.clone(), name)).collect();
    places.sort_by_key(|(bytes, _)| (bytes.start, bytes.end));
    let mut end = start;
    for (bytes, name) in places {
        if bytes.start != end {
            return Err(format!(
                "tensor {name} starts at byte {}, but the previous one ends at {end}",
                bytes.start
            ));
        }
        end = bytes.end;
    }
    match end == file.len() {
        true => Ok(tensors),
        false => Err(format!(
            "the tensors end at byte {end}, the file at {}; the file is truncated or corrupt",
            file.len()
        )),
    }
}

fn info(value: serde_json::Value, start: usize) -> std::result::Result<Info, String> {
    let raw: Raw = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let dtype = Dtype::parse(&raw.dtype).ok_or_else(|| format!("unknown type {}", raw.dtype))?;
    let [from, to] = raw.data_offsets;
    let wanted = raw.shape.iter().try_fold(dtype.bytes(), |bytes, dim| bytes.checked_mul(*dim));
    if to.checked_sub(from).is_none() || to.checked_sub(from) != wanted {
        return Err(format!("bytes {from} to {to} do not match {} {:?}", raw.dtype, raw.shape));
    }
    let shifted = |offset: usize| offset.checked_add(start).ok_or("offset out of range");
    Ok(Info { dtype, dims: raw.shape, bytes: shifted(from)?..shifted(to)? })
}

#[cfg(test)]
mod tests {
    use super::header;
    use proptest::prelude::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    #[test]
    fn inconsistent_files_are_rejected() {
        let a = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
        for (json, data, says) in [
            (format!("{{{a}}}"), 8, ""),
            (r#"{"__metadata__":{"format":"pt"}}"#.into(), 0, ""),
            (format!("{{{a}}}"), 7, "truncated"),
            (format!("{{{a}}}"), 9, "truncated"),
            (format!("[{a}]"), 8, "not a JSON object"),
            (a.replace("F32", "F31").replace("\"a\"", "{\"a\"") + "}", 8, "unknown type F31"),
            (format!("{{{}}}", a.replace("[2]", "[3]")), 8, "do not match F32 [3]"),
            (format!("{{{}}}", a.replace("[2]", "[4611686018427387905]")), 8, "do not match"),
            (format!("{{{}}}", a.replace("[0,8]", "[8,0]")), 8, "do not match"),
            (format!("{{{}}}", a.replace("[0,8]", "[4,12]")), 12, "starts at byte"),
            (format!("{{{a},{}}}", a.replace("\"a\"", "\"b\"")), 8, "starts at byte"),
            (format!("{{{a}"), 8, "not a JSON object"),
        ] {
            match header(&file(&json, data)) {
                Ok(_) => assert_eq!(says, "", "{json} was accepted"),
                Err(what) => assert!(!says.is_empty() && what.contains(says), "{json}: {what}"),
            }
        }
        assert!(header(&[1, 2, 3]).is_err());
        assert!(header(&[255; 64]).is_err());
    }

    proptest! {
        #[test]
        fn reader_never_panics(bytes: Vec<u8>, offsets: [u64; 2], shape: Vec<u64>) {
            let _ = header(&bytes);
            let json = serde_json::json!({"a": {"dtype": "F16", "shape": shape, "data_offsets": offsets}});
            let _ = header(&file(&json.to_string(), bytes.len()));
        }
    }
}
