//! One checkpoint, opened: whatever slice of whatever tensor is asked for is put together from the pieces that its
//! writers left, and only these are read. Never gives out a byte whose chunk has not been checked.

use crate::chunks::{Chunked, there};
use crate::error::{Error, Result, refuse};
use crate::manifest::{Head, Kind, MANIFEST, Manifest, PieceAt, TensorAt};
use crate::tensors::{Named, Tensors, differences, params_of};
use lockstep_plan::model::{Runs, overlaps};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A checkpoint whose manifest has been checked, and whose files are there.
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    /// Opened when they are first needed.
    files: Vec<OnceLock<Chunked>>,
    index: HashMap<(Kind, String), usize>,
    list: Vec<Named>,
}

/// The tensors of one kind.
#[derive(Clone, Copy)]
pub struct Stored<'a> {
    checkpoint: &'a Checkpoint,
    kind: Kind,
}

/// Opens one checkpoint folder. Reads its manifest, and looks whether its files have their sizes.
pub fn load(dir: &Path) -> Result<Checkpoint> {
    let manifest = Manifest::read(dir)?;
    let path = dir.join(MANIFEST);
    let list = params_of(&manifest.head.shape);
    let mut mistakes = Vec::new();
    for kind in Kind::ALL {
        let found: Vec<Named> = manifest
            .tensors
            .iter()
            .filter(|at| at.kind == kind)
            .map(|at| at.named.clone())
            .collect();
        if kind == Kind::Param || !found.is_empty() && kind != Kind::Owed {
            let of =
                |mistake| if kind == Kind::Param { mistake } else { format!("{kind}: {mistake}") };
            mistakes.extend(differences(&found, &list).into_iter().map(of));
        }
    }
    mistakes.extend(manifest.tensors.iter().filter_map(|at| covered(at, manifest.files.len())));
    refuse(&path, mistakes)?;
    for file in &manifest.files {
        let plain = Path::new(&file.name).file_name() == Some(file.name.as_ref());
        if !plain {
            return Err(Error::malformed(&path, format!("{:?} is no name of a file", file.name)));
        }
        there(dir, file, manifest.chunk_bytes)?;
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

/// What is wrong with the pieces of a tensor: together they are to hold each element once, but for what is owed,
/// of which each rank has its own.
fn covered(at: &TensorAt, files: usize) -> Option<String> {
    let Named { name, .. } = &at.named;
    if at.pieces.iter().any(|piece| piece.file >= files) {
        return Some(format!("{} {name} is in a file that is not listed", at.kind));
    }
    if at.kind == Kind::Owed {
        return None;
    }
    let held: usize = at.pieces.iter().flat_map(|piece| &piece.runs).map(Runs::elements).sum();
    let whole = [Runs::one(0..at.named.len())];
    let within: usize = at
        .pieces
        .iter()
        .flat_map(|piece| overlaps(&whole, &piece.runs))
        .map(|(_, _, len)| len)
        .sum();
    (held != at.named.len() || within != held).then(|| {
        format!("the pieces of {} {name} hold {held} of {} elements", at.kind, at.named.len())
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
        Stored { checkpoint: self, kind: Kind::Param }
    }

    /// The tensors of a kind; none when it has no such: training had not begun, or nothing was owed.
    pub fn tensors(&self, kind: Kind) -> Option<Stored<'_>> {
        let has = self.manifest.tensors.iter().any(|at| at.kind == kind);
        has.then_some(Stored { checkpoint: self, kind })
    }

    /// Some elements of a tensor, in order, from whatever pieces have them.
    ///
    /// # Panics
    /// When there is no such tensor, or `runs` have another number of elements than `out`.
    pub fn read(&self, kind: Kind, name: &str, runs: &[Runs], out: &mut [f32]) -> Result<()> {
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

    /// What one writer owed of a tensor's gradient. False when it is not all there: its layout was another.
    pub fn owed_by(
        &self,
        writer: usize,
        name: &str,
        runs: &[Runs],
        out: &mut [f32],
    ) -> Result<bool> {
        let Some(at) = self.at(Kind::Owed, name) else { return Ok(false) };
        check_len(name, runs, out);
        let mut found = 0;
        for piece in at.pieces.iter().filter(|piece| piece.file == writer) {
            found += self.read_piece(piece, runs, out, copy)?;
        }
        Ok(found == out.len())
    }

    /// What all together owed of it.
    pub fn owed_by_all(&self, name: &str, runs: &[Runs], out: &mut [f32]) -> Result<()> {
        check_len(name, runs, out);
        out.fill(0.0);
        let Some(at) = self.at(Kind::Owed, name) else { return Ok(()) };
        for piece in at.pieces.iter().filter(|piece| piece.counts) {
            self.read_piece(piece, runs, out, add)?;
        }
        Ok(())
    }

    /// Reads everything: each file or chunk that is missing or damaged. `told` hears of the bytes as they are done.
    pub fn check(&self, mut told: impl FnMut(u64)) -> Vec<Error> {
        let mut errors = Vec::new();
        for (number, sum) in self.manifest.files.iter().enumerate() {
            match self.file(number) {
                Ok(file) => {
                    for chunk in 0..file.chunks() {
                        errors.extend(file.check(chunk).err());
                        told((self.manifest.chunk_bytes as u64).min(sum.bytes));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    fn at(&self, kind: Kind, name: &str) -> Option<&TensorAt> {
        // A lookup needs the key as it is stored.
        Some(&self.manifest.tensors[*self.index.get(&(kind, name.to_string()))?])
    }

    /// What a piece has of `runs`: how many elements.
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
                    "the pieces of {} {} hold {found} of {wanted} elements",
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
        // Two threads may both open it; one of the two stays.
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
    /// As `list`, for as long as the checkpoint.
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
