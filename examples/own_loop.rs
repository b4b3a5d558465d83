//! A training loop of one's own: what `lockstep train` does on one rank, without run file, plan or run folder.
//!
//!     cargo run --release --example own_loop

use lockstep_data::{Options, SampleId, Source, Split};
use lockstep_kernels::{AdamW, Device, Dtype, Tag};
use lockstep_model::{Activations, Batch, Groups, Model, Pass, Recompute, Sampling, Store};
use lockstep_plan::model::Shape;
use lockstep_plan::presets;
use lockstep_trainer::{Optimizer, Wanted, generate};

const STEPS: u64 = 400;
const BATCH: usize = 8; // sequences of a step
const SEQ: usize = 64; // tokens of a sequence
const SEED: u64 = 1;

fn main() -> anyhow::Result<()> {
    // A language that the program makes up, so the lowest loss that any model can reach is known.
    let source = Source::open("builtin:grammar", &Options::default())?;
    let floor = source.entropy(SEQ).expect("the grammar knows its own");

    // A model is numbers (its shape), code (its blocks) and parameters: one flat buffer per block.
    let preset = presets::shape("grammar", Some(source.vocab())).expect("a preset is a model");
    let shape = Shape { layers: 2, seq: SEQ, ..preset };
    let device = Device::cpu(std::thread::available_parallelism()?.get());
    let model = Model::whole(&shape);

    // Parameters, and their gradients, which take memory only from a backward pass to `clear`.
    let mut store = Store::alone(&device, &model.part, Dtype::F32, SEED);
    let mut optimizer = Optimizer::new(&device, &model.part);
    // What a forward pass leaves for the backward pass.
    let mut activations = Activations::default();
    let mut batch = Batch::empty(&device, BATCH, SEQ);
    let mut samples = vec![0; BATCH * (SEQ + 1)];
    // The loss is the mean over these tokens. With several micro-batches or ranks it is the tokens of all of
    // them: gradients then only have to be added up.
    let global_tokens = BATCH * SEQ;
    let (groups, dtype, recompute) = (&Groups::alone(), Dtype::F32, Recompute::None);
    let pass = Pass { device: &device, groups, dtype, recompute, dropout: None, global_tokens };

    for step in 1..=STEPS {
        // A sample is a function of (seed, step, index): there is no loader whose position could be lost.
        for (index, sample) in samples.chunks_exact_mut(SEQ + 1).enumerate() {
            source.sample(
                SampleId { split: Split::Train, seed: SEED, step, global_batch: BATCH, index },
                sample,
            );
        }
        batch.fill(&device, &samples);
        let loss = model.train(&pass, &batch, &mut store, &mut activations);

        // Gradients are summed over the ranks as blocks complete theirs; what is left of it is done here. One
        // rank by itself has nobody to sum with.
        store.finish(&device, groups)?;
        let gradients =
            (0..store.gradients.blocks()).filter_map(|block| store.gradients.get(block));
        let squares: f64 = gradients.map(|gradient| device.sum_of_squares(gradient)).sum();
        let (norm, warm) = (squares.sqrt(), (step as f64 / 20.0).min(1.0));
        let numbers = AdamW {
            lr: 3e-3 * warm * (1.0 - step as f64 / (STEPS + 1) as f64),
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            scale: 1.0 / norm.max(1.0), // clips the gradient to a norm of 1
        };
        optimizer.step(&device, &numbers, &mut store);
        store.clear();
        if step % 50 == 0 || step == 1 {
            let loss = loss.sum / loss.tokens as f64;
            println!("step {step:>3} | loss {loss:.4} | the entropy is {floor:.4}");
        }
    }

    // Every byte is accounted for, by what it is for.
    let held = |tag: Tag| device.memory().of(tag).peak / 1024;
    println!(
        "{} KiB of parameters, {} of activations",
        held(Tag::Parameters),
        held(Tag::Activations)
    );

    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None };
    let wanted = Wanted { prompt: "the ", tokens: 200, sampling, seed: SEED };
    print!("\n{}", wanted.prompt);
    generate(&device, &model, &store.weights, dtype, &source, &wanted, |text| print!("{text}"))?;
    println!();
    Ok(())
}
