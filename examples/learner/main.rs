//! Reinforcement learning with exactly-once rollouts. A learner process with two ranks trains a policy on rollouts of
//! four producers. It is killed with SIGKILL and restarted, and every rollout is used once or rejected.
//!
//!     cargo run --release --example learner
//!
//! The policy is a small GPT over 16 symbols. A rollout is a sequence of symbols. Its reward is the number of symbols
//! followed by their successor (… 3 4 5 …). The learner trains on the best quarter of each batch.
//!
//! ```text
//!   this process                              the learner, a child process
//!   producer threads ── rollouts ───────────▶ rank 0 ── broadcast ──▶ rank 1
//!                    ◀─ policies, ledgers ──  checkpoints in a temporary folder
//! ```

mod frames;
mod job;
mod process;
mod producer;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use lockstep_ckpt::rollouts::{Ledger, Rollout, VerdictCounts};
use lockstep_plan::{Config, Environment, Plan};
use serde::{Deserialize, Serialize};

pub use job::Job;
pub use process::learn;

const SYMBOLS: usize = 16;
const SEQ: usize = 16; // a rollout has SEQ + 1 symbols
const RANKS: usize = 2;
const PRODUCERS: usize = 4;
const MAX_LAG: u64 = 2; // maximum age of a rollout's policy in versions

/// The learner process finds its settings in this variable.
const SETTINGS: &str = "LEARNER_SETTINGS";

#[derive(Clone, Serialize, Deserialize)]
pub struct Settings {
    pub updates: u64,
    pub save_every: u64,
    /// Rollouts per update; the best quarter is trained on.
    pub batch: usize,
    pub folder: PathBuf,
    /// Where the learner finds the producers.
    pub producers: SocketAddr,
}

/// When the learner is killed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kill {
    /// After this update, before its checkpoint is complete if one is due.
    AfterUpdate(u64),
    /// After the checkpoint of this update.
    AfterSave(u64),
}

/// A rollout with its data.
#[derive(Clone, Serialize, Deserialize)]
struct Sample {
    rollout: Rollout,
    symbols: Vec<i32>, // SEQ + 1
    reward: f32,
}

/// A message from the learner.
#[derive(Clone, Serialize, Deserialize)]
enum Message {
    /// The learner can use one more rollout. Without this, old ones would queue up in the connection.
    Next,
    /// A new policy; the parameters follow.
    Policy {
        version: u64,
    },
    Updated {
        version: u64,
        reward: f32,
        norm: f64,
        counts: VerdictCounts,
    },
    /// A checkpoint with this state was saved.
    Saved(State),
    /// The learner starts with this state, for the first time or from a checkpoint.
    Recovered(State),
}

/// The part of the learner's state that is not in tensors. It is saved in the same checkpoint, so that both agree.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct State {
    pub ledger: Ledger,
    /// The rollouts whose gradients are in the weights, by producer. A real learner does not need this list; it shows
    /// here that each was used once.
    pub used: BTreeMap<String, Vec<u64>>,
}

#[allow(dead_code)] // A test includes this file.
fn main() -> anyhow::Result<()> {
    if let Some(settings) = settings() {
        return learn(&settings);
    }
    let folder = std::env::temp_dir().join(format!("lockstep-learner-{}", std::process::id()));
    let kills = [Kill::AfterUpdate(33), Kill::AfterUpdate(60), Kill::AfterSave(80)];
    let start = || Ok(Command::new(std::env::current_exe()?));
    let job = Job { updates: 120, save_every: 20, batch: 64, folder: &folder };
    let state = job.run(&kills, start)?;
    println!("-- verdicts in the final ledger: {:?}", state.ledger.counts());
    Ok(())
}

/// The settings of this process, if it is a learner.
pub fn settings() -> Option<Settings> {
    serde_json::from_str(&std::env::var(SETTINGS).ok()?).ok()
}

fn plan(batch: usize) -> anyhow::Result<Plan> {
    let best = batch / 4;
    let text = format!(
        "name = \"learner\"\n[model]\nfamily = \"gpt2\"\nlayers = 2\ndim = 32\nheads = 2\nseq = {SEQ}\n\
         [train]\nglobal_batch = {best}\nmicro_batch = {}\nthreads = 1\n[checkpoint]\nkeep = 2\n\
         [layout]\ndata = {RANKS}",
        best / RANKS
    );
    let environment = Environment::one_host(RANKS, RANKS).with_vocab(SYMBOLS);
    Plan::resolve(&Config::parse(&text, &[]), &environment).map_err(|errors| {
        anyhow::anyhow!(
            "{}",
            errors.iter().map(|error| error.to_string()).collect::<Vec<_>>().join("\n")
        )
    })
}
