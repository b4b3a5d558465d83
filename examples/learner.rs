//! A learner that is taught by rollouts of its own policy, and is struck down in the middle: two ranks learn, four
//! producers play, and after the crash every rollout is learned from once or told that it is not wanted.
//!
//!     cargo run --release --example learner
//!
//! The policy is a small GPT over 16 symbols. A rollout is a row of them, and its reward how often a symbol is
//! followed by the next one (… 3 4 5 …). The learner takes the best quarter of each batch and makes it likelier.

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
use lockstep_model::{Activations, Batch, Cache, Model, Pass, Recompute, Sampling, sample};
use lockstep_plan::model::Shape;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::{HostTensors, Rank, SaveOutcome, Saver, load_whole};

const SYMBOLS: usize = 16;
const SEQ: usize = 16; // a rollout is one more
const RANKS: usize = 2;
const PRODUCERS: usize = 4;
const BATCH: usize = 64; // rollouts of an update
const BEST: usize = BATCH / 4; // of them, learned from
const UPDATES: u64 = 120;
const SAVE_EVERY: u64 = 20;
const CRASH: u64 = 73; // the learner dies after this update
const MAX_LAG: u64 = 2; // versions

/// What a producer sends.
#[derive(Clone)]
struct Played {
    label: Rollout,
    symbols: Vec<i32>, // SEQ + 1
    reward: f32,
}

/// What a learner tells a producer.
enum News {
    Policy(u64, Arc<HostTensors>),
    /// A checkpoint holds this ledger.
    Saved(Ledger),
    /// The learner has gone back to this ledger.
    Recovered(Ledger),
}

fn main() -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("lockstep-learner-{}", std::process::id()));
    let plan = plan()?;
    let (play, played) = sync_channel(2 * BATCH);
    let mut lines = Vec::new();
    let mut producers = Vec::new();
    for number in 0..PRODUCERS {
        let (tell, news) = channel();
        let (play, shape) = (play.clone(), plan.model.clone());
        lines.push(tell);
        let name = format!("producer-{number}");
        producers
            .push(std::thread::spawn(move || produce(&name, number as u64, &shape, &news, &play)));
    }
    drop(play);
    let played = Mutex::new(played);

    let learner =
        Learner { plan: &plan, folder: &folder, played: &played, lines: Mutex::new(lines) };
    println!("-- {RANKS} ranks learn, {PRODUCERS} producers play");
    on_threads(RANKS, |world| learner.learn(&world, CRASH))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "-- the learner is gone, and with it what it knew since its checkpoint and what was on its way"
    );
    while played.lock().expect("no rank panicked").try_recv().is_ok() {}
    println!("-- it comes back");
    let ends = on_threads(RANKS, |world| learner.learn(&world, UPDATES));
    let mut ledgers = ends.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ledger = ledgers.remove(0);
    assert!(ledgers.iter().all(|other| *other == ledger), "ranks keep the same ledger");

    // No more policies: producers end when nobody hears them any more.
    drop(learner);
    drop(played);
    for producer in producers {
        producer.join().expect("producers do not panic");
    }
    let told = ledger.counts();
    println!("-- told in the history that survived: {told:?}");
    assert_eq!(
        told.accepted,
        UPDATES * BATCH as u64,
        "each update learned from a batch, each rollout once"
    );
    let settled: u64 = ledger.producers().map(|name| ledger.cursor(name)).sum();
    println!("   {settled} rollouts have their answer");
    assert_eq!(settled, told.accepted + told.stale + told.future_version, "one answer each");
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
    let around = Environment::one_host(RANKS, RANKS).with_vocab(SYMBOLS);
    Plan::resolve(&Config::parse(&text, &[]), &around).map_err(|mistakes| {
        anyhow::anyhow!("{}", mistakes.iter().map(|m| m.to_string()).collect::<Vec<_>>().join("\n"))
    })
}

struct Learner<'a> {
    plan: &'a Plan,
    folder: &'a Path,
    /// Heard by rank 0.
    played: &'a Mutex<Receiver<Played>>,
    /// To each producer.
    lines: Mutex<Vec<Sender<News>>>,
}

