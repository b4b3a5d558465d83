//! The checkpoints of a run: `RUN/checkpoints/step-00000100/` with the parameters, the optimizer's moments and a
//! description. A checkpoint is written under another name and renamed when all of it is on disk, so a folder of
//! this name is whole. Never overwrites a finished checkpoint.
//!
//! ```text
//! model.safetensors       f32, each parameter under its global name
//! optimizer.safetensors   f32, first.NAME and second.NAME; left out when training has not begun
//! owed.safetensors        f32, rank.N: what a rank had not sent of its gradients; only where they are compressed
//! checkpoint.json         version, step, the model's shape, the run's plan, names and dims
//! ```

use crate::carried::Carried;
use crate::error::{Error, Result, refuse};
use crate::partial::{self, Partial};
use crate::safetensors::{Dtype, Entry, File, write};
use crate::tensors::{Named, Tensors, differences, params_of};
use lockstep_plan::model::Shape;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FORMAT: &str = "lockstep-checkpoint";
const VERSION: u64 = 1;

const DESCRIPTION: &str = "checkpoint.json";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const OWED: &str = "owed.safetensors";
const RANK: &str = "rank.";
const FIRST: &str = "first.";
const SECOND: &str = "second.";

/// How the name of a checkpoint ends while it is being removed.
const GOING: &str = ".removed";

/// What a checkpoint says of itself.
#[derive(Clone, PartialEq, Debug)]
pub struct Head {
    /// Optimizer steps done.
    pub step: u64,
    pub shape: Shape,
    /// What the run was, for whoever resumes it; null when the weights come from elsewhere.
    pub plan: Value,
    pub carried: Carried,
}

/// The optimizer's averages of the gradient and of its square, under the names of the parameters.
#[derive(Clone, Copy)]
pub struct Moments<'a> {
    pub first: &'a dyn Tensors,
    pub second: &'a dyn Tensors,
}

/// A checkpoint whose files are mapped and have been checked against its description.
pub struct Checkpoint {
    dir: PathBuf,
    head: Head,
    params: Stored,
    moments: Option<[Stored; 2]>,
}

/// Tensors in a file, read as they are asked for.
pub struct Stored {
    file: Arc<File>,
    prefix: &'static str,
    list: Vec<Named>,
}

/// `checkpoint.json`.
#[derive(Serialize, Deserialize)]
struct Description {
    format: String,
    version: u64,
    step: u64,
    shape: Shape,
    plan: Value,
    #[serde(default)]
    carried: Carried,
    optimizer: bool,
    tensors: Vec<Named>,
}

/// Writes `RUN/checkpoints/step-…` and returns its path.
pub fn save(
    run: &Path,
    head: &Head,
    params: &dyn Tensors,
    moments: Option<Moments>,
) -> Result<PathBuf> {
    save_owing(run, head, params, moments, &[])
}

/// The same with what each rank had not sent of its gradients.
pub fn save_owing(
    run: &Path,
    head: &Head,
    params: &dyn Tensors,
    moments: Option<Moments>,
    owed: &[Vec<f32>],
) -> Result<PathBuf> {
    let target = checkpoints(run).join(folder_name(head.step));
    let list = params_of(&head.shape);
    for tensors in
        [Some(params), moments.as_ref().map(|m| m.first), moments.as_ref().map(|m| m.second)]
    {
        refuse(&target, tensors.map_or(Vec::new(), |tensors| differences(tensors.list(), &list)))?;
    }

    let partial = Partial::begin(&target)?;
    write(&partial.path().join(MODEL), &entries(&list, ""), |named, out| {
        params.read(&named.name, out)
    })?;
    if let Some(Moments { first, second }) = moments {
        let both = [entries(&list, FIRST), entries(&list, SECOND)].concat();
        let fill = |named: &Named, out: &mut [f32]| match named.name.strip_prefix(FIRST) {
            Some(name) => first.read(name, out),
            None => second.read(&named.name[SECOND.len()..], out),
        };
        write(&partial.path().join(OPTIMIZER), &both, fill)?;
    }
    if !owed.is_empty() {
        let flat = |(rank, values): (usize, &Vec<f32>)| Named {
            name: format!("{RANK}{rank}"),
            dims: vec![values.len()],
        };
        let list: Vec<Named> = owed.iter().enumerate().map(flat).collect();
        write(&partial.path().join(OWED), &entries(&list, ""), |named, out| {
            let rank = list.iter().position(|other| other == named);
            out.copy_from_slice(&owed[rank.expect("one of the list")])
        })?;
    }
    let description = Description {
        format: FORMAT.into(),
        version: VERSION,
        step: head.step,
        shape: head.shape.clone(),
        plan: head.plan.clone(),
        carried: head.carried.clone(),
        optimizer: moments.is_some(),
        tensors: list,
    };
    describe(&partial.path().join(DESCRIPTION), &description)?;
    partial.commit()
}

