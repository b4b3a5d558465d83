//! Checkpoints of a training: `RUN/checkpoints/round-00000010.json`. A checkpoint is the model so far and the progress of
//! early stopping; margins follow from the trees. Rank 0 writes it, any number of ranks continue from it.
//!
//! The first line is the BLAKE3 hash of the rest, the second the state, the third the model as JSON.

use std::path::{Path, PathBuf};

use lockstep_ckpt::Disk;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::{Model, ModelFormat};
use crate::train::Progress;

/// A saved state.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub state: State,
    pub model: Model,
}

/// Everything but the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub progress: Progress,
    /// Generation of the ranks that wrote it.
    pub generation: u64,
    /// Digest of the parameters and thresholds that the trees depend on.
    pub digest: String,
}

impl Checkpoint {
    fn path(run: &Path, round: usize) -> PathBuf {
        run.join("checkpoints").join(format!("round-{round:08}.json"))
    }

    /// Rounds of the checkpoints of a run, newest first.
    pub fn rounds(run: &Path) -> Vec<usize> {
        let Ok(entries) = std::fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
        let round = |entry: std::fs::DirEntry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("round-")?.strip_suffix(".json")?.parse().ok()
        };
        let mut found: Vec<usize> = entries.flatten().filter_map(round).collect();
        found.sort_unstable_by(|one, other| other.cmp(one));
        found
    }

    /// Writes the checkpoint atomically and removes all but the newest `keep`. Fails if a newer generation trains the
    /// run.
    pub fn save(&self, run: &Path, keep: usize) -> Result<PathBuf> {
        lockstep_ckpt::claim(run, self.state.generation)?;
        let path = Checkpoint::path(run, self.state.progress.round);
        let mut body = serde_json::to_vec(&self.state).expect("plain data");
        body.push(b'\n');
        body.extend(self.model.to_bytes(ModelFormat::Json));
        let mut bytes = format!("{}\n", blake3::hash(&body).to_hex()).into_bytes();
        bytes.extend(body);
        let folder = run.join("checkpoints");
        std::fs::create_dir_all(&folder).map_err(Error::system("create the folder", &folder))?;
        Disk::default().replace(&path, &bytes)?;
        for old in Checkpoint::rounds(run).into_iter().skip(keep.max(1)) {
            let old = Checkpoint::path(run, old);
            std::fs::remove_file(&old).map_err(Error::system("remove", &old))?;
        }
        Ok(path)
    }

    fn load(run: &Path, round: usize) -> Result<Checkpoint> {
        let path = Checkpoint::path(run, round);
        let wrong = |what: String| Error::File { path: path.clone(), what };
        let bytes = std::fs::read(&path).map_err(Error::system("read", &path))?;
        let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
        let (hash, body) = (parts.next().unwrap_or(&[]), parts.next().unwrap_or(&[]));
        if blake3::hash(body).to_hex().as_bytes() != hash {
            return Err(wrong("the checkpoint is corrupt".into()));
        }
        let mut parts = body.splitn(2, |byte| *byte == b'\n');
        let state = serde_json::from_slice(parts.next().unwrap_or(&[]));
        let state = state.map_err(|error| wrong(format!("state: {error}")))?;
        let model = Model::from_bytes(parts.next().unwrap_or(&[]));
        let model = model.map_err(|error| wrong(error.to_string()))?;
        Ok(Checkpoint { state, model })
    }

    /// The newest valid checkpoint of a run, and the problems of newer ones. `None` if the run has no checkpoint; the
    /// error of the newest if all are invalid.
    pub fn newest(run: &Path) -> Result<(Option<Checkpoint>, Vec<String>)> {
        let mut problems = Vec::new();
        let mut first = None;
        for round in Checkpoint::rounds(run) {
            match Checkpoint::load(run, round) {
                Ok(checkpoint) => return Ok((Some(checkpoint), problems)),
                Err(error) => {
                    problems.push(error.to_string());
                    first.get_or_insert(error);
                }
            }
        }
        first.map_or(Ok((None, problems)), Err)
    }

    /// Rounds of the newest valid checkpoint that `generation` or a later one wrote; 0 if there is none.
    pub fn progress_since(run: &Path, generation: u64) -> u64 {
        let is_new = |round: &usize| {
            Checkpoint::load(run, *round).is_ok_and(|found| found.state.generation >= generation)
        };
        Checkpoint::rounds(run).into_iter().find(is_new).unwrap_or(0) as u64
    }
}
