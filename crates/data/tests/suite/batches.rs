//! Samples are a function of (seed, step, index): the same in every process and order, with every token once per epoch and
//! without held-out documents.

use crate::test_dir::{TestDir, open};
use lockstep_data::{GRAMMAR, Options, Recipe, SampleId, Source, Split, prepare};

const END: u32 = 256;

/// Documents of different lengths. The tokens of a document are its number, which shows where a token comes from.
fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("<{i}>").repeat(1 + i * 7 % 23)).collect()
}

fn sample(source: &Source, split: Split, seed: u64, number: u64, seq: usize) -> Vec<u32> {
    let mut out = vec![u32::MAX; seq + 1];
    source.sample(SampleId { split, seed, batch: number, global_batch: 1, index: 0 }, &mut out);
    out
}

/// The documents in `tokens`, which starts and ends at document boundaries.
fn documents(tokens: &[u32]) -> Vec<String> {
    let text = |tokens: &[u32]| tokens.iter().map(|t| *t as u8 as char).collect();
    assert_eq!(tokens.last(), Some(&END));
    tokens[..tokens.len() - 1].split(|t| *t == END).map(text).collect()
}

#[test]
fn samples_do_not_depend_on_instance_or_order() {
    let dir = TestDir::new();
    let path = dir.documents(&numbered(40));
    for spec in [path.to_str().unwrap(), GRAMMAR] {
        let options = Options { held_out: 0.2 };
        let (a, b) = (Source::open(spec, &options).unwrap(), Source::open(spec, &options).unwrap());
        assert_eq!(a.identity(), b.identity());
        let numbers: Vec<u64> = (0..200).map(|i| i * 37 % 400).collect();
        for split in [Split::Train, Split::HeldOut] {
            for seed in [0, 1, u64::MAX] {
                let of = |source, n: &u64| sample(source, split, seed, *n, 32);
                let forward: Vec<_> = numbers.iter().map(|n| of(&a, n)).collect();
                let mut backward: Vec<_> = numbers.iter().rev().map(|n| of(&b, n)).collect();
                backward.reverse();
                assert_eq!(forward, backward, "{spec} {split:?} {seed}");
            }
        }
    }
}

#[test]
fn a_token_file_has_one_digest() {
    let dir = TestDir::new();
    let path = dir.documents(&numbered(40));
    let digest = lockstep_data::TokenFile::open(&path).unwrap().digest();
    for held_out in [0.0, 0.2] {
        let identity = open(&path, held_out).identity();
        assert!(identity.contains(&digest[..16]), "{identity} and {digest}");
    }
    assert_ne!(open(&path, 0.0).identity(), open(&path, 0.2).identity());
}

#[test]
fn threads_may_share_a_source() {
    let dir = TestDir::new();
    let source = open(&dir.documents(&numbered(300)), 0.1);
    let alone: Vec<_> = (0..400).map(|n| sample(&source, Split::Train, 5, n, 64)).collect();
    std::thread::scope(|scope| {
        for first in 0..4 {
            let (source, alone) = (&source, &alone);
            scope.spawn(move || {
                for n in (first..400).step_by(4).rev() {
                    assert_eq!(sample(source, Split::Train, 5, n as u64, 64), alone[n]);
                }
            });
        }
    });
}

/// Sample `index` of a step does not depend on how the global batch is divided, and a step of 8 samples equals four steps
/// of 2.
#[test]
fn global_batch_does_not_depend_on_its_division() {
    let dir = TestDir::new();
    let path = dir.documents(&numbered(40));
    for spec in [path.to_str().unwrap(), GRAMMAR] {
        let source = Source::open(spec, &Options::default()).unwrap();
        let at = |step, batch, index| {
            let mut out = vec![0; 17];
            source.sample(
                SampleId { split: Split::Train, seed: 3, batch: step, global_batch: batch, index },
                &mut out,
            );
            out
        };
        for step in 0..20 {
            for index in 0..8 {
                assert_eq!(
                    at(step, 8, index),
                    at(step * 4 + index as u64 / 2, 2, index % 2),
                    "{spec}"
                );
            }
        }
    }
}

/// With samples as long as an epoch, each sample contains every document once, in a different order, and the next epoch
/// follows immediately.
#[test]
fn epoch_contains_every_document_once() {
    let dir = TestDir::new();
    let all = numbered(150);
    let source = open(&dir.documents(&all), 0.0);
    let epoch = source.epoch_tokens(Split::Train).unwrap();
    assert_eq!(epoch as usize, all.iter().map(|d| d.len() + 1).sum::<usize>());

    let mut orders = Vec::new();
    for number in 0..3u64 {
        // Documents are not shuffled inside a sample.
        let row = sample(&source, Split::Train, 9, number, epoch as usize);
        let order = documents(&row[..epoch as usize]);
        let mut sorted = order.clone();
        sorted.sort();
        let mut expected = all.clone();
        expected.sort();
        assert_eq!(sorted, expected, "epoch {number}");
        // The last token is the first of the next epoch.
        assert_eq!(
            row[epoch as usize],
            sample(&source, Split::Train, 9, number + 1, epoch as usize)[0]
        );
        orders.push(order);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2], "epochs are shuffled anew");
    assert!(orders[0] != numbered(150), "the first epoch is shuffled too");
}

