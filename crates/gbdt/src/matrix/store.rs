//! A matrix as a file that is mapped: binning happens once, and a second run starts at once.
//!
//! The file starts with the magic, the length of a JSON header, the header, and the arrays, each at a multiple of 64
//! bytes. The last 32 bytes are the BLAKE3 hash of everything before.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::matrix::section::{Plain, Section, bytes_of};
use crate::matrix::{Cuts, Feature, Layout, Matrix, Storage};

const MAGIC: &[u8; 16] = b"lockstep bins 3\n";
const ALIGN: usize = 64;
const HASH: usize = 32;

/// A place for the matrix of one rank. `identity` names everything that the matrix depends on.
pub struct Cache {
    pub path: PathBuf,
    pub identity: String,
    /// Number of ranks.
    pub ranks: usize,
}

#[derive(Serialize, Deserialize)]
struct Header {
    identity: String,
    features: Vec<Feature>,
    cuts: Cuts,
    rows: usize,
    first_row: u64,
    total_rows: u64,
    ranks: usize,
    /// Bytes of each array, in the order of `sections`.
    lengths: Vec<usize>,
}

impl Cache {
    /// Reads the matrix, if the file is complete and has the same identity.
    pub fn load(&self) -> Option<Matrix> {
        match self.try_load() {
            Ok(matrix) => matrix,
            Err(error) => {
                tracing::warn!("{error}; binning the data again");
                None
            }
        }
    }

    fn try_load(&self) -> Result<Option<Matrix>> {
        if !self.path.exists() {
            return Ok(None);
        }
        let wrong = |what: &str| Error::file(&self.path, what.to_string());
        let Some(map) = crate::data::map_file(&self.path)? else { return Ok(None) };
        let end = map.len().checked_sub(HASH).ok_or_else(|| wrong("the file is truncated"))?;
        if blake3::hash(&map[..end]).as_bytes() != &map[end..] {
            return Err(wrong("the file is corrupt"));
        }
        let rest =
            map[..end].strip_prefix(MAGIC).ok_or_else(|| wrong("it is not a file of bins"))?;
        let (len, rest) =
            rest.split_first_chunk::<8>().ok_or_else(|| wrong("the header is truncated"))?;
        let len = u64::from_le_bytes(*len) as usize;
        let header = rest.get(..len).ok_or_else(|| wrong("the header is truncated"))?;
        let header: Header =
            serde_json::from_slice(header).map_err(|error| wrong(&format!("header: {error}")))?;
        if header.identity != self.identity || header.ranks != self.ranks {
            return Ok(None);
        }
        Ok(Some(self.assemble(&map, MAGIC.len() + 8 + len, header)?))
    }

