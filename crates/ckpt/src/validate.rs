//! Checks of a manifest against itself and the model. Checksums only detect accidents: a manifest may be forged, so no
//! size, offset or index of it is used before it is checked here.

use crate::coverage::Extent;
use crate::manifest::{Manifest, TensorAt, TensorKind};
use crate::tensors::{Named, differences, params_of};
use std::collections::HashSet;
use std::path::Path;

/// Largest step. Products with a batch size do not overflow.
pub(crate) const MAX_STEP: u64 = 1_000_000_000_000;

/// Largest chunk.
const MAX_CHUNK: usize = 1 << 30;

/// The parameters of the model, or all problems of the manifest.
pub(crate) fn params(manifest: &Manifest) -> Result<Vec<Named>, Vec<String>> {
    let mut problems = numbers(manifest);
    problems.extend(manifest.head.shape.errors().iter().map(|error| format!("shape: {error}")));
    // Without a valid shape, listing its tensors may exhaust the memory.
    if !problems.is_empty() {
        return Err(problems);
    }
    let list = params_of(&manifest.head.shape);
    problems.extend(TensorKind::ALL.into_iter().flat_map(|kind| tensors(manifest, kind, &list)));
    problems.extend(manifest.tensors.iter().filter_map(|at| pieces(manifest, at)));
    if problems.is_empty() {
        problems.extend(shared_bytes(manifest));
    }
    if problems.is_empty() { Ok(list) } else { Err(problems) }
}

fn numbers(manifest: &Manifest) -> Vec<String> {
    let Manifest { head, chunk_bytes, files, .. } = manifest;
    let mut problems = Vec::new();
    if head.step > MAX_STEP {
        problems.push(format!("step {} is larger than {MAX_STEP}", head.step));
    }
    if !(1..=MAX_CHUNK).contains(chunk_bytes) {
        problems.push(format!("chunk_bytes must be 1 to {MAX_CHUNK} (got {chunk_bytes})"));
    }
    let mut names = HashSet::new();
    for file in files {
        // An absolute path or `..` would refer to a file outside the checkpoint.
        if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
            problems.push(format!("{:?} is not a file name", file.name));
        } else if !names.insert(&file.name) {
            problems.push(format!("{} is listed twice", file.name));
        }
    }
    problems
}

/// Compares the tensors of a kind with the parameters. Each rank has its own residuals, and only of compressed tensors.
fn tensors(manifest: &Manifest, kind: TensorKind, list: &[Named]) -> Vec<String> {
    let of_kind = manifest.tensors.iter().filter(|at| at.kind == kind);
    let found: Vec<Named> = of_kind.map(|at| at.named.clone()).collect();
    if found.is_empty() && kind != TensorKind::Param {
        return Vec::new();
    }
    let mut names = HashSet::new();
    let twice = found.iter().filter(|named| !names.insert(&named.name));
    let mut problems: Vec<String> =
        twice.map(|named| format!("{} is listed twice", named.name)).collect();
    let wanted: Vec<Named> = match kind.is_per_rank() {
        true => list.iter().filter(|named| names.contains(&named.name)).cloned().collect(),
        false => list.to_vec(),
    };
    problems.extend(differences(&found, &wanted));
    match kind {
        TensorKind::Param => problems,
        _ => problems.into_iter().map(|problem| format!("{kind}: {problem}")).collect(),
    }
}

/// Checks that the pieces of a tensor are inside the tensor and the files, and that they contain each element exactly
/// once, except for per-rank tensors.
fn pieces(manifest: &Manifest, at: &TensorAt) -> Option<String> {
    let of = format!("{} {}", at.kind, at.named.name);
    // A tensor of another size has been reported.
    let extent = Extent::of(&at.named.dims)?;
    let mut held = 0usize;
    for piece in &at.pieces {
        let Some(file) = manifest.files.get(piece.file) else {
            return Some(format!("{of} refers to file {}, which is not listed", piece.file));
        };
        let Some(elements) = extent.elements_of(&piece.runs) else {
            return Some(format!("a piece of {of} does not fit its shape {:?}", at.named.dims));
        };
        let end = piece.at.checked_add(elements as u64 * size_of::<f32>() as u64);
        if end.is_none_or(|end| end > file.bytes) {
            return Some(format!(
                "a piece of {of} is stored at byte {} of {}, which has {} bytes",
                piece.at, file.name, file.bytes
            ));
        }
        held = held.saturating_add(elements);
    }
    if at.kind.is_per_rank() {
        return None;
    }
    if held != extent.elements {
        return Some(format!("the pieces of {of} contain {held} of {} elements", extent.elements));
    }
    (!extent.disjoint(&at.pieces)).then(|| format!("the pieces of {of} overlap"))
}

/// A file whose bytes belong to two pieces.
fn shared_bytes(manifest: &Manifest) -> Option<String> {
    let all = manifest.tensors.iter().flat_map(|at| at.pieces.iter().map(move |piece| (at, piece)));
    let mut places: Vec<_> = all
        .map(|(at, piece)| {
            let elements: usize = piece.runs.iter().map(|runs| runs.elements()).sum();
            (piece.file, piece.at, piece.at + (elements * size_of::<f32>()) as u64, at)
        })
        .collect();
    places.sort_unstable_by_key(|(file, start, end, _)| (*file, *start, *end));
    let shared = places.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2)?;
    let [(file, _, _, one), (_, start, _, other)] = shared else { return None };
    Some(format!(
        "byte {start} of {} belongs to {} {} and to {} {}",
        manifest.files[*file].name, one.kind, one.named.name, other.kind, other.named.name
    ))
}