/// Short samples are shuffled, and together cover the sequence of documents without gaps: over `seq` epochs every sample
/// occurs once.
#[test]
fn no_sample_is_repeated_or_skipped_across_epochs() {
    let dir = TestDir::new();
    let source = open(&dir.documents(&numbered(23)), 0.0);
    let epoch = source.epoch_tokens(Split::Train).unwrap() as usize;
    for seq in [1, 2, 7, 64, 100, epoch - 1, epoch, epoch + 1, 3 * epoch + 5] {
        // The token sequence of `seq` epochs, from samples of one epoch each.
        let epochs = seq.min(12) as u64 * if seq > 12 { 2 } else { 1 };
        let row: Vec<u32> = (0..epochs + 4)
            .flat_map(|e| sample(&source, Split::Train, 4, e, epoch)[..epoch].to_vec())
            .collect();
        // The samples that start in these epochs, by formula and as drawn.
        let count = (epochs as usize * epoch).div_ceil(seq);
        let cut = |k: usize| row.get(k * seq..=k * seq + seq).map(<[u32]>::to_vec);
        let mut expected: Vec<_> = (0..count).map_while(cut).collect();
        let count = expected.len();
        let mut came: Vec<_> =
            (0..count).map(|n| sample(&source, Split::Train, 4, n as u64, seq)).collect();
        if seq < epoch {
            assert!(came != expected, "seq {seq}: samples are shuffled within their epoch");
        }
        came.sort();
        expected.sort();
        assert_eq!(came, expected, "seq {seq}");
    }
}

#[test]
fn seeds_shuffle_differently() {
    let dir = TestDir::new();
    let source = open(&dir.documents(&numbered(50)), 0.0);
    assert_ne!(sample(&source, Split::Train, 1, 0, 200), sample(&source, Split::Train, 2, 0, 200),);
}

/// Every document is either held out or trained on, and copies of a document are on the same side.
#[test]
fn held_out_documents_are_never_trained_on() {
    let dir = TestDir::new();
    let mut all = numbered(200);
    all.extend(numbered(20));
    let path = dir.documents(&all);
    for fraction in [0.001, 0.1, 0.5] {
        let source = open(&path, fraction);
        let side = |split| {
            let epoch = source.epoch_tokens(split).unwrap() as usize;
            documents(&sample(&source, split, 0, 0, epoch)[..epoch])
        };
        let (train, held) = (side(Split::Train), side(Split::HeldOut));
        assert!(!held.is_empty() && held.iter().all(|d| !train.contains(d)), "{fraction}");
        let share = held.len() as f64 / all.len() as f64;
        // Four standard deviations of 220 draws, and at least one document.
        let slack = 4.0 * (fraction * (1.0 - fraction) / 220.0).sqrt() + 0.01;
        assert!((share - fraction).abs() < slack, "{fraction}: {share}");
        let mut both = [train, held.clone()].concat();
        both.sort();
        let mut expected = all.clone();
        expected.sort();
        assert_eq!(both, expected);
        // Short samples of several epochs contain no token of a held-out document.
        for number in 0..2000 {
            let tokens = sample(&source, Split::Train, 8, number, 40);
            let text: String = tokens.iter().map(|t| *t as u8 as char).collect();
            let leaked = held.iter().find(|d| text.contains(&d[..=d.find('>').unwrap()]));
            assert_eq!(leaked, None, "{fraction}: sample {number}");
        }
    }
}

#[test]
fn a_folder_of_files_is_one_corpus() {
    let dir = TestDir::new();
    let all = numbered(30);
    let inputs = all.chunks(11).enumerate().map(|(i, part)| {
        let rows: String = part.iter().map(|d| format!("{{\"text\": \"{d}\"}}\n")).collect();
        dir.write(&format!("part{i}.jsonl"), rows)
    });
    let folder = format!("{}/", dir.path("corpus").display());
    prepare(&Recipe::new(inputs.collect(), &folder), &|_| ()).unwrap();
    let (parts, whole) = (open(folder.as_ref(), 0.2), open(&dir.documents(&all), 0.2));
    for number in 0..50 {
        for split in [Split::Train, Split::HeldOut] {
            assert_eq!(sample(&parts, split, 6, number, 50), sample(&whole, split, 6, number, 50));
        }
    }
}

#[test]
fn holding_out_everything_is_an_error() {
    let dir = TestDir::new();
    let path = dir.documents(&["alone"]);
    let error = Source::open(path.to_str().unwrap(), &Options { held_out: 0.1 }).unwrap_err();
    assert!(error.to_string().contains("--cut"), "{error}");
    assert_eq!(open(&path, 0.0).epoch_tokens(Split::HeldOut), Some(0));
}

#[test]
fn text_goes_to_tokens_and_back() {
    let dir = TestDir::new();
    let path = dir.documents(&["one", "two"]);
    for spec in [path.to_str().unwrap(), GRAMMAR] {
        let source = Source::open(spec, &Options::default()).unwrap();
        let text = "the owl, ü and 漢字";
        let tokens = source.encode(text).unwrap();
        assert!(tokens.iter().all(|t| (*t as usize) < source.vocab()));
        assert_eq!(source.decode(&tokens).unwrap(), text);
    }
}
