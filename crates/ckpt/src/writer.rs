//! Writes one rank's file of a checkpoint: streamed safetensors with a checksum per chunk.

use crate::disk::Disk;
use crate::error::Result;
use crate::manifest::{FileSum, Piece, Written};
use crate::safetensors::{Dtype, Entry, header};
use crate::tensors::Named;
use std::borrow::Cow;
use std::path::Path;

/// Writes and syncs `rank-00003.safetensors`. `values` returns the elements of each piece, in order.
pub fn write_pieces<'v>(
    disk: &Disk,
    folder: &Path,
    writer: usize,
    pieces: &[Piece],
    chunk_bytes: usize,
    mut values: impl FnMut(usize) -> Result<Cow<'v, [f32]>>,
) -> Result<Written> {
    let entries: Vec<Entry> = pieces.iter().map(entry).collect();
    let header = header(&entries);
    let name = file_name(writer);
    let mut out = disk.create(&folder.join(&name))?;
    let mut sums = Sums::new(chunk_bytes);
    let (mut at, mut placed) = (header.len() as u64, Vec::with_capacity(pieces.len()));

    out.write(&header)?;
    sums.add(&header);
    for (number, piece) in pieces.iter().enumerate() {
        let values = values(number)?;
        assert_eq!(values.len(), piece.len(), "elements of a piece of {}", piece.named.name);
        let bytes = bytes_of(&values);
        // Large pieces are hashed on a second thread while they are written.
        if bytes.len() < LARGE {
            out.write(bytes)?;
            sums.add(bytes);
        } else {
            std::thread::scope(|scope| {
                let summing = scope.spawn(|| sums.add(bytes));
                let written = out.write(bytes);
                summing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                written
            })?;
        }
        placed.push((piece.clone(), at));
        at += bytes.len() as u64;
    }
    out.sync()?;
    Ok(Written { file: FileSum { name, bytes: at, chunks: sums.end() }, pieces: placed })
}

/// Minimum piece size for a second thread.
const LARGE: usize = 1 << 20;

pub(crate) fn file_name(writer: usize) -> String {
    format!("rank-{writer:05}.safetensors")
}

/// A piece is stored flat; the manifest has its position in the tensor.
fn entry(piece: &Piece) -> Entry {
    let name = format!("{}/{}", piece.kind, piece.named.name);
    Entry { named: Named { name, dims: vec![piece.len()] }, dtype: Dtype::F32 }
}

/// Chunk checksums of a stream.
struct Sums {
    chunk_bytes: usize,
    hasher: blake3::Hasher,
    /// Bytes in the current chunk.
    filled: usize,
    done: Vec<String>,
}

impl Sums {
    fn new(chunk_bytes: usize) -> Sums {
        assert!(chunk_bytes > 0, "chunk_bytes must be positive");
        Sums { chunk_bytes, hasher: blake3::Hasher::new(), filled: 0, done: Vec::new() }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(self.chunk_bytes - self.filled));
            self.hasher.update(now);
            self.filled += now.len();
            if self.filled == self.chunk_bytes {
                self.next();
            }
            bytes = rest;
        }
    }

    fn next(&mut self) {
        self.done.push(self.hasher.finalize().to_hex().to_string());
        self.hasher.reset();
        self.filled = 0;
    }

    fn end(mut self) -> Vec<String> {
        if self.filled > 0 {
            self.next();
        }
        self.done
    }
}

#[cfg(not(target_endian = "little"))]
compile_error!("checkpoints are written in native byte order, which must be little-endian");

fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: f32 has no padding, u8 needs no alignment, and the length is that of the same memory.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::Sums;

    #[test]
    fn checksums_do_not_depend_on_write_sizes() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for length in [0, 1, 99, 100, 101, 1000] {
            let wanted: Vec<String> = bytes[..length]
                .chunks(100)
                .map(|chunk| blake3::hash(chunk).to_hex().to_string())
                .collect();
            for step in [1, 7, 100, 333, 1000] {
                let mut sums = Sums::new(100);
                bytes[..length].chunks(step).for_each(|some| sums.add(some));
                assert_eq!(sums.end(), wanted, "{length} bytes, {step} at a time");
            }
        }
    }
}
