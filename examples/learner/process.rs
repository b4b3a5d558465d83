//! The learner process: ranks that train on accepted rollouts and save weights and ledger together.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::net::TcpStream;
use std::sync::Mutex;

use anyhow::bail;
use lockstep_ckpt::rollouts::{Ledger, Rollout, Verdict};
use lockstep_ckpt::{Disk, Position};
use lockstep_comm::{Group, World, on_threads};
use lockstep_kernels::{AdamW, Device, Dtype};
use lockstep_model::{Activations, Batch, Pass, Recompute};
use lockstep_plan::Plan;
use lockstep_trainer::{FailedSave, Rank, SaveOutcome, Saver};

use super::frames::{receive, send};
use super::{MAX_LAG, Message, RANKS, SEQ, Sample, Settings, State, plan};

/// The learner process.
pub fn learn(settings: &Settings) -> anyhow::Result<()> {
    let plan = plan(settings.batch)?;
    // A process of an earlier start can no longer save.
    let generation = lockstep_ckpt::advance(&settings.folder)?;
    let stream = TcpStream::connect(settings.producers)?;
    let samples = Mutex::new(BufReader::new(stream.try_clone()?));
    let process =
        LearnerProcess { settings, plan: &plan, generation, samples, stream: Mutex::new(stream) };
    let states = on_threads(RANKS, |world| process.learn(&world));
    let states = states.into_iter().collect::<anyhow::Result<Vec<State>>>()?;
    assert!(states.iter().all(|other| *other == states[0]), "all ranks have the same state");
    Ok(())
}

struct LearnerProcess<'a> {
    settings: &'a Settings,
    plan: &'a Plan,
    generation: u64,
    /// Read by rank 0.
    samples: Mutex<BufReader<TcpStream>>,
    stream: Mutex<TcpStream>,
}

