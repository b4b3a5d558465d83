//! Reinforcement learning with exactly-once rollouts. Two ranks train a policy on rollouts of four producers; the learner
//! crashes and recovers, and every rollout is used once or rejected.
//!
//!     cargo run --release --example learner
//!
//! The policy is a small GPT over 16 symbols. A rollout is a sequence of symbols. Its reward is the number of symbols
//! followed by their successor (… 3 4 5 …). The learner trains on the best quarter of each batch.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};

use anyhow::bail;
use lockstep_ckpt::rollouts::{Ledger, Rollout, Verdict};
use lockstep_ckpt::{Disk, Position};
use lockstep_comm::{World, on_threads};
use lockstep_kernels::RandomKey;
use lockstep_kernels::{AdamW, Device, Dtype};
use lockstep_model::{
    Activations, Batch, Cache, Model, Pass, Recompute, Sampling, sample as sample_token,
};
use lockstep_plan::model::Shape;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::{HostTensors, Rank, SaveOutcome, Saver, load_whole};

const SYMBOLS: usize = 16;
const SEQ: usize = 16; // a rollout has SEQ + 1 symbols
const RANKS: usize = 2;
const PRODUCERS: usize = 4;
const BATCH: usize = 64; // rollouts per update
const BEST: usize = BATCH / 4; // rollouts to train on
const UPDATES: u64 = 120;
const SAVE_EVERY: u64 = 20;
const CRASH: u64 = 73; // the learner crashes after this update
const MAX_LAG: u64 = 2; // maximum age of a rollout's policy in versions

/// A rollout with its data, as sent by a producer.
#[derive(Clone)]
struct Sample {
    rollout: Rollout,
    symbols: Vec<i32>, // SEQ + 1
    reward: f32,
}

/// A message from the learner to the producers.
enum Message {
    Policy(u64, Arc<HostTensors>),
    /// A checkpoint with this ledger was saved.
    Saved(Ledger),
    /// The learner recovered from a checkpoint with this ledger.
    Recovered(Ledger),
}

fn main() -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("lockstep-learner-{}", std::process::id()));
    let plan = plan()?;
    let (sender, samples) = sync_channel(2 * BATCH);
    let mut to_producers = Vec::new();
    let mut producers = Vec::new();
    for number in 0..PRODUCERS {
        let (to_producer, messages) = channel();
        let (sender, shape) = (sender.clone(), plan.model.clone());
        to_producers.push(to_producer);
        let name = format!("producer-{number}");
        producers.push(std::thread::spawn(move || {
            produce(&name, number as u64, &shape, &messages, &sender)
        }));
    }
    drop(sender);
    let samples = Mutex::new(samples);

    let to_producers = Mutex::new(to_producers);
    let learner = Learner { plan: &plan, folder: &folder, samples: &samples, to_producers };
    println!("-- {RANKS} ranks train, {PRODUCERS} producers generate rollouts");
    on_threads(RANKS, |world| learner.learn(&world, CRASH))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "-- the learner crashes and loses its updates since the checkpoint and the rollouts in flight"
    );
    while samples.lock().expect("no rank panicked").try_recv().is_ok() {}
    println!("-- the learner restarts");
    let results = on_threads(RANKS, |world| learner.learn(&world, UPDATES));
    let mut ledgers = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ledger = ledgers.remove(0);
    assert!(ledgers.iter().all(|other| *other == ledger), "all ranks have the same ledger");

    // Producers stop when their channels are closed.
    drop(learner);
    drop(samples);
    for producer in producers {
        producer.join().expect("producers do not panic");
    }
    let counts = ledger.counts();
    println!("-- verdicts in the final ledger: {counts:?}");
    assert_eq!(
        counts.accepted,
        UPDATES * BATCH as u64,
        "each update uses one batch, and each rollout is used once"
    );
    let settled: u64 = ledger.producers().map(|name| ledger.cursor(name)).sum();
    println!("   {settled} rollouts have a verdict");
    assert_eq!(settled, counts.accepted + counts.stale + counts.future_version, "one verdict each");
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

