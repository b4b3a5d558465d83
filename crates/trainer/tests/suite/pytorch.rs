//! Logits, all gradients and twenty optimizer steps of three tiny models, compared with PyTorch from the same weights
//! (see fixtures/pytorch).

use std::path::PathBuf;

use lockstep_ckpt::safetensors::File;
use lockstep_ckpt::{Tensors, hf};
use lockstep_kernels::{AdamW, Device, Dtype, Tensor};
use lockstep_model::{
    Activations, Batch, Groups, Model, Pass, Recompute, StagePass, Store, Weights,
};
use lockstep_plan::model::{Part, Shape};
use lockstep_trainer::{Optimizer, load_whole};

const BATCH: usize = 2;
const SEQ: usize = 24;

fn fixture(name: &str) -> PathBuf {
    // Packed tests run on a machine without the sources.
    let packed = std::env::var_os("LOCKSTEP_FIXTURES").map(PathBuf::from);
    let fixtures =
        packed.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"));
    fixtures.join("pytorch").join(name)
}

struct Case {
    shape: Shape,
    folder: PathBuf,
    expected: File,
    device: Device,
    groups: Groups,
}

impl Case {
    fn open(name: &str) -> Case {
        let folder = fixture(name);
        let mut shape = hf::Source::open(&folder).unwrap().shape().clone();
        // The coefficient of the auxiliary loss that transformers adds to Mixtral's loss.
        if let Some(moe) = &mut shape.moe {
            moe.aux_loss = 0.05;
        }
        let expected = File::open(&folder.join("expected.safetensors")).unwrap();
        Case { shape, folder, expected, device: Device::from_env(1), groups: Groups::alone() }
    }

    fn weights(&self, dtype: Dtype) -> Weights {
        let source = hf::Source::open(&self.folder).unwrap();
        load_whole(&self.device, &self.shape, dtype, &source).unwrap()
    }

    fn store(&self, part: &Part) -> Store {
        Store::on_one_rank(&self.device, part, self.weights(Dtype::F32))
    }

    fn pass(&self, dtype: Dtype) -> Pass<'_> {
        let Case { device, groups, .. } = self;
        let (recompute, global_tokens) = (Recompute::None, BATCH * SEQ);
        Pass {
            device,
            groups,
            dtype,
            recompute,
            dropout: None,
            global_tokens,
            loads: None,
            offload: Default::default(),
            fp8: None,
        }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.expected.get(name).unwrap_or_else(|| panic!("no {name} in the fixture"));
        let mut values = vec![0.0; tensor.len()];
        tensor.read(0, &mut values);
        values
    }

    fn batch(&self, prefix: &str, step: usize) -> Batch {
        let mut batch = Batch::empty(&self.device, BATCH, SEQ);
        let tokens = |name: &str| -> Vec<u32> {
            let all = self.expected.get(&format!("{prefix}{name}")).unwrap().i32s();
            all[step * BATCH * SEQ..(step + 1) * BATCH * SEQ].iter().map(|&id| id as u32).collect()
        };
        self.device.write(batch.inputs.view_mut(), &tokens("ids"));
        let targets = batch.targets.as_mut().expect("a batch for training");
        self.device.write(targets.view_mut(), &tokens("targets"));
        batch
    }

    fn logits(&self, model: &Model, pass: &Pass<'_>, weights: &mut Weights) -> Tensor {
        let mut batch = self.batch("", 0);
        batch.targets = None;
        let batch = &batch;
        let at = StagePass { stage: 0, pass, batch, defer_weight_grads: false };
        model.infer(&at, None, weights, &mut |_, _| {})
    }
}

/// The largest difference, relative to the largest value.
fn relative(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let largest = theirs.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let difference = ours.iter().zip(theirs).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    (difference / largest.max(1e-30)) as f64
}

#[test]
fn logits_match_pytorch() {
    for name in ["gpt2", "llama", "mixtral", "llama-sharded"] {
        let case = Case::open(name);
        let model = Model::whole(&case.shape);
        let (pass, mut weights) = (case.pass(Dtype::F32), case.weights(Dtype::F32));
        let logits = case.logits(&model, &pass, &mut weights);
        let error = relative(&case.device.to_vec::<f32>(logits.view()), &case.floats("logits"));
        println!("{name}: logits differ by {error:.1e}");
        assert!(error <= 1e-4, "{name}: {error}");
    }
}

