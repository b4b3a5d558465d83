//! The built-in language: its samples are sentences, and their mean information is its entropy.

use lockstep_data::{GRAMMAR, Options, SampleId, Source, Split};

fn source() -> Source {
    Source::open(GRAMMAR, &Options::default()).unwrap()
}

fn text(source: &Source, split: Split, seed: u64, step: u64) -> String {
    let mut tokens = vec![0; 513];
    source.sample(SampleId { split, seed, batch: step, global_batch: 4, index: 1 }, &mut tokens);
    source.decode(&tokens).unwrap()
}

/// Every complete line is a sentence: its punctuation matches its first word, and quotes are closed.
#[test]
fn samples_are_sentences() {
    let source = source();
    for step in 0..50 {
        let text = text(&source, Split::Train, 1, step);
        let (whole, _) = text.rsplit_once('\n').unwrap();
        for line in whole.lines() {
            let asks = line.starts_with("do ") || line.starts_with("does ");
            assert_eq!(line.ends_with('?'), asks, "{line}");
            assert_eq!(line.matches('(').count(), line.matches(')').count(), "{line}");
            assert_eq!(line.matches('"').count() % 2, 0, "{line}");
        }
    }
}

#[test]
fn seeds_steps_and_splits_give_different_samples() {
    let source = source();
    let texts = [
        text(&source, Split::Train, 1, 0),
        text(&source, Split::Train, 1, 1),
        text(&source, Split::Train, 2, 0),
        text(&source, Split::HeldOut, 1, 0),
    ];
    for (i, a) in texts.iter().enumerate() {
        assert!(texts[..i].iter().all(|b| a != b), "{a}");
    }
}

/// The mean information of the samples equals the entropy that `train` reports.
#[test]
fn entropy_equals_mean_information() {
    let source = source();
    let (seq, samples) = (128, 2000);
    let costs: Vec<f64> = (0..samples)
        .map(|n| {
            let mut tokens = vec![0; seq + 1];
            source.sample(
                SampleId {
                    split: Split::Train,
                    seed: 7,
                    batch: n / 16,
                    global_batch: 16,
                    index: n as usize % 16,
                },
                &mut tokens,
            );
            source.grammar().unwrap().information(&tokens).iter().sum::<f64>() / seq as f64
        })
        .collect();
    let mean = costs.iter().sum::<f64>() / costs.len() as f64;
    let variance = costs.iter().map(|c| (c - mean).powi(2)).sum::<f64>() / (costs.len() - 1) as f64;
    let error = (variance / costs.len() as f64).sqrt();
    let floor = source.entropy(seq).unwrap();
    assert!((mean - floor).abs() < 4.0 * error, "{mean} ± {error} against {floor}");
}