fn plan() -> anyhow::Result<Plan> {
    let text = format!(
        "name = \"learner\"\n[model]\nfamily = \"gpt2\"\nlayers = 2\ndim = 32\nheads = 2\nseq = {SEQ}\n\
         [train]\nglobal_batch = {}\nmicro_batch = {}\nthreads = 1\n[layout]\ndata = {RANKS}",
        BEST,
        BEST / RANKS
    );
    let environment = Environment::one_host(RANKS, RANKS).with_vocab(SYMBOLS);
    Plan::resolve(&Config::parse(&text, &[]), &environment).map_err(|errors| {
        anyhow::anyhow!(
            "{}",
            errors.iter().map(|error| error.to_string()).collect::<Vec<_>>().join("\n")
        )
    })
}

struct Learner<'a> {
    plan: &'a Plan,
    folder: &'a Path,
    /// Received by rank 0.
    samples: &'a Mutex<Receiver<Sample>>,
    to_producers: Mutex<Vec<Sender<Message>>>,
}

impl Learner<'_> {
    /// Trains from the newest checkpoint up to version `until`. All ranks call this and return the same ledger.
    fn learn(&self, world: &World, until: u64) -> anyhow::Result<Ledger> {
        let (mut rank, mut ledger) = self.recover(world)?;
        let mut saver = Saver::new(self.plan, world, self.folder, 0, Disk::default());
        self.publish(&rank, &ledger)?;
        let local = BEST / RANKS;
        let mut batch = Batch::empty(&rank.device, local, SEQ);
        let mut activations = Activations::default();
        while ledger.policy_version() < until {
            let (symbols, reward) = self.collect_batch(world, &mut ledger)?;
            let own = &symbols[world.rank() * local * (SEQ + 1)..][..local * (SEQ + 1)];
            let own: Vec<u32> = own.iter().map(|symbol| *symbol as u32).collect();
            batch.fill(&rank.device, &own);
            let norm = update(&mut rank, &batch, &mut activations, ledger.policy_version() + 1)?;

            // The ledger advances before the policy is published, so no rollout has a version ahead of the ledger.
            let version = ledger.advance();
            if version.is_multiple_of(SAVE_EVERY) {
                self.save(&mut rank, &ledger, &mut saver)?;
            }
            self.publish(&rank, &ledger)?;
            if world.rank() == 0 && (version.is_multiple_of(10) || version == until) {
                println!(
                    "version {version:>3} | mean reward {reward:>5.2} of {SEQ} | grad norm {norm:.3} | {:?}",
                    ledger.counts()
                );
            }
        }
        Ok(ledger)
    }

    /// Loads the newest checkpoint, or creates a new state.
    fn recover<'w>(&'w self, world: &'w World) -> anyhow::Result<(Rank<'w>, Ledger)> {
        let device = Device::cpu(1);
        let found = lockstep_ckpt::latest(self.folder)?;
        world.barrier()?;
        let Some(found) = found else {
            return Ok((Rank::new(self.plan, world, device)?, Ledger::new(MAX_LAG, 1024)));
        };
        let checkpoint = lockstep_ckpt::load(&found)?;
        let ledger: Ledger = serde_json::from_value(checkpoint.head().extra.learner.clone())?;
        let rank = Rank::resume(self.plan, world, device, &checkpoint)?;
        if world.rank() == 0 {
            println!("recovered version {} with {:?}", ledger.policy_version(), ledger.counts());
            self.send(|| Message::Recovered(ledger.clone()));
        }
        Ok((rank, ledger))
    }

    /// Saves weights and ledger in one checkpoint, so that they always match.
    fn save(
        &self,
        rank: &mut Rank<'_>,
        ledger: &Ledger,
        saver: &mut Saver<'_>,
    ) -> anyhow::Result<()> {
        rank.extra.learner = serde_json::to_value(ledger)?;
        saver.begin(rank, ledger.policy_version(), Position::default())?;
        // Waits until the files are written, because producers discard the settled rollouts.
        match saver.finish()? {
            Some(SaveOutcome::Failed { rank, what, .. }) => {
                bail!("rank {rank} could not save: {what}")
            }
            _ if rank.group.rank() == 0 => self.send(|| Message::Saved(ledger.clone())),
            _ => {}
        }
        Ok(())
    }

    /// Sends the policy to the producers.
    fn publish(&self, rank: &Rank<'_>, ledger: &Ledger) -> anyhow::Result<()> {
        if let Some(params) = rank.params()? {
            let params = Arc::new(params);
            self.send(|| Message::Policy(ledger.policy_version(), params.clone()));
        }
        Ok(())
    }

    fn send(&self, message: impl Fn() -> Message) {
        for producer in self.to_producers.lock().expect("no rank panicked").iter() {
            // The producer may have stopped.
            let _ = producer.send(message());
        }
    }

    /// Collects a batch. Returns the best rollouts and the mean reward of the batch. Rank 0 broadcasts the rollouts; each
    /// rank applies its own ledger, and all ledgers give the same verdicts.
    fn collect_batch(&self, world: &World, ledger: &mut Ledger) -> anyhow::Result<(Vec<i32>, f32)> {
        let mut accepted: Vec<Sample> = Vec::new();
        // Accepts no more rollouts than this update uses, so that a checkpoint after it covers all of them.
        while accepted.len() < BATCH {
            let sample = self.receive(world)?;
            if ledger.accept(&sample.rollout) == Verdict::Accepted {
                accepted.push(sample);
            }
        }
        let mean = accepted.iter().map(|sample| sample.reward).sum::<f32>() / BATCH as f32;
        accepted.sort_by(|a, b| b.reward.total_cmp(&a.reward).then(a.rollout.cmp(&b.rollout)));
        Ok((accepted[..BEST].iter().flat_map(|sample| sample.symbols.clone()).collect(), mean))
    }

    /// Receives one rollout on rank 0 and broadcasts it.
    fn receive(&self, world: &World) -> anyhow::Result<Sample> {
        let mut words = [0i32; 4 + SEQ + 1];
        if world.rank() == 0 {
            let sample = self.samples.lock().expect("no rank panicked").recv()?;
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
    let global_tokens = BEST * SEQ;
    let Rank { device, groups, model, store, optimizer, .. } = rank;
    let pass = Pass { device, groups, dtype, recompute, dropout: None, global_tokens, loads: None };
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

/// A producer: generates rollouts with the newest policy, and keeps each until a checkpoint has settled it.
fn produce(
    name: &str,
    seed: u64,
    shape: &Shape,
    messages: &Receiver<Message>,
    sender: &SyncSender<Sample>,
) {
    let (device, model) = (Device::cpu(1), Model::whole(shape));
    let mut cache = Cache::new(&model, Dtype::F32);
    let mut unsettled: BTreeMap<u64, Sample> = BTreeMap::new();
    let mut policy = None;
    let mut sequence = 0;
    loop {
        // Waits for the first policy.
        let first = if policy.is_none() { messages.recv().ok() } else { None };
        if policy.is_none() && first.is_none() {
            return;
        }
        for message in first.into_iter().chain(messages.try_iter()) {
            match message {
                Message::Policy(version, params) => {
                    let weights = load_whole(&device, shape, Dtype::F32, &*params);
                    policy = Some((version, weights.expect("all parameters are in memory")));
                }
                Message::Saved(ledger) => {
                    unsettled.retain(|number, _| !ledger.is_settled(name, *number));
                }
                Message::Recovered(ledger) => {
                    let from = ledger.cursor(name);
                    println!(
                        "   {name} resends {} rollouts, starting at {from}",
                        unsettled.range(from..).count()
                    );
                    for sample in unsettled.range(from..).map(|(_, sample)| sample.clone()) {
                        if sender.send(sample).is_err() {
                            return;
                        }
                    }
                }
            }
        }
        let Some((version, weights)) = &policy else { continue };
        let key = RandomKey { seed, stream: sequence };
        let uniform = |index: usize| (f64::from(key.word(index as u64)) + 0.5) / 2f64.powi(32);
        let mut symbols = vec![(uniform(SEQ) * SYMBOLS as f64) as u32];
        cache.clear();
        for index in 0..SEQ {
            let new = &symbols[index..];
            let logits = model.extend(&device, weights, &mut cache, new);
            let sampling = Sampling { temperature: 1.0, top_k: None, top_p: None };
            symbols.push(sample_token(&logits, &sampling, uniform(index)));
        }
        let is_successor = |pair: &&[u32]| (pair[0] + 1) % SYMBOLS as u32 == pair[1];
        let sample = Sample {
            rollout: Rollout { producer: name.into(), sequence, version: *version },
            reward: symbols.windows(2).filter(is_successor).count() as f32,
            symbols: symbols.into_iter().map(|symbol| symbol as i32).collect(),
        };
        unsettled.insert(sequence, sample.clone());
        sequence += 1;
        if sender.send(sample).is_err() {
            return;
        }
    }
}
