//! Text generation.

use lockstep_kernels::{Device, Dtype};
use lockstep_model::{Cache, Model, Sampling, Weights, sample};
use lockstep_parallel::Storage;
use lockstep_plan::presets;
use lockstep_plan::reduction::Gather;
use lockstep_trainer::{Generator, Prompt, generate};

use crate::plans::source;

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None };

/// A model whose next token depends on its whole context: initial weights are scaled by 8.
fn model(device: &Device) -> (Model, Weights) {
    let mut shape = presets::shape("gpt2-test", Some(source().vocab())).unwrap();
    shape.seq = 10;
    let model = Model::whole(&shape);
    let storage = Storage::on_device(Dtype::F32, Gather::Never);
    let mut weights = Weights::init(device, &model.part, storage, 3);
    for block in 0..weights.blocks() {
        for unit in 0..weights.shards(block).count() {
            let (master, _) = weights.own_mut(block, unit);
            let mut values = device.to_vec::<f32>(master.as_view());
            values.iter_mut().for_each(|value| *value *= 8.0);
            device.write(master, &values);
        }
    }
    (model, weights)
}

/// When the context is full, generation continues with its second half. Each token equals that of a model without
/// cache.
#[test]
fn generation_continues_when_the_context_is_full() {
    let device = Device::from_env(1);
    let (source, (model, weights)) = (source(), model(&device));
    let seq = model.seq;
    for prompt in ["a", "a long prompt that does not fit", "ten bytes."] {
        let tokens = 3 * seq;
        let mut ids = source.encode(prompt).unwrap();
        let mut start = 0;
        for _ in 0..tokens {
            if ids.len() - start > seq {
                start = ids.len() - seq.div_ceil(2);
            }
            let mut cache = Cache::new(&model, Dtype::F32);
            let logits = model.extend(&device, &weights, &mut cache, &ids[start..]);
            ids.push(sample(&logits, &GREEDY, 0.0));
        }
        let expected = source.decode(&ids[prompt.len()..]).unwrap();

        let request = Prompt { prompt, tokens, sampling: GREEDY, seed: 0 };
        let mut text = String::new();
        let (device, model, weights) = (&device, &model, &weights);
        let tokenizer = source.tokenizer().unwrap();
        let generator = Generator { device, model, weights, dtype: Dtype::F32, tokenizer };
        generate(generator, &request, |piece| text.push_str(piece)).unwrap();
        assert_eq!(text, expected, "after {prompt:?}");
    }
}