impl LearnerProcess<'_> {
    /// Trains from the newest checkpoint to the last update. All ranks call this and return the same state.
    fn learn(&self, world: &World) -> anyhow::Result<State> {
        let (mut rank, mut state) = self.recover(world)?;
        let folder = &self.settings.folder;
        let mut saver = Saver::new(self.plan, world, folder, self.generation, Disk::default());
        self.publish(&rank, &state)?;
        let local = self.plan.train.global_batch / RANKS;
        let mut batch = Batch::empty(&rank.device, local, SEQ);
        let mut activations = Activations::default();
        while state.ledger.policy_version() < self.settings.updates {
            let (symbols, reward) = self.collect_batch(world, &mut state)?;
            let own = &symbols[world.rank() * local * (SEQ + 1)..][..local * (SEQ + 1)];
            let own: Vec<u32> = own.iter().map(|symbol| *symbol as u32).collect();
            batch.fill(&rank.device, &own);
            let version = state.ledger.policy_version() + 1;
            let norm = update(&mut rank, &batch, &mut activations, version)?;

            // The ledger advances before the policy is published, so no rollout has a version ahead of the ledger.
            state.ledger.advance();
            let counts = state.ledger.counts();
            self.tell(world, &Message::Updated { version, reward, norm, counts })?;
            if version.is_multiple_of(self.settings.save_every) || version == self.settings.updates
            {
                self.save(&mut rank, &state, &mut saver)?;
            }
            self.publish(&rank, &state)?;
        }
        Ok(state)
    }

    /// Loads the newest checkpoint, or creates a new state.
    fn recover<'w>(&'w self, world: &'w World) -> anyhow::Result<(Rank<'w>, State)> {
        let device = Device::cpu(1);
        let found = lockstep_ckpt::latest(&self.settings.folder)?;
        world.barrier()?;
        let Some(found) = found else {
            let state = State { ledger: Ledger::new(MAX_LAG, 1024), used: BTreeMap::new() };
            self.tell(world, &Message::Recovered(state.clone()))?;
            return Ok((Rank::new(self.plan, world, device)?, state));
        };
        let checkpoint = lockstep_ckpt::load(&found)?;
        let state: State = serde_json::from_value(checkpoint.head().extra.learner.clone())?;
        let rank = Rank::resume(self.plan, world, device, &checkpoint)?;
        self.tell(world, &Message::Recovered(state.clone()))?;
        Ok((rank, state))
    }

    /// Saves weights and ledger in one checkpoint, so that they always match.
    fn save(
        &self,
        rank: &mut Rank<'_>,
        state: &State,
        saver: &mut Saver<'_>,
    ) -> anyhow::Result<()> {
        rank.extra.learner = serde_json::to_value(state)?;
        saver.begin(rank, state.ledger.policy_version(), Position::default())?;
        // Waits until the files are written, because producers discard the settled rollouts.
        if let Some(SaveOutcome::Failed(FailedSave { rank, what, .. })) = saver.finish()? {
            bail!("rank {rank} could not save: {what}");
        }
        self.tell(rank.group, &Message::Saved(state.clone()))
    }

    /// Sends the policy to the producers.
    fn publish(&self, rank: &Rank<'_>, state: &State) -> anyhow::Result<()> {
        let Some(params) = rank.params()? else { return Ok(()) };
        let values: Vec<f32> =
            params.names().iter().flat_map(|named| params.get(&named.name)).copied().collect();
        let message = Message::Policy { version: state.ledger.policy_version() };
        send(&mut *self.stream.lock().expect("no rank panicked"), &message, &values)
    }

    /// Sends a message from rank 0.
    fn tell(&self, group: &Group, message: &Message) -> anyhow::Result<()> {
        match group.rank() {
            0 => send(&mut *self.stream.lock().expect("no rank panicked"), message, &[]),
            _ => Ok(()),
        }
    }

    /// Collects a batch. Returns the best rollouts and the mean reward of the batch. Rank 0 broadcasts the rollouts; each
    /// rank applies its own ledger, and all ledgers give the same verdicts.
    fn collect_batch(&self, world: &World, state: &mut State) -> anyhow::Result<(Vec<i32>, f32)> {
        let mut accepted: Vec<Sample> = Vec::new();
        // Accepts no more rollouts than this update uses, so that a checkpoint after it covers all of them.
        while accepted.len() < self.settings.batch {
            let sample = self.receive(world)?;
            let Rollout { producer, sequence, .. } = &sample.rollout;
            if state.ledger.accept(&sample.rollout) == Verdict::Accepted {
                state.used.entry(producer.clone()).or_default().push(*sequence);
                accepted.push(sample);
            }
        }
        let mean = accepted.iter().map(|sample| sample.reward).sum::<f32>() / accepted.len() as f32;
        accepted.sort_by(|a, b| b.reward.total_cmp(&a.reward).then(a.rollout.cmp(&b.rollout)));
        let best = &accepted[..self.plan.train.global_batch];
        Ok((best.iter().flat_map(|sample| sample.symbols.clone()).collect(), mean))
    }

    /// Receives one rollout on rank 0 and broadcasts it.
    fn receive(&self, world: &World) -> anyhow::Result<Sample> {
        let mut words = [0i32; 4 + SEQ + 1];
        if world.rank() == 0 {
            self.tell(world, &Message::Next)?;
            let mut from = self.samples.lock().expect("no rank panicked");
            let (sample, _) = receive::<Sample>(&mut *from)?;
            let Rollout { producer, sequence, version } = &sample.rollout;
            let number = producer.trim_start_matches("producer-").parse::<i32>()?;
            words[..3].copy_from_slice(&[number, *sequence as i32, *version as i32]);
            words[3] = sample.reward as i32;
            words[4..].copy_from_slice(&sample.symbols);
        }
        world.broadcast(&mut words, 0)?;
        let rollout = Rollout {
            producer: format!("producer-{}", words[0]),
            sequence: words[1] as u64,
            version: words[2] as u64,
        };
        Ok(Sample { rollout, symbols: words[4..].to_vec(), reward: words[3] as f32 })
    }
}

/// Increases the likelihood of a batch. Returns the gradient norm.
fn update(
    rank: &mut Rank<'_>,
    batch: &Batch,
    activations: &mut Activations,
    step: u64,
) -> anyhow::Result<f64> {
    let (dtype, recompute) = (Dtype::F32, Recompute::None);
    let global_tokens = rank.plan.train.global_batch * SEQ;
    let Rank { device, groups, model, store, optimizer, .. } = rank;
    let pass = Pass {
        device,
        groups,
        dtype,
        recompute,
        dropout: None,
        global_tokens,
        loads: None,
        offload: Default::default(),
        fp8: None,
    };
    model.train(&pass, batch, store, activations);
    store.finish(device, groups)?;
    let gradients = (0..store.gradients.blocks()).filter_map(|block| store.gradients.get(block));
    let norm = device.sum_of_squares(gradients).get().sqrt();
    let adamw = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
        step,
        scale: 1.0 / norm.max(1.0),
    };
    optimizer.step(device, &adamw, store);
    store.clear();
    store.weights.all_gather(device, groups)?;
    Ok(norm)
}
