//! Every epoch uses every sample once, from the first step on.

use std::collections::BTreeMap;

use lockstep_data::{Options, Recipe, Source, Split, prepare};

use crate::plans::plan_of;
use crate::reshard::{folder, samples_of_step};

const SEQ: usize = 16;
/// Three steps of the global batch.
const SAMPLES: usize = 36;

#[test]
fn the_first_global_batch_is_used() {
    // One document whose samples all differ: each epoch has the same samples, in another order.
    let folder = folder("epochs");
    let text: String = (100..).map(|word| format!("{word} ")).take(4 * SAMPLES * SEQ).collect();
    std::fs::write(folder.join("words.txt"), &text[..SAMPLES * SEQ - 1]).unwrap();
    let path = folder.join("words.tokens");
    prepare(&Recipe::new(vec![folder.join("words.txt")], path.clone()), &|_| ()).unwrap();
    let source = Source::open(path.to_str().unwrap(), &Options { held_out: 0.0 }).unwrap();
    assert_eq!(source.epoch_tokens(Split::Train), Some((SAMPLES * SEQ) as u64));

    for (ranks, layout) in [
        (1, &["train.micro_batch=3"][..]),
        (2, &["layout.data=2", "train.micro_batch=1"]),
        (3, &["layout.data=3", "layout.zero=3"]),
        (4, &["layout.data=2", "layout.pipe=2"]),
        (4, &["layout.context=2", "layout.tensor=2"]),
    ] {
        let plan = plan_of(&source, ranks, &[&["data.seq=16"], layout].concat());
        for epoch in 0..3 {
            let mut uses: BTreeMap<Vec<u32>, usize> = BTreeMap::new();
            for id in (1..=3).flat_map(|step| samples_of_step(&plan, 3 * epoch + step)) {
                let mut tokens = vec![0; SEQ + 1];
                source.sample(id, &mut tokens);
                *uses.entry(tokens).or_default() += 1;
            }
            assert_eq!(uses.len(), SAMPLES, "{layout:?}: samples of epoch {epoch}");
            assert!(uses.values().all(|uses| *uses == 1), "{layout:?}, epoch {epoch}: {uses:?}");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}