/// Opens one checkpoint folder.
pub fn load(dir: &Path) -> Result<Checkpoint> {
    let description = described(&dir.join(DESCRIPTION))?;
    let list = params_of(&description.shape);
    refuse(&dir.join(DESCRIPTION), differences(&description.tensors, &list))?;
    let stored =
        |file: &Arc<File>, prefix| Stored { file: file.clone(), prefix, list: list.clone() };

    let model = open(&dir.join(MODEL), &[entries(&list, "")])?;
    let moments = match description.optimizer {
        false => None,
        true => {
            let file =
                open(&dir.join(OPTIMIZER), &[entries(&list, FIRST), entries(&list, SECOND)])?;
            Some([stored(&file, FIRST), stored(&file, SECOND)])
        }
    };
    let Description { step, shape, plan, carried, .. } = description;
    let head = Head { step, shape, plan, carried };
    Ok(Checkpoint { dir: dir.to_path_buf(), head, params: stored(&model, ""), moments })
}

/// The newest checkpoint of a run that is whole; None when the run has none at all.
///
/// One that is not whole (a copy that was broken off) is passed over with a warning. When none is whole the error
/// is the newest one's.
pub fn latest(run: &Path) -> Result<Option<PathBuf>> {
    Ok(before(run, u64::MAX)?.map(|(_, dir)| dir))
}

/// The newest whole checkpoint with fewer than `step` steps done: how many, and where. None when there is none.
pub fn before(run: &Path, step: u64) -> Result<Option<(u64, PathBuf)>> {
    let older = finished(run).into_iter().rev().filter(|(done, _)| *done < step);
    let mut broken = None;
    for (done, dir) in older {
        match load(&dir) {
            Ok(_) => return Ok(Some((done, dir))),
            Err(error) => {
                tracing::warn!("{} is passed over: {error}", dir.display());
                broken.get_or_insert(error);
            }
        }
    }
    broken.map_or(Ok(None), Err)
}

/// The step of the newest checkpoint, by its name alone.
pub fn newest_step(run: &Path) -> Option<u64> {
    finished(run).last().map(|(step, _)| *step)
}

/// Checkpoints under their final names, the oldest first.
fn finished(run: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Vec::new() };
    let mut found: Vec<(u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| Some((step_of(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    found.sort();
    found
}

/// What a user means by a path: the checkpoint itself, or the newest of the run.
pub fn find(path: &Path) -> Result<PathBuf> {
    if path.join(DESCRIPTION).exists() {
        return Ok(path.to_path_buf());
    }
    latest(path)?.ok_or_else(|| Error::Nothing { path: path.to_path_buf() })
}

/// Removes what a save or a `prune` that was killed left behind. For the run's one writer, before it begins.
pub fn sweep(run: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Ok(()) };
    let going = |name: &str| name.strip_suffix(GOING).and_then(step_of).is_some();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| partial::is_partial(name) || going(name)) {
            let path = entry.path();
            fs::remove_dir_all(&path).map_err(Error::system("remove", &path))?;
        }
    }
    Ok(())
}

