//! Resolves the name, `[precision]`, `[comm]` and `[checkpoint]`.

use super::checker::{Checker, MOST};
use crate::config::Compression;
use crate::plan::{Checkpoint, Comm, Layout, Overlap, Precision};
use lockstep_types::Dtype;

/// The name of the run, which is also the name of its folder.
pub(super) fn name(checker: &mut Checker) -> String {
    let name = checker.config.name.clone().unwrap_or_else(|| "run".into());
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        let message = format!("\"{name}\" is not a valid folder name");
        checker.add(&["name"], message, "use letters, digits, - and _");
    }
    name
}

pub(super) fn precision(checker: &mut Checker) -> Precision {
    let typed = &checker.config.precision;
    let precision = Precision {
        compute: typed.compute.unwrap_or_default(),
        gradients: typed.gradients.unwrap_or_default(),
        fp8: typed.fp8.unwrap_or_default(),
        fp8_scaling: typed.fp8_scaling.unwrap_or_default(),
    };
    let compression = checker.config.comm.compression.unwrap_or_default();
    if precision.gradients == Dtype::Bf16 && compression != Compression::None {
        let message =
            format!("compression={compression} requires f32 gradients, but gradients=bf16");
        let suggestion = "remove one of them: bf16 gradients already take two bytes";
        checker.add(&["precision.gradients", "comm.compression"], message, suggestion);
    }
    precision
}

/// Default warm-up of top-k compression: 1/10 of the steps send uncompressed gradients.
const WARMUP_DIVISOR: usize = 10;

/// Default minimum size of a gradient bucket. In smaller messages latency is more than 5% of the time: 20 × 20 µs at
/// 1.2 GB/s between hosts are 0.5 MB, and 20 × 1 µs at 8 GB/s inside one are 0.16 MB.
const BUCKET_BYTES: usize = 1 << 20;

pub(super) fn comm(checker: &mut Checker, steps: usize) -> Comm {
    let typed = &checker.config.comm;
    let timeout_s = typed.timeout_s.unwrap_or(30.0);
    let bucket_mb = typed.bucket_mb;
    checker.require(timeout_s > 0.0, "comm.timeout_s", timeout_s, "be greater than 0");
    if let Some(mb) = bucket_mb {
        checker.require(mb > 0.0, "comm.bucket_mb", mb, "be greater than 0");
    }
    let compression = typed.compression.unwrap_or_default();
    check_fraction(checker, compression);
    let bucket_bytes = bucket_mb.map_or(BUCKET_BYTES, |mb| (mb * 1048576.0) as usize);
    let compression_warmup = warmup(checker, compression, steps);
    let overlap = Overlap::default(); // resolved with the placement of the ranks
    let device_engine = typed.device_engine.unwrap_or_default();
    let register_buffers = typed.register_buffers.unwrap_or(false);
    Comm {
        timeout_s,
        bucket_bytes,
        compression,
        compression_warmup,
        overlap,
        device_engine,
        register_buffers,
    }
}

/// A compression that depends on neighbouring elements gives a different result on each tensor rank, even for
/// parameters that all of them hold. One rank broadcasts its result, so all shards must have the same size.
pub(super) fn compressible(checker: &mut Checker, comm: &Comm, layout: &Layout, vocab: usize) {
    let Layout { tensor, zero, .. } = *layout;
    let uneven = vocab % tensor;
    if comm.compression.depends_on_neighbours() && zero > 0 && uneven > 0 {
        let message = format!(
            "compression={} with zero={zero} requires shards of equal size, but tensor={tensor} does not divide vocab={vocab}",
            comm.compression
        );
        let suggestion =
            format!("use vocab={}, compression=bf16 or zero=0", vocab + tensor - uneven);
        checker.add(&["comm.compression", "model.vocab"], message, suggestion);
    }
}

/// Warm-up steps of top-k. Rounding needs none, because it treats all elements in the same way.
fn warmup(checker: &mut Checker, compression: Compression, steps: usize) -> usize {
    let typed = checker.config.comm.compression_warmup;
    if matches!(compression, Compression::TopK(_)) {
        return typed.unwrap_or(steps / WARMUP_DIVISOR);
    }
    if let Some(warmup) = typed.filter(|warmup| *warmup > 0) {
        let message = format!(
            "compression_warmup={warmup} is only used with topk, but compression={compression}"
        );
        checker.add(
            &["comm.compression_warmup", "comm.compression"],
            message,
            "remove it, or use for example compression = \"topk:0.01\"",
        );
    }
    0
}

fn check_fraction(checker: &mut Checker, compression: Compression) {
    let Compression::TopK(fraction) = compression else { return };
    let expected = "have a fraction greater than 0 and at most 1, e.g. topk:0.01";
    match fraction {
        percent if percent > 1.0 && percent <= 100.0 => {
            let message = format!("{compression} is more than the whole gradient");
            let suggestion = format!("for {percent} percent use topk:{}", percent / 100.0);
            checker.add(&["comm.compression"], message, suggestion);
        }
        _ => checker.require(
            fraction > 0.0 && fraction <= 1.0,
            "comm.compression",
            compression,
            expected,
        ),
    }
}

pub(super) fn checkpoint(checker: &mut Checker) -> Checkpoint {
    let typed = &checker.config.checkpoint;
    let every = typed.every.unwrap_or(0);
    let keep_every = typed.keep_every.unwrap_or(0);
    for (key, value) in [("every", every), ("keep_every", keep_every)] {
        let expected = format!("be at most {MOST}");
        checker.require(value <= MOST, &format!("checkpoint.{key}"), value, &expected);
    }
    if every.max(keep_every) <= MOST
        && keep_every > 0
        && every > 0
        && !keep_every.is_multiple_of(every)
    {
        let message = format!(
            "keep_every={keep_every} is not a multiple of every={every}, so those steps are not saved"
        );
        let near = (keep_every / every).max(1) * every;
        checker.add(
            &["checkpoint.keep_every", "checkpoint.every"],
            message,
            format!("use {near} or {}", near + every),
        );
    }
    Checkpoint { every, keep: typed.keep.unwrap_or(3), keep_every }
}
