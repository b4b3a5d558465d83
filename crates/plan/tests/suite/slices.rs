//! Checkpoint slices of all ranks, on every layout: each element is written once, and the work is balanced.

use std::collections::HashMap;

use lockstep_plan::model::{Runs, Slice, overlaps};
use lockstep_plan::{Config, Environment, Plan, layouts};

const VOCAB: usize = 67;

const MODELS: [&str; 4] = [
    "family = \"gpt2\"",
    "family = \"llama\"\nkv_heads = 2",
    "family = \"llama\"\nkv_heads = 1\ntied = true",
    "family = \"moe\"\nkv_heads = 2\nexperts = 12",
];

fn config(model: &str) -> Config {
    let text = format!(
        "[model]\n{model}\ndim = 48\nheads = 12\nlayers = 4\nseq = 24\nffn = 48\n[train]\nglobal_batch = 24\nmicro_batch = 1"
    );
    Config::parse(&text, &[])
}

fn plan(model: &str, words: &str) -> Plan {
    let config = config(model).with_layout(words);
    let env = Environment::one_host(config.ranks(), 1).with_vocab(VOCAB);
    Plan::resolve(&config, &env).unwrap_or_else(|errors| panic!("{words}: {errors:?}"))
}

/// Number of slices that contain each element of each tensor.
fn counted(slices: impl Iterator<Item = Slice>) -> HashMap<String, Vec<u32>> {
    let mut counts: HashMap<String, Vec<u32>> = HashMap::new();
    for slice in slices {
        let whole = slice.dims.iter().product();
        let tensor = counts.entry(slice.name.clone()).or_insert_with(|| vec![0; whole]);
        let elements: usize = slice.runs.iter().map(Runs::elements).sum();
        assert_eq!(elements, slice.here.len(), "{}: as many here as there", slice.name);
        slice.runs.iter().flat_map(|runs| runs.ranges()).flatten().for_each(|at| tensor[at] += 1);
    }
    counts
}

#[test]
fn every_element_is_written_once() {
    for model in MODELS {
        let all = layouts(&config(model), VOCAB, 8, 40);
        assert_eq!(all.len(), 40, "{model}");
        for words in all {
            let plan = plan(model, &words);
            let written = (0..plan.ranks).flat_map(|rank| plan.part(rank).written());
            let counts = counted(written);
            let params = plan.model.param_count();
            assert_eq!(
                counts.values().map(Vec::len).sum::<usize>(),
                params,
                "{words}: all tensors"
            );
            for (name, counts) in counts {
                let wrong = counts.iter().position(|count| *count != 1);
                assert_eq!(wrong, None, "{model}, {words}: {name} is written {:?} times", counts);
            }
        }
    }
}

#[test]
fn written_slices_match_the_held_parameters() {
    for words in ["data=2 zero=3 tensor=2", "data=4 pipe=2", "tensor=4 sequence=true"] {
        let plan = plan(MODELS[1], words);
        for rank in 0..plan.ranks {
            let part = plan.part(rank);
            let held: HashMap<String, Slice> =
                part.slices().into_iter().map(|slice| (slice.name.clone(), slice)).collect();
            for slice in part.written() {
                let whole = &held[&slice.name];
                let moved = slice.here.start - whole.here.start;
                let mut common = 0;
                for (at, within, len) in overlaps(&slice.runs, &whole.runs) {
                    assert_eq!(at + moved, within, "{words}: {}", slice.name);
                    common += len;
                }
                assert_eq!(common, slice.here.len(), "{words}: {}", slice.name);
            }
        }
    }
}

#[test]
fn replicas_write_equal_shares() {
    for words in
        ["data=4", "data=2 zero=1", "data=4 zero=2 shard=2", "data=3 tensor=2", "context=4"]
    {
        let plan = plan(MODELS[0], words);
        let bytes = |rank: usize| -> usize {
            plan.part(rank).written().iter().map(|slice| slice.here.len()).sum()
        };
        let all: Vec<usize> = (0..plan.ranks).map(bytes).collect();
        let (least, most) = (all.iter().min().unwrap(), all.iter().max().unwrap());
        // Vocabulary rows per rank differ by at most one row, shares by at most one element.
        assert!(most - least <= 48 + 8, "{words}: {all:?}");
    }
}

#[test]
fn parts_of_runs_keep_the_order_of_elements() {
    let runs = Runs { start: 3, len: 4, stride: 10, count: 5 };
    let elements: Vec<usize> = runs.ranges().flatten().collect();
    for from in 0..=20 {
        for to in from..=20 {
            let part: Vec<usize> =
                runs.part(from..to).into_iter().flat_map(Runs::ranges).flatten().collect();
            assert_eq!(part, elements[from..to]);
            assert!(runs.part(from..to).len() <= 3);
        }
    }
}

#[test]
fn overlap_is_the_intersection() {
    let slices = [
        vec![Runs::one(0..60)],
        vec![Runs::one(7..31)],
        vec![Runs { start: 2, len: 3, stride: 10, count: 6 }],
        vec![Runs { start: 4, len: 4, stride: 10, count: 3 }],
        vec![Runs::one(5..8), Runs { start: 13, len: 2, stride: 5, count: 4 }, Runs::one(50..51)],
        vec![],
    ];
    for one in &slices {
        for other in &slices {
            let elements = |runs: &[Runs]| -> Vec<usize> {
                runs.iter().flat_map(|runs| runs.ranges()).flatten().collect()
            };
            let (a, b) = (elements(one), elements(other));
            let mut found = Vec::new();
            for (at_a, at_b, len) in overlaps(one, other) {
                assert_eq!(a[at_a..at_a + len], b[at_b..at_b + len]);
                found.extend_from_slice(&a[at_a..at_a + len]);
            }
            let wanted: Vec<usize> = a.iter().copied().filter(|at| b.contains(at)).collect();
            assert_eq!(found, wanted);
        }
    }
}
