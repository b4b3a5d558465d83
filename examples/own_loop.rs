//! A custom training loop on one rank, without run file, plan or run folder.
//!
//!     cargo run --release --example own_loop

use lockstep_data::{Options, SampleId, Source, Split};
use lockstep_kernels::{AdamW, Device, Dtype, Tag};
use lockstep_model::{Activations, Batch, Groups, Model, Pass, Recompute, Sampling, Store};
use lockstep_plan::model::Shape;
use lockstep_plan::presets;
use lockstep_trainer::{Generator, Optimizer, Prompt, generate};

const STEPS: u64 = 400;
const BATCH: usize = 8; // sequences per step
const SEQ: usize = 64; // tokens per sequence
const SEED: u64 = 1;

fn main() -> anyhow::Result<()> {
    // A synthetic language whose entropy, the lowest possible loss, is known.
    let source = Source::open("builtin:grammar", &Options::default())?;
    let floor = source.entropy(SEQ).expect("the grammar's entropy is known");

    // A model is a shape, a list of blocks, and parameters in one flat buffer per block.
    let preset = presets::shape("grammar", Some(source.vocab())).expect("grammar is a preset");
    let shape = Shape { layers: 2, seq: SEQ, ..preset };
    let device = Device::cpu(std::thread::available_parallelism()?.get());
    let model = Model::whole(&shape);

    // Parameters and gradients. Gradients take memory only from a backward pass to `clear`.
    let mut store = Store::alone(&device, &model.part, Dtype::F32, SEED);
    let mut optimizer = Optimizer::new(&device, &model.part);
    // Saved by the forward pass for the backward pass.
    let mut activations = Activations::default();
    let mut batch = Batch::empty(&device, BATCH, SEQ);
    let mut samples = vec![0; BATCH * (SEQ + 1)];
    // The loss is the mean over the tokens of all micro-batches and ranks, so their gradients are simply summed.
    let global_tokens = BATCH * SEQ;
    let (groups, dtype, recompute) = (&Groups::alone(), Dtype::F32, Recompute::None);
    let pass = Pass {
        device: &device,
        groups,
        dtype,
        recompute,
        dropout: None,
        global_tokens,
        loads: None,
        offload: Default::default(),
        fp8: None,
    };

    for step in 1..=STEPS {
        // A sample is a function of (seed, batch, index), so there is no loader state to save.
        let (split, batch_number) = (Split::Train, step - 1);
        for (index, sample) in samples.chunks_exact_mut(SEQ + 1).enumerate() {
            source.sample(
                SampleId { split, seed: SEED, batch: batch_number, global_batch: BATCH, index },
                sample,
            );
        }
        batch.fill(&device, &samples);
        let loss = model.train(&pass, &batch, &mut store, &mut activations);

        // Completes the reduction of gradients over the ranks; one rank has nothing to reduce.
        store.finish(&device, groups)?;
        let gradients =
            (0..store.gradients.blocks()).filter_map(|block| store.gradients.get(block));
        let squares = device.sum_of_squares(gradients).get();
        let (norm, warmup) = (squares.sqrt(), (step as f64 / 20.0).min(1.0));
        let adamw = AdamW {
            lr: 3e-3 * warmup * (1.0 - step as f64 / (STEPS + 1) as f64),
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            scale: 1.0 / norm.max(1.0), // clips the gradient to a norm of 1
        };
        optimizer.step(&device, &adamw, &mut store);
        store.clear();
        if step % 50 == 0 || step == 1 {
            let loss = loss.sum / loss.tokens as f64;
            println!("step {step:>3} | loss {loss:.4} | entropy {floor:.4}");
        }
    }

    // All memory is counted by tag.
    let peak_kib = |tag: Tag| device.memory().of(tag).peak / 1024;
    println!(
        "peak memory: {} KiB of parameters, {} KiB of activations",
        peak_kib(Tag::Parameters),
        peak_kib(Tag::Activations)
    );

    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None };
    let request = Prompt { prompt: "the ", tokens: 200, sampling, seed: SEED };
    print!("\n{}", request.prompt);
    let (device, model, weights) = (&device, &model, &store.weights);
    let generator = Generator { device, model, weights, dtype, tokenizer: source.tokenizer()? };
    generate(generator, &request, |text| print!("{text}"))?;
    println!();
    Ok(())
}
