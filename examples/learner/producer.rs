//! Producers: generate rollouts with the newest policy, and keep each until a checkpoint has settled it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::thread::JoinHandle;

use lockstep_ckpt::rollouts::Rollout;
use lockstep_ckpt::{Named, Tensors};
use lockstep_kernels::{Device, Dtype, RandomKey};
use lockstep_model::{Cache, Model, Sampling, sample as sample_token};
use lockstep_plan::model::Shape;
use lockstep_trainer::load_whole;

use super::{Message, PRODUCERS, SEQ, SYMBOLS, Sample, State};

/// A message of the learner to all producers, and the parameters of a policy.
pub type Broadcast = (Message, Arc<Vec<f32>>);

pub type Producers = (Vec<JoinHandle<()>>, Vec<Sender<Broadcast>>);

pub fn start_producers(shape: &Shape, samples: &SyncSender<Sample>) -> Producers {
    let start = |number: usize| {
        let (to_producer, messages) = channel();
        let (samples, shape) = (samples.clone(), shape.clone());
        let name = format!("producer-{number}");
        let run = move || produce(&name, number as u64, &shape, &messages, &samples);
        (std::thread::spawn(run), to_producer)
    };
    (0..PRODUCERS).map(start).unzip()
}

/// The parameters of a policy, one after the other.
struct Policy {
    list: Vec<Named>,
    values: Arc<Vec<f32>>,
}

impl Tensors for Policy {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        let before = self.list.iter().take_while(|named| named.name != name);
        let start: usize = before.map(Named::len).sum();
        out.copy_from_slice(&self.values[start..start + out.len()]);
        Ok(())
    }
}

/// One producer. Returns when its channels are closed.
fn produce(
    name: &str,
    seed: u64,
    shape: &Shape,
    messages: &Receiver<Broadcast>,
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
        for (message, values) in first.into_iter().chain(messages.try_iter()) {
            match message {
                Message::Policy { version } => {
                    let list = lockstep_ckpt::params_of(shape);
                    let weights = load_whole(&device, shape, Dtype::F32, &Policy { list, values });
                    policy = Some((version, weights.expect("all parameters are in memory")));
                }
                Message::Next | Message::Updated { .. } => {}
                Message::Saved(State { ledger, .. }) => {
                    unsettled.retain(|number, _| !ledger.is_settled(name, *number));
                }
                Message::Recovered(State { ledger, .. }) => {
                    let from = ledger.cursor(name);
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