    fn assemble(&self, map: &Arc<memmap2::Mmap>, start: usize, header: Header) -> Result<Matrix> {
        let wrong = || Error::file(&self.path, "the arrays do not fit the header");
        let mut at = start;
        let mut ranges = header.lengths.iter().map(|len| {
            at = at.next_multiple_of(ALIGN);
            let range = at..at + len;
            at += len;
            range
        });
        fn take<T: Plain>(
            map: &Arc<memmap2::Mmap>,
            range: Option<std::ops::Range<usize>>,
        ) -> Option<Section<T>> {
            Section::mapped(map, range?)
        }
        let layout = Layout::new(&header.cuts, header.total_rows, header.ranks);
        let of = |storage: Storage| {
            let all =
                layout.storage.iter().enumerate().filter(move |(_, other)| **other == storage);
            all.map(|(feature, _)| feature as u32).collect::<Vec<u32>>()
        };
        let (byte_features, word_features) = (of(Storage::Bytes), of(Storage::Words));
        let mut matrix = Matrix {
            bytes: take(map, ranges.next()).ok_or_else(wrong)?,
            byte_columns: take(map, ranges.next()).ok_or_else(wrong)?,
            words: take(map, ranges.next()).ok_or_else(wrong)?,
            entry_starts: take(map, ranges.next()).ok_or_else(wrong)?,
            entries: take(map, ranges.next()).ok_or_else(wrong)?,
            value_starts: take(map, ranges.next()).ok_or_else(wrong)?,
            value_rows: take(map, ranges.next()).ok_or_else(wrong)?,
            value_bins: take(map, ranges.next()).ok_or_else(wrong)?,
            label: take(map, ranges.next()).ok_or_else(wrong)?,
            weight: take(map, ranges.next()).ok_or_else(wrong)?,
            groups: take(map, ranges.next()).ok_or_else(wrong)?,
            features: header.features,
            cuts: header.cuts,
            layout,
            rows: header.rows,
            first_row: header.first_row,
            total_rows: header.total_rows,
            byte_features,
            word_features,
        };
        let rows = matrix.rows;
        let fits = matrix.bytes.len() == rows * matrix.byte_features.len()
            && matrix.byte_columns.len() == matrix.bytes.len()
            && matrix.words.len() == rows * matrix.word_features.len()
            && (matrix.entry_starts.is_empty() || matrix.entry_starts.len() == rows + 1)
            && matrix.value_rows.len() == matrix.entries.len()
            && matrix.value_bins.len() == matrix.entries.len()
            && (matrix.label.is_empty() || matrix.label.len() == rows)
            && (matrix.weight.is_empty() || matrix.weight.len() == rows);
        if !fits {
            return Err(wrong());
        }
        if matrix.entry_starts.is_empty() {
            matrix.entry_starts = Section::Memory(Vec::new());
        }
        Ok(matrix)
    }

    /// Writes the matrix and returns it mapped, so that its pages can be dropped.
    pub fn save(&self, matrix: Matrix) -> Result<Matrix> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(Error::system("create the folder", folder))?;
        let partial = self.path.with_extension(format!("partial-{}", std::process::id()));
        self.write(&matrix, &partial).map_err(Error::system("write", &partial))?;
        std::fs::rename(&partial, &self.path).map_err(Error::system("rename", &partial))?;
        drop(matrix);
        self.try_load()?
            .ok_or_else(|| Error::file(&self.path, "the file changed while it was written"))
    }

    fn write(&self, matrix: &Matrix, path: &Path) -> std::io::Result<()> {
        let sections: [&[u8]; 11] = [
            &matrix.bytes,
            &matrix.byte_columns,
            bytes_of(&matrix.words),
            bytes_of(&matrix.entry_starts),
            bytes_of(&matrix.entries),
            bytes_of(&matrix.value_starts),
            bytes_of(&matrix.value_rows),
            bytes_of(&matrix.value_bins),
            bytes_of(&matrix.label),
            bytes_of(&matrix.weight),
            bytes_of(&matrix.groups),
        ];
        let header = Header {
            identity: self.identity.clone(),
            features: matrix.features.clone(),
            cuts: matrix.cuts.clone(),
            rows: matrix.rows,
            first_row: matrix.first_row,
            total_rows: matrix.total_rows,
            ranks: self.ranks,
            lengths: sections.iter().map(|section| section.len()).collect(),
        };
        let header = serde_json::to_vec(&header)?;
        let mut out =
            HashedFile { file: std::fs::File::create(path)?, hasher: blake3::Hasher::new(), at: 0 };
        out.write(MAGIC)?;
        out.write(&(header.len() as u64).to_le_bytes())?;
        out.write(&header)?;
        for section in sections {
            let pad = out.at.next_multiple_of(ALIGN) - out.at;
            out.write(&[0; ALIGN][..pad])?;
            section.chunks(1 << 20).try_for_each(|piece| out.write(piece))?;
        }
        let hash = out.hasher.finalize();
        out.file.write_all(hash.as_bytes())
    }
}

struct HashedFile {
    file: std::fs::File,
    hasher: blake3::Hasher,
    at: usize,
}

impl HashedFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.at += bytes.len();
        self.file.write_all(bytes)
    }
}
