//! A mapped file whose chunks are checked when they are first read, each once. Whoever reads a little checks a
//! little; nobody gets a byte that was not checked.

use crate::error::{Error, Result};
use crate::manifest::FileSum;
use memmap2::Mmap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Chunked {
    path: PathBuf,
    map: Mmap,
    chunk_bytes: usize,
    sums: Vec<String>,
    /// Of each chunk, whether it has been found good.
    good: Vec<AtomicBool>,
}

impl Chunked {
    /// The file must have the size that the manifest tells.
    pub fn open(dir: &Path, sum: &FileSum, chunk_bytes: usize) -> Result<Chunked> {
        let path = dir.join(&sum.name);
        let file = std::fs::File::open(&path).map_err(Error::system("open", &path))?;
        // SAFETY: the map is private and only read. That no other program shortens the file meanwhile is what
        // every reader of mapped weights relies on; who does gets this process a bus error, not wrong values
        // taken for right ones by the compiler, because bytes are copied out before they are used.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("map", &path))?;
        sized(&path, map.len() as u64, sum, chunk_bytes)?;
        let good = sum.chunks.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Chunked { path, map, chunk_bytes, sums: sum.chunks.clone(), good })
    }

    /// Some bytes of the file, checked. A range past its end is a mistake of the manifest.
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        let bytes = self.map.get(range.clone()).ok_or_else(|| {
            let what = format!("the manifest looks for bytes up to {} there", range.end);
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

    /// One chunk against its checksum.
    pub fn check(&self, chunk: usize) -> Result<()> {
        if self.good[chunk].load(Ordering::Relaxed) {
            return Ok(());
        }
        let start = chunk * self.chunk_bytes;
        let end = (start + self.chunk_bytes).min(self.map.len());
        self.ahead(start, end);
        if blake3::hash(&self.map[start..end]).to_hex().as_str() != self.sums[chunk] {
            let what = format!("bytes {start} to {end} are not what their checksum is of");
            return Err(Error::corrupt(&self.path, start as u64, what));
        }
        self.good[chunk].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Has a chunk's pages mapped in one go, and the disk fetch what comes next meanwhile. Hints: a system that does
    /// not take them maps and fetches page by page.
    fn ahead(&self, start: usize, end: usize) {
        #[cfg(target_os = "linux")]
        {
            let next = (AHEAD * self.chunk_bytes).min(self.map.len() - end);
            if next > 0 {
                let _ = self.map.advise_range(memmap2::Advice::WillNeed, end, next);
            }
            let _ = self.map.advise_range(memmap2::Advice::PopulateRead, start, end - start);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (start, end);
    }
}

/// Chunks that are on their way while one is checked.
const AHEAD: usize = 4;

/// Whether a file has the size that the manifest tells, without reading it.
pub(crate) fn there(dir: &Path, sum: &FileSum, chunk_bytes: usize) -> Result<()> {
    let path = dir.join(&sum.name);
    let found = std::fs::metadata(&path).map_err(Error::system("open", &path))?;
    sized(&path, found.len(), sum, chunk_bytes)
}

fn sized(path: &Path, found: u64, sum: &FileSum, chunk_bytes: usize) -> Result<()> {
    let chunks = sum.bytes.div_ceil(chunk_bytes.max(1) as u64);
    if chunk_bytes == 0 || chunks != sum.chunks.len() as u64 {
        let what =
            format!("{} chunks of {chunk_bytes} bytes do not make {}", sum.chunks.len(), sum.bytes);
        return Err(Error::malformed(path, what));
    }
    match found == sum.bytes {
        true => Ok(()),
        false => Err(Error::corrupt(
            path,
            found.min(sum.bytes),
            format!("it has {found} bytes, not {}", sum.bytes),
        )),
    }
}
