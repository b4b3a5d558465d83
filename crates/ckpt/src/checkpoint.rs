//! An open checkpoint. Any slice of any tensor is assembled from the pieces that contain it; nothing else is read.
//! Unverified bytes are never returned.

use crate::chunks::{Chunked, check_size};
use crate::error::{Error, Result};
use crate::manifest::{Head, MANIFEST, Manifest, PieceAt, TensorAt, TensorKind};
use crate::tensors::{Named, Tensors};
use crate::validate;
use lockstep_plan::model::{Runs, overlaps};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A checkpoint with a valid manifest and complete files.
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    /// Opened on first use.
    files: Vec<OnceLock<Chunked>>,
    index: HashMap<(TensorKind, String), usize>,
    list: Vec<Named>,
}

/// The tensors of one kind.
#[derive(Clone, Copy)]
pub struct Stored<'a> {
    checkpoint: &'a Checkpoint,
    kind: TensorKind,
}

/// Opens a checkpoint folder. Reads and validates the manifest, and checks the sizes of the files.
pub fn load(dir: &Path) -> Result<Checkpoint> {
    let manifest = Manifest::read(dir)?;
    let list = validate::params(&manifest)
        .map_err(|problems| Error::Invalid { path: dir.join(MANIFEST), problems })?;
    for file in &manifest.files {
        check_size(dir, file, manifest.chunk_bytes)?;
    }
    let key = |(number, at): (usize, &TensorAt)| ((at.kind, at.named.name.clone()), number);
    Ok(Checkpoint {
        dir: dir.to_path_buf(),
        files: manifest.files.iter().map(|_| OnceLock::new()).collect(),
        index: manifest.tensors.iter().enumerate().map(key).collect(),
        manifest,
        list,
    })
}

impl Checkpoint {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn head(&self) -> &Head {
        &self.manifest.head
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn params(&self) -> Stored<'_> {
        Stored { checkpoint: self, kind: TensorKind::Param }
    }

    /// The tensors of a kind, if the checkpoint has any.
    pub fn tensors(&self, kind: TensorKind) -> Option<Stored<'_>> {
        let has = self.manifest.tensors.iter().any(|at| at.kind == kind);
        has.then_some(Stored { checkpoint: self, kind })
    }

    /// Reads elements of a tensor, in order.
    ///
    /// # Panics
    /// If the tensor does not exist or `runs` and `out` differ in length.
    pub fn read(&self, kind: TensorKind, name: &str, runs: &[Runs], out: &mut [f32]) -> Result<()> {
        let at = self.at(kind, name).unwrap_or_else(|| {
            panic!("no {kind} {name} in {}", self.dir.display());
        });
        check_len(name, runs, out);
        let mut found = 0;
        for piece in &at.pieces {
            found += self.read_piece(piece, runs, out, copy)?;
        }
        self.complete(at, found, out.len())
    }

    /// Reads one rank's piece of a per-rank tensor. Returns false if it is incomplete, because the layout was different.
    pub fn read_of_rank(
        &self,
        kind: TensorKind,
        writer: usize,
        name: &str,
        runs: &[Runs],
        out: &mut [f32],
    ) -> Result<bool> {
        let Some(at) = self.at(kind, name) else { return Ok(false) };
        check_len(name, runs, out);
        let mut found = 0;
        for piece in at.pieces.iter().filter(|piece| piece.file == writer) {
            found += self.read_piece(piece, runs, out, copy)?;
        }
        Ok(found == out.len())
    }

    /// Sums a per-rank tensor over all ranks.
    pub fn sum_over_ranks(
        &self,
        kind: TensorKind,
        name: &str,
        runs: &[Runs],
        out: &mut [f32],
    ) -> Result<()> {
        check_len(name, runs, out);
        out.fill(0.0);
        let Some(at) = self.at(kind, name) else { return Ok(()) };
        for piece in at.pieces.iter().filter(|piece| piece.counts) {
            self.read_piece(piece, runs, out, add)?;
        }
        Ok(())
    }

    /// Verifies all files and returns every missing file and corrupt chunk. `progress` is called with the bytes verified.
    pub fn check(&self, mut progress: impl FnMut(u64)) -> Vec<Error> {
        let mut errors = Vec::new();
        for (number, sum) in self.manifest.files.iter().enumerate() {
            match self.file(number) {
                Ok(file) => {
                    for chunk in 0..file.chunks() {
                        errors.extend(file.check(chunk).err());
                        progress((self.manifest.chunk_bytes as u64).min(sum.bytes));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    fn at(&self, kind: TensorKind, name: &str) -> Option<&TensorAt> {
        Some(&self.manifest.tensors[*self.index.get(&(kind, name.to_string()))?])
    }

    /// Copies the elements of `runs` that a piece contains. Returns their number.
    fn read_piece(
        &self,
        piece: &PieceAt,
        runs: &[Runs],
        out: &mut [f32],
        put: impl Fn(&mut [f32], &[u8]),
    ) -> Result<usize> {
        let mut found = 0;
        for (to, from, len) in overlaps(runs, &piece.runs) {
            let start = piece.at as usize + from * size_of::<f32>();
            let bytes = self.file(piece.file)?.bytes(start..start + len * size_of::<f32>())?;
            put(&mut out[to..to + len], bytes);
            found += len;
        }
        Ok(found)
    }

    fn complete(&self, at: &TensorAt, found: usize, wanted: usize) -> Result<()> {
        match found == wanted {
            true => Ok(()),
            false => Err(Error::malformed(
                &self.dir.join(MANIFEST),
                format!(
                    "the pieces of {} {} contain {found} of {wanted} elements",
                    at.kind, at.named.name
                ),
            )),
        }
    }

    fn file(&self, number: usize) -> Result<&Chunked> {
        if let Some(file) = self.files[number].get() {
            return Ok(file);
        }
        let sum = &self.manifest.files[number];
        let file = Chunked::open(&self.dir, sum, self.manifest.chunk_bytes)?;
        // Two threads may both open the file; one handle is kept.
        Ok(self.files[number].get_or_init(|| file))
    }
}

fn copy(to: &mut [f32], bytes: &[u8]) {
    let (elements, _) = bytes.as_chunks();
    to.iter_mut().zip(elements).for_each(|(to, from)| *to = f32::from_le_bytes(*from));
}

fn add(to: &mut [f32], bytes: &[u8]) {
    let (elements, _) = bytes.as_chunks();
    to.iter_mut().zip(elements).for_each(|(to, from)| *to += f32::from_le_bytes(*from));
}

fn check_len(name: &str, runs: &[Runs], out: &[f32]) {
    let elements: usize = runs.iter().map(Runs::elements).sum();
    assert_eq!(elements, out.len(), "elements of {name}");
}

impl<'a> Stored<'a> {
    /// As `list`, with the lifetime of the checkpoint.
    pub(crate) fn list_of(&self) -> &'a [Named] {
        &self.checkpoint.list
    }
}

impl Tensors for Stored<'_> {
    fn list(&self) -> &[Named] {
        &self.checkpoint.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let len = self.checkpoint.at(self.kind, name).map(|at| at.named.len());
        assert_eq!(len, Some(out.len()), "elements of {name}");
        self.checkpoint.read(self.kind, name, &[Runs::one(0..out.len())], out)
    }

    fn read_runs(&self, name: &str, runs: &[Runs], out: &mut [f32]) -> Result<()> {
        self.checkpoint.read(self.kind, name, runs, out)
    }
}