impl Learner<'_> {
    /// Learns from where the last checkpoint is up to a version. All ranks call it; all come to the same ledger.
    fn learn(&self, world: &World, until: u64) -> anyhow::Result<Ledger> {
        let (mut rank, mut ledger) = self.recover(world)?;
        let mut saver = Saver::new(self.plan, world, self.folder, 0, Disk::default());
        self.publish(&rank, &ledger)?;
        let mine = BEST / RANKS;
        let mut batch = Batch::empty(&rank.device, mine, SEQ);
        let mut kept = Activations::default();
        while ledger.policy_version() < until {
            let (symbols, reward) = self.gather(world, &mut ledger)?;
            let own = &symbols[world.rank() * mine * (SEQ + 1)..][..mine * (SEQ + 1)];
            let own: Vec<u32> = own.iter().map(|symbol| *symbol as u32).collect();
            batch.fill(&rank.device, &own);
            let norm = update(&mut rank, &batch, &mut kept, ledger.policy_version() + 1)?;

            // The version first, then the policy itself: nobody can be ahead of the ledger.
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

    /// The state of the newest checkpoint, or a fresh one.
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
            self.tell(|| News::Recovered(ledger.clone()));
        }
        Ok((rank, ledger))
    }

    /// Weights and ledger in one checkpoint: they agree, whatever happens next.
    fn save(
        &self,
        rank: &mut Rank<'_>,
        ledger: &Ledger,
        saver: &mut Saver<'_>,
    ) -> anyhow::Result<()> {
        rank.extra.learner = serde_json::to_value(ledger)?;
        saver.begin(rank, ledger.policy_version(), Position::default())?;
        // Files are written beside the learning; here it waits, so that what is told to producers stands.
        match saver.finish()? {
            Some(SaveOutcome::Failed { rank, what, .. }) => {
                bail!("rank {rank} could not save: {what}")
            }
            _ if rank.group.rank() == 0 => self.tell(|| News::Saved(ledger.clone())),
            _ => {}
        }
        Ok(())
    }

    /// Gives producers the policy.
    fn publish(&self, rank: &Rank<'_>, ledger: &Ledger) -> anyhow::Result<()> {
        if let Some(params) = rank.params()? {
            let params = Arc::new(params);
            self.tell(|| News::Policy(ledger.policy_version(), params.clone()));
        }
        Ok(())
    }

    fn tell(&self, news: impl Fn() -> News) {
        for line in self.lines.lock().expect("no rank panicked").iter() {
            // A producer that has ended needs no news.
            let _ = line.send(news());
        }
    }

    /// The best of a batch, and the mean reward of all of it. Rank 0 hears the producers and passes on what
    /// it heard, verdicts not included: every rank asks its own ledger, and all come to the same answers.
    fn gather(&self, world: &World, ledger: &mut Ledger) -> anyhow::Result<(Vec<i32>, f32)> {
        let mut accepted: Vec<Played> = Vec::new();
        // What is accepted belongs to this update, so that a checkpoint after it holds all of it: no more is heard
        // than it takes.
        while accepted.len() < BATCH {
            let played = self.hear(world)?;
            if ledger.accept(&played.label) == Verdict::Accepted {
                accepted.push(played);
            }
        }
        let mean = accepted.iter().map(|played| played.reward).sum::<f32>() / BATCH as f32;
        accepted.sort_by(|a, b| b.reward.total_cmp(&a.reward).then(a.label.cmp(&b.label)));
        Ok((accepted[..BEST].iter().flat_map(|played| played.symbols.clone()).collect(), mean))
    }

    /// One rollout, as every rank gets it.
    fn hear(&self, world: &World) -> anyhow::Result<Played> {
        let mut words = [0i32; 4 + SEQ + 1];
        if world.rank() == 0 {
            let played = self.played.lock().expect("no rank panicked").recv()?;
            let number = played.label.producer.trim_start_matches("producer-").parse::<i32>()?;
            let label = [number, played.label.sequence as i32, played.label.version as i32];
            words[..3].copy_from_slice(&label);
            words[3] = played.reward as i32;
            words[4..].copy_from_slice(&played.symbols);
        }
        world.broadcast(&mut words, 0)?;
        let label = Rollout {
            producer: format!("producer-{}", words[0]),
            sequence: words[1] as u64,
            version: words[2] as u64,
        };
        Ok(Played { label, symbols: words[4..].to_vec(), reward: words[3] as f32 })
    }
}

/// Makes a batch likelier. Gives the norm of the gradient.
fn update(
    rank: &mut Rank<'_>,
    batch: &Batch,
    kept: &mut Activations,
    step: u64,
) -> anyhow::Result<f64> {
    let (dtype, recompute) = (Dtype::F32, Recompute::None);
    let global_tokens = BEST * SEQ;
    let Rank { device, groups, model, store, optimizer, .. } = rank;
    let pass = Pass { device, groups, dtype, recompute, dropout: None, global_tokens };
    model.train(&pass, batch, store, kept);
    store.finish(device, groups)?;
    let gradients = (0..store.gradients.blocks()).filter_map(|block| store.gradients.get(block));
    let norm = device.sum_of_squares(gradients).get().sqrt();
    let numbers = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
        step,
        scale: 1.0 / norm.max(1.0),
    };
    optimizer.step(device, &numbers, store);
    store.clear();
    store.weights.all_gather(device, groups)?;
    Ok(norm)
}

/// A producer: plays with the newest policy that it has heard of, and keeps what no checkpoint has settled.
fn produce(name: &str, seed: u64, shape: &Shape, news: &Receiver<News>, play: &SyncSender<Played>) {
    let (device, model) = (Device::cpu(1), Model::whole(shape));
    let mut cache = Cache::new(&model, Dtype::F32);
    let mut kept: BTreeMap<u64, Played> = BTreeMap::new();
    let mut policy = None;
    let mut sequence = 0;
    loop {
        // Without a policy there is nothing to do but to wait for one.
        let waited = if policy.is_none() { news.recv().ok() } else { None };
        if policy.is_none() && waited.is_none() {
            return;
        }
        for news in waited.into_iter().chain(news.try_iter()) {
            match news {
                News::Policy(version, params) => {
                    let weights = load_whole(&device, shape, Dtype::F32, &*params);
                    policy = Some((version, weights.expect("it is in memory, and whole")));
                }
                News::Saved(ledger) => kept.retain(|number, _| !ledger.is_settled(name, *number)),
                News::Recovered(ledger) => {
                    let from = ledger.cursor(name);
                    println!(
                        "   {name} sends {} rollouts again, from {from} on",
                        kept.range(from..).count()
                    );
                    for played in kept.range(from..).map(|(_, played)| played.clone()) {
                        if play.send(played).is_err() {
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
            symbols.push(sample(&logits, &sampling, uniform(index)));
        }
        let follows = |two: &&[u32]| (two[0] + 1) % SYMBOLS as u32 == two[1];
        let played = Played {
            label: Rollout { producer: name.into(), sequence, version: *version },
            reward: symbols.windows(2).filter(follows).count() as f32,
            symbols: symbols.into_iter().map(|symbol| symbol as i32).collect(),
        };
        kept.insert(sequence, played.clone());
        sequence += 1;
        if play.send(played).is_err() {
            return;
        }
    }
}
