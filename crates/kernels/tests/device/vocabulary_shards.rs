use half::bf16;
use lockstep_kernels::reference::cross_entropy as reference;
use lockstep_kernels::{CrossEntropy, DeviceType, Float, LogitGradient, LogitShard, SoftmaxStats};

use crate::check::*;
use crate::cross_entropy::rows;

const SCALE: f32 = 0.5;

#[test]
fn f32_shards_match_the_whole_vocabulary() {
    compare::<f32>();
}

/// The CPU computes f32 logits only.
#[test]
fn bf16_shards_match_the_whole_vocabulary() {
    if device().device_type() != DeviceType::Cpu {
        compare::<bf16>();
    }
}

/// Columns `from..to` of every row.
fn columns<E: Copy>(x: &[E], vocab: usize, from: usize, to: usize) -> Vec<E> {
    x.chunks_exact(vocab).flat_map(|row| row[from..to].to_vec()).collect()
}

/// Three shards, whose statistics are combined on the host.
fn compare<E: Float>() {
    for (n, vocab, cuts) in
        [(37, 501, [0, 100, 101, 501]), (3, 9, [0, 2, 5, 9]), (4, 5000, [0, 1024, 2048, 5000])]
    {
        let (logits, targets) = rows::<E>(n, vocab);
        let losses = reference::losses(&to_f64(&logits), &targets, 0.0);
        let gradient = reference::backward(&to_f64(&logits), &targets, SCALE as f64, 0.0);
        let expected = [
            [0, 1, 2].map(|_| losses.clone()).concat(),
            shards(cuts).map(|(from, to)| columns(&gradient, vocab, from, to)).concat(),
            shards(cuts).map(|(from, to)| columns(&gradient, vocab, from, to)).concat(),
        ];
        check(&format!("shards ({n}, {vocab})"), tolerance::<E>(3e-6), expected, || {
            let parts = shards(cuts).map(|(from, to)| {
                (from, Data::new(0, (n, to - from), &columns(&logits, vocab, from, to)))
            });
            sharded::<E>(parts, &targets)
        });
    }
}

fn shards(cuts: [usize; 4]) -> [(usize, usize); 3] {
    [0, 1, 2].map(|i| (cuts[i], cuts[i + 1]))
}

/// Losses, gradients in place and gradients in another tensor of all shards.
fn sharded<E: Float>(parts: [(usize, Data); 3], targets: &[u32]) -> [Vec<f64>; 3] {
    let n = targets.len();
    let targets = Data::row(0, targets);
    let (mut max, mut sum, mut target) = (vec![f32::NEG_INFINITY; n], vec![0f32; n], vec![0f32; n]);
    for (_, logits) in &parts {
        let mut own = Data::row(0, &vec![9f32; n]);
        device().largest_logits(logits.view(), own.view_mut());
        max.iter_mut().zip(own.read::<f32>()).for_each(|(max, own)| *max = max.max(own));
    }
    let max = Data::row(0, &max);
    for (first, logits) in &parts {
        let [mut own_sum, mut own_target] = [(); 2].map(|_| Data::row(0, &vec![9f32; n]));
        let shard = LogitShard { logits: logits.view(), targets: targets.view(), first: *first };
        device().logit_sums(shard, max.view(), own_sum.view_mut(), own_target.view_mut());
        sum.iter_mut().zip(own_sum.read::<f32>()).for_each(|(sum, own)| *sum += own);
        target.iter_mut().zip(own_target.read::<f32>()).for_each(|(target, own)| *target += own);
    }
    let (sum, target) = (Data::row(0, &sum), Data::row(0, &target));
    let stats = SoftmaxStats { max: max.view(), sum: sum.view(), target: target.view() };
    let [mut all_losses, mut all_into, mut all_in_place] = [(); 3].map(|_| vec![]);
    for (first, mut logits) in parts {
        let width = logits.view().cols();
        let mut into = Data::new(0, (n, width), &vec![E::default(); n * width]);
        let mut losses = Data::row(0, &vec![9f32; n]);
        let work = CrossEntropy {
            logits: logits.view_mut(),
            targets: targets.view(),
            losses: losses.view_mut(),
            gradient: LogitGradient::Into(into.view_mut(), SCALE),
        };
        device().cross_entropy_shard(work, first, stats);
        all_losses.extend(losses.read_f64::<f32>());
        let work = CrossEntropy {
            logits: logits.view_mut(),
            targets: targets.view(),
            losses: losses.view_mut(),
            gradient: LogitGradient::InPlace(SCALE),
        };
        device().cross_entropy_shard(work, first, stats);
        all_into.extend(into.read_f64::<E>());
        all_in_place.extend(logits.read_f64::<E>());
    }
    [all_losses, all_in_place, all_into]
}
