//! Writer: the header first, then one tensor after another.

use super::METADATA;
use super::dtype::{Dtype, encode};
use crate::error::{Error, Result};
use crate::tensors::Named;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A tensor to write.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    pub named: Named,
    /// F32, F16 or Bf16.
    pub dtype: Dtype,
}

impl Entry {
    pub fn bytes(&self) -> usize {
        self.named.len() * self.dtype.bytes()
    }
}

/// Writes and syncs a new file. `fill` is called for each tensor; memory use is that of the largest tensor.
pub fn write(
    path: &Path,
    entries: &[Entry],
    mut fill: impl FnMut(&Named, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let failed = || Error::system("write", path);
    let file = fs::File::create_new(path).map_err(Error::system("make", path))?;
    let mut out = BufWriter::new(file);
    out.write_all(&header(entries)).map_err(failed())?;
    let mut values = Vec::new();
    for entry in entries {
        values.clear();
        values.resize(entry.named.len(), 0.0);
        fill(&entry.named, &mut values)?;
        write_values(&mut out, entry.dtype, &values).map_err(failed())?;
    }
    let file = out.into_inner().map_err(io::IntoInnerError::into_error);
    file.and_then(|file| file.sync_all()).map_err(failed())
}

/// Elements converted at a time.
const PIECE: usize = 1 << 16;

/// Converts in pieces to save memory.
fn write_values(out: &mut impl Write, dtype: Dtype, values: &[f32]) -> io::Result<()> {
    let mut bytes = vec![0; PIECE * dtype.bytes()];
    for piece in values.chunks(PIECE) {
        let bytes = &mut bytes[..piece.len() * dtype.bytes()];
        encode(dtype, piece, bytes);
        out.write_all(bytes)?;
    }
    Ok(())
}

/// Header of a file with these tensors.
pub(crate) fn header(entries: &[Entry]) -> Vec<u8> {
    // transformers rejects files without a "format" entry.
    let mut json = format!(r#"{{"{METADATA}":{{"format":"pt"}}"#);
    let mut end = 0;
    for entry in entries {
        let start = end;
        end += entry.bytes();
        let info = serde_json::json!({
            "dtype": entry.dtype.name(), "shape": entry.named.dims, "data_offsets": [start, end],
        });
        let name = serde_json::Value::from(entry.named.name.as_str());
        json.push_str(&format!(",{name}:{info}"));
    }
    json.push('}');
    // Padding to a multiple of eight keeps mapped data aligned.
    json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.into_bytes());
    bytes
}
