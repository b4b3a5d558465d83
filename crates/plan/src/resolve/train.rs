//! How the training goes: batches, learning rate, optimizer, evaluation.

use super::Environment;
use super::findings::{Findings, sized};
use super::near;
use crate::config::{self, Curve};
use crate::learning_rate::LearningRate;
use crate::plan::{Data, Eval, Sample, Train};

/// The largest micro-batch that is taken unasked.
const USUAL_MICRO_BATCH: usize = 8;

pub(super) fn train(
    findings: &mut Findings,
    data: &Data,
    replicas: usize,
    around: &Environment,
) -> Train {
    let typed = &findings.config.train;
    let steps = typed.steps.unwrap_or(1000);
    let (global_batch, micro_batch) = batches(findings, replicas);
    let train = Train {
        steps,
        global_batch,
        micro_batch,
        accumulation: global_batch / micro_batch.saturating_mul(replicas).max(1),
        lr: learning_rate(findings, steps),
        betas: typed.betas.unwrap_or([0.9, 0.95]),
        eps: typed.eps.unwrap_or(1e-8),
        weight_decay: typed.weight_decay.unwrap_or(0.1),
        clip: Some(typed.clip.unwrap_or(1.0)).filter(|clip| *clip != 0.0),
        seed: typed.seed.unwrap_or(1) as u64,
        eval: eval(findings, data, steps),
        log_every: typed.log_every.unwrap_or(10),
        threads: typed.threads.unwrap_or_else(|| (around.cores / around.local_ranks.max(1)).max(1)),
        sample: sample(typed),
    };
    numbers(findings, &train);
    train
}

/// Global and micro-batch. The global batch is the same whatever the layout, so that the layout does not
/// change the training.
fn batches(findings: &mut Findings, replicas: usize) -> (usize, usize) {
    let typed = &findings.config.train;
    let global = typed.global_batch.unwrap_or(32);
    let share = global / replicas.max(1);
    let usual =
        (1..=USUAL_MICRO_BATCH).rev().find(|micro| share.is_multiple_of(*micro)).unwrap_or(1);
    let micro = typed.micro_batch.unwrap_or(usual);
    findings.at_least_one("train.global_batch", global);
    findings.at_least_one("train.micro_batch", micro);
    if !sized(&[global, micro, replicas]) {
        return (global, micro);
    }
    let keys = ["train.global_batch", "train.micro_batch", "layout.data"];
    if !global.is_multiple_of(replicas) {
        let what = format!("global_batch={global} is not a multiple of data={replicas}");
        let step = if typed.micro_batch.is_some() { micro * replicas } else { replicas };
        findings.add(&keys, what, format!("try {}", near::multiples(global, step)));
    } else if !share.is_multiple_of(micro) {
        let product = micro * replicas;
        let what = format!(
            "global_batch={global} is not a multiple of micro_batch={micro} × data={replicas} = {product}"
        );
        let (multiples, divisors) =
            (near::multiples(global, product), near::divisors(micro, share));
        findings.add(&keys, what, format!("try {multiples}, or micro_batch={divisors}"));
    }
    (global, micro)
}

fn learning_rate(findings: &mut Findings, steps: usize) -> LearningRate {
    let typed = &findings.config.train;
    let curve = typed.schedule.unwrap_or(Curve::Cosine);
    let peak = typed.lr.unwrap_or(3e-4);
    let usual_min = if curve == Curve::Constant { peak } else { peak / 10.0 };
    let min = typed.min_lr.unwrap_or(usual_min);
    let warmup = typed.warmup.unwrap_or((steps / 10).min(100));
    let decay = typed.decay.unwrap_or(0.2);
    findings.require(peak > 0.0, "train.lr", peak, "it must be more than 0");
    findings.require(min >= 0.0, "train.min_lr", min, "it must be at least 0");
    findings.require((0.0..=1.0).contains(&decay), "train.decay", decay, "it must be from 0 to 1");
    if min > peak && peak > 0.0 {
        let what = format!("min_lr={min} is more than lr={peak}");
        findings.add(&["train.min_lr", "train.lr"], what, format!("say at most {peak}"));
    }
    if warmup > steps {
        let what = format!("warmup={warmup} is more than steps={steps}");
        findings.add(&["train.warmup", "train.steps"], what, format!("say at most {steps}"));
    }
    if typed.min_lr.is_some_and(|min| min != peak) && curve == Curve::Constant {
        let what = format!("min_lr={min}, but a constant schedule stays at lr={peak}");
        findings.add(
            &["train.min_lr", "train.schedule"],
            what,
            "leave it out, or take another schedule",
        );
    }
    if typed.decay.is_some() && curve != Curve::Wsd {
        let what = format!("decay={decay} is for the wsd schedule");
        findings.add(
            &["train.decay", "train.schedule"],
            what,
            "say schedule = \"wsd\", or leave it out",
        );
    }
    let decay_steps = if curve == Curve::Wsd { (decay * steps as f64).round() as usize } else { 0 };
    LearningRate { peak, min, warmup, steps, curve, decay_steps: decay_steps.min(steps) }
}

fn eval(findings: &mut Findings, data: &Data, steps: usize) -> Option<Eval> {
    let typed = &findings.config.train;
    let usual_every = if steps > 100 { 100 } else { 0 };
    let eval = Eval {
        every: typed.eval_every.unwrap_or(usual_every),
        batches: typed.eval_batches.unwrap_or(8),
    };
    findings.at_least_one("train.eval_batches", eval.batches);
    if data.held_out == 0.0 {
        let asked = [("eval_every", typed.eval_every), ("eval_batches", typed.eval_batches)];
        for (name, value) in asked.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            let what = format!("{name}={value}, but data.held_out=0 keeps nothing to evaluate on");
            findings.add(
                &[&format!("train.{name}"), "data.held_out"],
                what,
                "say data.held_out = 0.05, or leave it out",
            );
        }
    }
    (data.held_out > 0.0).then_some(eval)
}

fn sample(typed: &config::Train) -> Option<Sample> {
    let asked = typed.sample.is_some() || typed.sample_tokens.is_some();
    let prompt = typed.sample.clone().unwrap_or_default();
    asked.then(|| Sample { prompt, tokens: typed.sample_tokens.unwrap_or(64) })
}

fn numbers(findings: &mut Findings, train: &Train) {
    findings.at_least_one("train.steps", train.steps);
    findings.at_least_one("train.log_every", train.log_every);
    findings.at_least_one("train.threads", train.threads);
    let [first, second] = train.betas;
    let both = format!("[{first}, {second}]");
    let inside = |beta: f64| (0.0..1.0).contains(&beta);
    findings.require(
        inside(first) && inside(second),
        "train.betas",
        both,
        "both must be from 0 to below 1",
    );
    findings.require(train.eps > 0.0, "train.eps", train.eps, "it must be more than 0");
    let (decay, clip) = (train.weight_decay, train.clip.unwrap_or(0.0));
    findings.require(decay >= 0.0, "train.weight_decay", decay, "it must be at least 0");
    findings.require(
        clip >= 0.0,
        "train.clip",
        clip,
        "it must be more than 0, or 0 for no clipping",
    );
}
