//! Token by token with a cache is the whole sequence at once.

use lockstep_kernels::Dtype;
use lockstep_model::Cache;
use lockstep_plan::model::Family;

use crate::setup::{PLAIN, SEQ, Setup, setup, shape};

#[test]
fn a_cache_changes_nothing() {
    for family in [Family::Gpt2, Family::Llama, Family::Moe] {
        let Setup { device, groups, model, mut store, batch } = setup(&shape(family), Dtype::F32);
        let whole = model.logits(&PLAIN.pass(&device, &groups), &batch, &mut store.weights);
        let ids = batch.inputs.view().part(0..SEQ).host::<u32>().to_vec();
        for cuts in [vec![SEQ], vec![1; SEQ], vec![5, 1, 1, SEQ - 7]] {
            let mut cache = Cache::new(&device, &model, Dtype::F32);
            let mut at = 0;
            for cut in cuts {
                let new = &ids[at..at + cut];
                let logits = model.extend(&device, &store.weights, &mut cache, new, Dtype::F32);
                at += cut;
                let expected = whole.view().rows_of(at - 1..at).host::<f32>();
                let error =
                    logits.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < 1e-4, "{family:?} after {at} tokens: {error}");
            }
        }
    }
}
