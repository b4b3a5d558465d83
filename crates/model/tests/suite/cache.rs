//! Generation with a cache equals a forward pass of the whole sequence.

use lockstep_kernels::Dtype;
use lockstep_model::{Cache, StagePass};
use lockstep_plan::model::Family;

use crate::setup::{PLAIN, SEQ, Setup, setup, shape};

#[test]
fn cached_logits_equal_those_of_the_whole_sequence() {
    for family in [Family::Gpt2, Family::Llama, Family::Moe] {
        let Setup { device, groups, model, mut store, mut batch } =
            setup(&shape(family), Dtype::F32);
        batch.targets = None;
        let pass = &PLAIN.pass(&device, &groups);
        let at = StagePass { stage: 0, pass, batch: &batch, defer_weight_grads: false };
        let whole = model.infer(&at, None, &mut store.weights, &mut |_, _| {});
        let ids = device.to_vec::<u32>(batch.inputs.view().part(0..SEQ));
        for cuts in [vec![SEQ], vec![1; SEQ], vec![5, 1, 1, SEQ - 7]] {
            let mut cache = Cache::new(&model, Dtype::F32);
            let mut at = 0;
            for cut in cuts {
                let new = &ids[at..at + cut];
                let logits = model.extend(&device, &store.weights, &mut cache, new);
                at += cut;
                let expected = device.to_vec::<f32>(whole.view().rows_of(at - 1..at));
                let error =
                    logits.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < 1e-4, "{family:?} after {at} tokens: {error}");
            }
        }
    }
}