/// bf16 has 8 bits of precision: PyTorch's bf16 logits differ from its f32 logits by about 1%. Ours may differ by at
/// most twice as much.
#[test]
fn bf16_is_about_as_accurate_as_pytorch() {
    for name in ["gpt2", "llama", "mixtral"] {
        let case = Case::open(name);
        let model = Model::whole(&case.shape);
        let (pass, mut weights) = (case.pass(Dtype::Bf16), case.weights(Dtype::Bf16));
        let logits = case.logits(&model, &pass, &mut weights);
        let exact = case.floats("logits");
        let (ours, theirs) = (
            relative(&case.device.to_vec::<f32>(logits.view()), &exact),
            relative(&case.floats("bf16.logits"), &exact),
        );
        println!("{name}: difference from f32: ours {ours:.1e}, PyTorch {theirs:.1e}");
        assert!(ours <= 2.0 * theirs, "{name}: {ours} against {theirs}");
    }
}

#[test]
fn gradients_match_pytorch() {
    for name in ["gpt2", "llama", "mixtral"] {
        let case = Case::open(name);
        let model = Model::whole(&case.shape);
        let (pass, mut store) = (case.pass(Dtype::F32), case.store(&model.part));
        let loss = model.train(&pass, &case.batch("", 0), &mut store, &mut Activations::default());
        let objective = loss.sum / loss.tokens as f64 + loss.auxiliary;
        let expected = case.floats("loss")[0] as f64;
        assert!(
            (objective / expected - 1.0).abs() < 1e-5,
            "{name}: loss {objective}, PyTorch {expected}"
        );

        // Gradients have the names of the weights with a prefix.
        let file = case.folder.join("expected.safetensors");
        let theirs = hf::Source::open_with_prefix(&case.folder, &file, "grad.").unwrap();
        let mut worst = 0.0f64;
        for (block, params) in model.part.blocks.iter().enumerate() {
            let gradient = store.gradients.get(block).unwrap();
            for (start, param) in params.placed() {
                let (global, len) = (&param.whole.name, param.len());
                let mut expected = vec![0.0; len];
                theirs.read(global, &mut expected).unwrap();
                let ours = case.device.to_vec::<f32>(gradient.part(start..start + len));
                // In exact arithmetic the gradient of the key bias is zero; both values are rounding errors.
                if global.ends_with("attention.k.bias") {
                    assert!(ours.iter().all(|g| g.abs() < 1e-5), "{name} {global}");
                    continue;
                }
                let error = relative(&ours, &expected);
                worst = worst.max(error);
                assert!(error <= 1e-4, "{name} {global}: {error}");
            }
        }
        println!("{name}: gradients differ by at most {worst:.1e}");
    }
}

#[test]
fn twenty_optimizer_steps_match_pytorch() {
    for name in ["gpt2", "llama", "mixtral"] {
        let case = Case::open(name);
        let model = Model::whole(&case.shape);
        let (pass, mut store) = (case.pass(Dtype::F32), case.store(&model.part));
        let mut optimizer = Optimizer::new(&case.device, &model.part);
        let mut activations = Activations::default();
        let (losses, norms) = (case.floats("train.losses"), case.floats("train.norms"));
        for step in 0..20 {
            let batch = case.batch("train.", step);
            let loss = model.train(&pass, &batch, &mut store, &mut activations);
            let objective = loss.sum / loss.tokens as f64 + loss.auxiliary;
            let gradients =
                (0..store.gradients.blocks()).map(|block| store.gradients.get(block).unwrap());
            let squares = case.device.sum_of_squares(gradients).get();
            let norm = squares.sqrt();
            let (loss_error, norm_error) = (
                (objective / losses[step] as f64 - 1.0).abs(),
                (norm / norms[step] as f64 - 1.0).abs(),
            );
            assert!(
                loss_error < 1e-3,
                "{name} step {step}: loss {objective} against {}",
                losses[step]
            );
            assert!(norm_error < 5e-3, "{name} step {step}: norm {norm} against {}", norms[step]);
            if step == 19 {
                println!("{name}: the 20th loss differs by {loss_error:.1e}");
            }
            let numbers = AdamW {
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step: step as u64 + 1,
                scale: if norm > 1.0 { 1.0 / norm } else { 1.0 },
            };
            optimizer.step(&case.device, &numbers, &mut store);
            store.clear();
        }
    }
}