/// Removes all but the newest `keep` checkpoints of a run; none when `keep` is 0.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let found = finished(run);
    let old = if keep == 0 { 0 } else { found.len().saturating_sub(keep) };
    for (_, path) in &found[..old] {
        // Renamed first: whoever looks meanwhile sees a whole checkpoint or none.
        let going = path.with_extension(&GOING[1..]);
        fs::rename(path, &going).map_err(Error::system("remove", path))?;
        fs::remove_dir_all(&going).map_err(Error::system("remove", &going))?;
    }
    Ok(())
}

impl Checkpoint {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn head(&self) -> &Head {
        &self.head
    }

    pub fn params(&self) -> &Stored {
        &self.params
    }

    /// What a rank had not sent of its gradients; none when they were not compressed, or there was no such
    /// rank.
    pub fn owed(&self, rank: usize) -> Result<Option<Vec<f32>>> {
        let path = self.dir.join(OWED);
        if !path.exists() {
            return Ok(None);
        }
        let file = File::open(&path)?;
        Ok(file.get(&format!("{RANK}{rank}")).map(|tensor| {
            let mut values = vec![0.0; tensor.len()];
            tensor.read(0, &mut values);
            values
        }))
    }

    /// None when training had not begun.
    pub fn moments(&self) -> Option<Moments<'_>> {
        let [first, second] = self.moments.as_ref()?;
        Some(Moments { first, second })
    }
}

impl Tensors for Stored {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) {
        let tensor = self.file.get(&format!("{}{name}", self.prefix));
        let tensor =
            tensor.unwrap_or_else(|| panic!("no tensor {name} in {}", self.file.path().display()));
        assert_eq!(tensor.len(), out.len(), "elements of {name}");
        tensor.read(0, out);
    }
}

fn checkpoints(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(folder_name: &str) -> Option<u64> {
    folder_name.strip_prefix("step-")?.parse().ok()
}

fn entries(list: &[Named], prefix: &str) -> Vec<Entry> {
    let entry = |named: &Named| Entry {
        named: Named { name: format!("{prefix}{}", named.name), dims: named.dims.clone() },
        dtype: Dtype::F32,
    };
    list.iter().map(entry).collect()
}

/// A file that holds exactly these tensors.
fn open(path: &Path, wanted: &[Vec<Entry>]) -> Result<Arc<File>> {
    let file = File::open(path)?;
    let wanted: Vec<Named> = wanted.iter().flatten().map(|entry| entry.named.clone()).collect();
    let (mut found, mut mistakes) = (Vec::new(), Vec::new());
    for (name, tensor) in file.names().filter_map(|name| Some((name, file.get(name)?))) {
        found.push(Named { name: name.into(), dims: tensor.dims.to_vec() });
        if tensor.dtype != Dtype::F32 {
            mistakes.push(format!("{name} is {}, not F32", tensor.dtype.name()));
        }
    }
    mistakes.extend(differences(&found, &wanted));
    refuse(path, mistakes)?;
    Ok(file.into())
}

fn describe(path: &Path, description: &Description) -> Result<()> {
    let text =
        serde_json::to_string_pretty(description).expect("maps with string keys become JSON");
    let written = fs::File::create_new(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(Error::system("write", path))
}

fn described(path: &Path) -> Result<Description> {
    let bytes = fs::read(path).map_err(Error::system("read", path))?;
    let malformed = |error: serde_json::Error| {
        Error::malformed(
            path,
            format!("is no description of a checkpoint: {error}; take another checkpoint"),
        )
    };
    let value: Value = serde_json::from_slice(&bytes).map_err(malformed)?;
    // Asked before the rest is read: another version may say the rest in another way.
    match (value["format"].as_str(), value["version"].as_u64()) {
        (Some(FORMAT), Some(VERSION)) => serde_json::from_value(value).map_err(malformed),
        (Some(FORMAT), Some(version)) => Err(Error::malformed(
            path,
            format!(
                "is of version {version}, this program reads version {VERSION}; use the program that wrote it"
            ),
        )),
        _ => Err(Error::malformed(path, format!("does not say that it is a {FORMAT}"))),
    }
}
