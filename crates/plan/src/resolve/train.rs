//! Resolves `[train]`: batch sizes, learning rate, optimizer, evaluation.

use super::Environment;
use super::checker::{Checker, sized};
use super::limits::MAX_THREADS;
use super::near;
use crate::config::{self, Curve};
use crate::learning_rate::LearningRate;
use crate::plan::{Data, Eval, Sample, Train};

/// Largest micro-batch that is chosen by default.
const DEFAULT_MICRO_BATCH: usize = 8;

pub(super) fn train(
    checker: &mut Checker,
    data: &Data,
    replicas: usize,
    env: &Environment,
) -> Train {
    let typed = &checker.config.train;
    let steps = typed.steps.unwrap_or(1000);
    let (global_batch, micro_batch) = batches(checker, replicas);
    let train = Train {
        steps,
        global_batch,
        micro_batch,
        accumulation: global_batch / micro_batch.saturating_mul(replicas).max(1),
        lr: learning_rate(checker, steps),
        betas: typed.betas.unwrap_or([0.9, 0.95]),
        eps: typed.eps.unwrap_or(1e-8),
        weight_decay: typed.weight_decay.unwrap_or(0.1),
        clip: Some(typed.clip.unwrap_or(1.0)).filter(|clip| *clip != 0.0),
        seed: typed.seed.unwrap_or(1) as u64,
        eval: eval(checker, data, steps),
        log_every: typed.log_every.unwrap_or(10),
        threads: typed.threads.unwrap_or_else(|| (env.cores / env.local_ranks.max(1)).max(1)),
        sample: sample(typed),
    };
    numbers(checker, &train);
    train
}

/// Global batch and micro-batch. The default global batch does not depend on the layout, so that the layout does not
/// change the training.
fn batches(checker: &mut Checker, replicas: usize) -> (usize, usize) {
    let typed = &checker.config.train;
    let global = typed.global_batch.unwrap_or(32);
    let share = global / replicas.max(1);
    let default =
        (1..=DEFAULT_MICRO_BATCH).rev().find(|micro| share.is_multiple_of(*micro)).unwrap_or(1);
    let micro = typed.micro_batch.unwrap_or(default);
    checker.at_least_one("train.global_batch", global);
    checker.at_least_one("train.micro_batch", micro);
    if !sized(&[global, micro, replicas]) {
        return (global, micro);
    }
    let keys = ["train.global_batch", "train.micro_batch", "layout.data"];
    if !global.is_multiple_of(replicas) {
        let message = format!("global_batch={global} is not a multiple of data={replicas}");
        let step = if typed.micro_batch.is_some() { micro * replicas } else { replicas };
        checker.add(&keys, message, format!("use {}", near::multiples(global, step)));
    } else if !share.is_multiple_of(micro) {
        let product = micro * replicas;
        let message = format!(
            "global_batch={global} is not a multiple of micro_batch={micro} × data={replicas} = {product}"
        );
        let (multiples, divisors) =
            (near::multiples(global, product), near::divisors(micro, share));
        checker.add(&keys, message, format!("use {multiples}, or micro_batch={divisors}"));
    }
    (global, micro)
}

fn learning_rate(checker: &mut Checker, steps: usize) -> LearningRate {
    let typed = &checker.config.train;
    let curve = typed.schedule.unwrap_or(Curve::Cosine);
    let peak = typed.lr.unwrap_or(3e-4);
    let default_min = if curve == Curve::Constant { peak } else { peak / 10.0 };
    let min = typed.min_lr.unwrap_or(default_min);
    let warmup = typed.warmup.unwrap_or((steps / 10).min(100));
    let decay = typed.decay.unwrap_or(0.2);
    checker.require(peak > 0.0, "train.lr", peak, "be greater than 0");
    checker.require(min >= 0.0, "train.min_lr", min, "be at least 0");
    checker.require((0.0..=1.0).contains(&decay), "train.decay", decay, "be between 0 and 1");
    if min > peak && peak > 0.0 {
        let message = format!("min_lr={min} is more than lr={peak}");
        checker.add(&["train.min_lr", "train.lr"], message, format!("use at most {peak}"));
    }
    if warmup > steps {
        let message = format!("warmup={warmup} is more than steps={steps}");
        checker.add(&["train.warmup", "train.steps"], message, format!("use at most {steps}"));
    }
    if typed.min_lr.is_some_and(|min| min != peak) && curve == Curve::Constant {
        let message = format!("min_lr={min}, but a constant schedule stays at lr={peak}");
        checker.add(
            &["train.min_lr", "train.schedule"],
            message,
            "remove it, or use another schedule",
        );
    }
    if typed.decay.is_some() && curve != Curve::Wsd {
        let message = format!("decay={decay} is only used with schedule = \"wsd\"");
        checker.add(
            &["train.decay", "train.schedule"],
            message,
            "set schedule = \"wsd\" or remove it",
        );
    }
    let decay_steps = if curve == Curve::Wsd { (decay * steps as f64).round() as usize } else { 0 };
    LearningRate { peak, min, warmup, steps, curve, decay_steps: decay_steps.min(steps) }
}

fn eval(checker: &mut Checker, data: &Data, steps: usize) -> Option<Eval> {
    let typed = &checker.config.train;
    let eval = Eval {
        every: typed.eval_every.unwrap_or(steps.clamp(1, 100)),
        batches: typed.eval_batches.unwrap_or(8),
    };
    checker.at_least_one("train.eval_batches", eval.batches);
    if data.held_out == 0.0 && eval.every > 0 {
        let asked = [("eval_every", typed.eval_every), ("eval_batches", typed.eval_batches)];
        for (name, value) in asked.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            let message =
                format!("{name}={value}, but data.held_out=0 reserves no data for evaluation");
            checker.add(
                &[&format!("train.{name}"), "data.held_out"],
                message,
                "set data.held_out = 0.05 or remove it",
            );
        }
    }
    (data.held_out > 0.0 && eval.every > 0).then_some(eval)
}

fn sample(typed: &config::Train) -> Option<Sample> {
    let asked = typed.sample.is_some() || typed.sample_tokens.is_some();
    let prompt = typed.sample.clone().unwrap_or_default();
    asked.then(|| Sample { prompt, tokens: typed.sample_tokens.unwrap_or(64) })
}

fn numbers(checker: &mut Checker, train: &Train) {
    checker.at_least_one("train.steps", train.steps);
    checker.at_least_one("train.log_every", train.log_every);
    checker.within("train.threads", train.threads, MAX_THREADS);
    let [first, second] = train.betas;
    let both = format!("[{first}, {second}]");
    let inside = |beta: f64| (0.0..1.0).contains(&beta);
    checker.require(
        inside(first) && inside(second),
        "train.betas",
        both,
        "both be at least 0 and less than 1",
    );
    checker.require(train.eps > 0.0, "train.eps", train.eps, "be greater than 0");
    let (decay, clip) = (train.weight_decay, train.clip.unwrap_or(0.0));
    checker.require(decay >= 0.0, "train.weight_decay", decay, "be at least 0");
    checker.require(clip >= 0.0, "train.clip", clip, "be greater than 0, or 0 for no clipping");
}
