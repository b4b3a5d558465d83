//! The configuration of a resolved plan, so that a change of one key is checked like one that is typed.

use lockstep_plan::config::{Model, Precision};
use lockstep_plan::{Config, Plan};

/// A config that resolves to `plan`.
pub(super) fn config_of(plan: &Plan) -> Config {
    let (train, layout) = (&plan.train, &plan.layout);
    let order: Vec<&str> = layout.order.iter().map(|axis| axis.name()).collect();
    let mut config = Config::default();
    config.name = Some(plan.name.clone());
    config.base = Model::of(&plan.model);
    config.data.source = Some(plan.data.source.clone().into());
    config.data.seq = Some(plan.data.seq);
    config.data.held_out = Some(plan.data.held_out);
    config.train.steps = Some(train.steps);
    config.train.global_batch = Some(train.global_batch);
    config.train.micro_batch = Some(train.micro_batch);
    config.train.lr = Some(train.lr.peak);
    config.train.min_lr = Some(train.lr.min);
    config.train.warmup = Some(train.lr.warmup);
    config.train.schedule = Some(train.lr.curve);
    config.train.threads = Some(train.threads);
    config.train.log_every = Some(train.log_every);
    config.layout.data = Some(layout.data);
    config.layout.zero = Some(usize::from(layout.zero));
    config.layout.shard = (layout.zero > 0).then_some(layout.shard);
    config.layout.keep_gathered = Some(layout.keep_gathered);
    config.layout.tensor = Some(layout.tensor);
    config.layout.sequence = Some(layout.sequence);
    config.layout.context = Some(layout.context);
    config.layout.context_kind = Some(layout.context_kind);
    config.layout.pipe = Some(layout.pipe);
    config.layout.schedule = Some(layout.schedule);
    config.layout.chunks = Some(layout.chunks);
    config.layout.expert = Some(layout.expert);
    config.layout.recompute = Some(layout.recompute);
    config.layout.offload = Some(layout.offload);
    config.layout.placement = Some(order.join(","));
    config.precision = Precision {
        compute: Some(plan.precision.compute),
        gradients: Some(plan.precision.gradients),
        fp8: Some(plan.precision.fp8),
        fp8_scaling: Some(plan.precision.fp8_scaling),
    };
    config.comm.timeout_s = Some(plan.comm.timeout_s);
    config.comm.bucket_mb = Some(plan.comm.bucket_bytes as f64 / 1048576.0);
    config.comm.overlap = Some(plan.comm.overlap.data);
    config.comm.compression = Some(plan.comm.compression);
    config.comm.device_engine = Some(plan.comm.device_engine);
    config.comm.register_buffers = Some(plan.comm.register_buffers);
    config.checkpoint.every = Some(plan.checkpoint.every);
    config.checkpoint.keep = Some(plan.checkpoint.keep);
    config
}
