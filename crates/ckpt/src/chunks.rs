//! A memory-mapped file whose chunks are verified when they are first read. Unverified bytes are never returned.

use crate::error::{Error, Result};
use crate::manifest::FileSum;
use crate::regular;
use memmap2::Mmap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Chunked {
    path: PathBuf,
    map: Mmap,
    chunk_bytes: usize,
    sums: Vec<String>,
    /// Whether each chunk has been verified.
    verified: Vec<AtomicBool>,
}

impl Chunked {
    /// Opens a file, which must have the size given in the manifest.
    pub fn open(dir: &Path, sum: &FileSum, chunk_bytes: usize) -> Result<Chunked> {
        let path = dir.join(&sum.name);
        let file = regular::open(&path)?;
        // SAFETY: the map is private and read-only. As for every reader of mapped weights, no other program may
        // truncate the file meanwhile; that would end this process with SIGBUS, not with wrong values, because bytes
        // are copied before they are used.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("map", &path))?;
        compare_size(&path, map.len() as u64, sum, chunk_bytes)?;
        let verified = sum.chunks.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Chunked { path, map, chunk_bytes, sums: sum.chunks.clone(), verified })
    }

    /// Verified bytes of the file.
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        let bytes = self.map.get(range.clone()).ok_or_else(|| {
            let what = format!("the manifest refers to bytes up to {}", range.end);
            Error::corrupt(&self.path, range.start as u64, what)
        })?;
        if !range.is_empty() {
            for chunk in range.start / self.chunk_bytes..=(range.end - 1) / self.chunk_bytes {
                self.check(chunk)?;
            }
        }
        Ok(bytes)
    }

    pub fn chunks(&self) -> usize {
        self.sums.len()
    }

    /// Verifies a chunk.
    pub fn check(&self, chunk: usize) -> Result<()> {
        if self.verified[chunk].load(Ordering::Relaxed) {
            return Ok(());
        }
        let start = chunk * self.chunk_bytes;
        let end = (start + self.chunk_bytes).min(self.map.len());
        self.prefetch(start, end);
        if blake3::hash(&self.map[start..end]).to_hex().as_str() != self.sums[chunk] {
            let what = format!("checksum mismatch in bytes {start} to {end}");
            return Err(Error::corrupt(&self.path, start as u64, what));
        }
        self.verified[chunk].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Maps the pages of a chunk at once and prefetches the next chunks. Hints only; errors are ignored.
    fn prefetch(&self, start: usize, end: usize) {
        #[cfg(target_os = "linux")]
        {
            let next = (PREFETCH * self.chunk_bytes).min(self.map.len() - end);
            if next > 0 {
                let _ = self.map.advise_range(memmap2::Advice::WillNeed, end, next);
            }
            let _ = self.map.advise_range(memmap2::Advice::PopulateRead, start, end - start);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (start, end);
    }
}

/// Chunks to prefetch.
const PREFETCH: usize = 4;

/// Checks the size of a file against the manifest without reading it.
pub(crate) fn check_size(dir: &Path, sum: &FileSum, chunk_bytes: usize) -> Result<()> {
    let path = dir.join(&sum.name);
    let found = std::fs::metadata(&path).map_err(Error::system("open", &path))?;
    compare_size(&path, found.len(), sum, chunk_bytes)
}

fn compare_size(path: &Path, found: u64, sum: &FileSum, chunk_bytes: usize) -> Result<()> {
    let chunks = sum.bytes.div_ceil(chunk_bytes.max(1) as u64);
    if chunk_bytes == 0 || chunks != sum.chunks.len() as u64 {
        let what = format!(
            "{} chunks of {chunk_bytes} bytes do not add up to {} bytes",
            sum.chunks.len(),
            sum.bytes
        );
        return Err(Error::malformed(path, what));
    }
    match found == sum.bytes {
        true => Ok(()),
        false => Err(Error::corrupt(
            path,
            found.min(sum.bytes),
            format!("the file has {found} bytes instead of {}", sum.bytes),
        )),
    }
}
