//! Corrupt samples are skipped on all ranks of all layouts in the same way, and stop the run if there are too many.

use std::path::PathBuf;

use lockstep_comm::on_threads;
use lockstep_data::{Options, Recipe, Source, prepare};
use lockstep_kernels::Device;
use lockstep_trainer::{Error, Rank, Run, Start, run, train_sample};

use crate::plans::{masters, plan_of};

const STEPS: u64 = 6;

/// A token file of more than 200,000 bytes, and a copy with two corrupt chunks.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Files {
        let folder =
            std::env::temp_dir().join(format!("lockstep-corrupt-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text: String = (0..20_000).map(|word| format!("{word} ")).collect();
        std::fs::write(folder.join("words.txt"), text).unwrap();
        let mut recipe = Recipe::new(vec![folder.join("words.txt")], folder.join("good.tokens"));
        recipe.replace = true;
        prepare(&recipe, &|_| ()).unwrap();
        let mut bytes = std::fs::read(folder.join("good.tokens")).unwrap();
        assert!(bytes.len() > 200_000);
        // Two of about fourteen chunks.
        bytes[50_000] ^= 1;
        bytes[100_000] ^= 1;
        std::fs::write(folder.join("corrupt.tokens"), bytes).unwrap();
        Files(folder)
    }

    fn open(&self, name: &str) -> Source {
        let path = self.0.join(name);
        Source::open(path.to_str().unwrap(), &Options { held_out: 0.0 }).unwrap()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sets<'a>(layout: &[&'a str]) -> Vec<&'a str> {
    [&["train.lr=1e-2"], layout].concat()
}

/// Number of samples skipped up to each step, counted by reading every sample.
fn expected(source: &Source, sets: &[&str]) -> Vec<u64> {
    let plan = plan_of(source, 1, sets);
    let mut tokens = vec![0; plan.data.seq + 1];
    let mut count = 0;
    let mut step = |step: u64| {
        for index in 0..plan.train.global_batch {
            count += source.sample(train_sample(&plan, step, index), &mut tokens).len();
        }
        count as u64
    };
    (1..=STEPS).map(&mut step).collect()
}

#[test]
fn all_layouts_skip_the_same_samples() {
    let files = Files::new("layouts");
    let source = files.open("corrupt.tokens");
    let expected = expected(&source, &sets(&[]));
    assert!(expected[STEPS as usize - 1] > 3, "{expected:?}");
    let mut one_rank: Option<Vec<f64>> = None;
    for (ranks, layout) in [
        (1, vec![]),
        (3, vec![]),
        (2, vec!["layout.tensor=2"]),
        (2, vec!["layout.context=2"]),
        (4, vec!["layout.pipe=2", "layout.data=2"]),
        (2, vec!["layout.pipe=2", "layout.schedule=zb-h1"]),
    ] {
        let plan = plan_of(&source, ranks, &sets(&layout));
        let all = on_threads(ranks, |world| {
            let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
            let step = |step| (rank.step(&source, step).unwrap().loss, rank.extra.skipped_samples);
            (1..=STEPS).map(step).collect::<Vec<_>>()
        });
        for steps in all {
            let (losses, counts): (Vec<f64>, Vec<u64>) = steps.into_iter().unzip();
            assert_eq!(counts, expected, "{layout:?}");
            let one_rank = one_rank.get_or_insert_with(|| losses.clone());
            for (one, many) in one_rank.iter().zip(&losses) {
                assert!((one / many - 1.0).abs() < 2e-5, "{layout:?}: {many} against {one}");
            }
        }
    }
}

#[test]
fn a_resumed_run_continues_the_count() {
    let files = Files::new("resumed");
    let source = files.open("corrupt.tokens");
    let expected = expected(&source, &sets(&[]));
    for (steps, resume) in [(3, false), (STEPS, true)] {
        let (steps, folder) = (format!("train.steps={steps}"), files.0.join("run"));
        std::fs::create_dir_all(&folder).unwrap();
        let sets = ["train.log_every=1", "train.schedule=constant", &steps];
        let mut plan = plan_of(&source, 2, &crate::corrupt::sets(&sets));
        // There is no held-out data to evaluate on.
        plan.train.eval = None;
        on_threads(2, |world| {
            let newest = || lockstep_ckpt::find(&folder).unwrap();
            let start = resume.then(|| Start { checkpoint: newest(), resume: true });
            world.barrier().unwrap();
            let (group, folder) = (world.group(), folder.as_path());
            let inputs = Run {
                plan: &plan,
                device: Device::from_env(plan.train.threads),
                group,
                source: &source,
                folder,
                start,
                generation: None,
                stop: &|| false,
            };
            run(&inputs, &mut |_| {}).map(drop).unwrap();
        });
    }
    let reports = lockstep_events::read(&files.0.join("run/metrics.jsonl")).unwrap();
    let counts: Vec<u64> =
        reports.iter().filter_map(|report| report.more.get("corrupt_samples")?.as_u64()).collect();
    assert_eq!(counts, expected);
}

#[test]
fn exceeding_the_limit_stops_the_run_before_the_step() {
    let files = Files::new("limit");
    let source = files.open("corrupt.tokens");
    let counts = expected(&source, &sets(&[]));
    let total = counts[STEPS as usize - 1];
    let last = counts.iter().position(|count| *count == total).unwrap() as u64 + 1;
    let limit = format!("data.max_corrupt={}", total - 1);
    for layout in ["layout.data=2", "layout.pipe=2"] {
        let mut sets = sets(&[]);
        sets.extend([layout, limit.as_str()]);
        let plan = plan_of(&source, 2, &sets);
        let errors = on_threads(2, |world| {
            let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
            for step in 1..last {
                rank.step(&source, step).unwrap();
            }
            let before = masters(&rank);
            let error = rank.step(&source, last).unwrap_err();
            assert!(masters(&rank) == before, "a parameter has changed");
            match &error {
                Error::Corrupt { step, count, limit, .. } => {
                    assert_eq!((*step, *count, *limit as u64), (last, Some(total), total - 1));
                }
                other => panic!("{other}"),
            }
            error.to_string()
        });
        assert_eq!(errors[0], errors[1], "{layout}");
        for words in ["corrupt.tokens, document 0: bytes ", "data.max_corrupt", "of step"] {
            assert!(errors[0].contains(words), "no {words:?} in {}", errors[0]);
        }
    }
}

#[test]
fn different_copies_of_the_data_are_detected() {
    let files = Files::new("copies");
    let (good, corrupt) = (files.open("good.tokens"), files.open("corrupt.tokens"));
    for layout in ["layout.tensor=2", "layout.context=2", "layout.pipe=2"] {
        let plan = plan_of(&good, 2, &sets(&[layout]));
        let errors = on_threads(2, |world| {
            let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
            let source = if world.rank() == 1 { &corrupt } else { &good };
            let error = (1..=STEPS).find_map(|step| rank.step(source, step).err());
            error.expect("a corrupt sample within the first steps").to_string()
        });
        assert_eq!(errors[0], errors[1]);
        for words in
            ["rank 1 found samples", "rank 0 found no samples", "copies of the data differ"]
        {
            assert!(errors[0].contains(words), "{layout}: no {words:?} in {}", errors[0]);
        }
    }
}
