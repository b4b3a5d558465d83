//! Checks `precision.fp8` against the device, the layout and the sizes of the model.

use super::checker::Checker;
use crate::config::Fp8;
use crate::plan::Plan;
use lockstep_types::{DeviceType, Dtype};

/// Sizes of fp8 matrices are multiples of this.
const MULTIPLE: usize = 16;

pub(super) fn check(checker: &mut Checker, plan: &Plan) {
    let (fp8, layout) = (plan.precision.fp8, &plan.layout);
    if !fp8.is_on() {
        return;
    }
    let mut refuse = |key: &str, message: String, suggestion: &str| {
        let message = format!("fp8={} {message}", fp8.name());
        checker.add(&["precision.fp8", key], message, suggestion);
    };
    if plan.device.kind == DeviceType::Cpu {
        refuse(
            "device.kind",
            "needs an NVIDIA GPU of compute capability 8.9 or newer, but this run uses the CPU"
                .into(),
            "remove fp8, or run on a GPU with device.kind = \"cuda\"",
        );
    }
    if plan.precision.compute != Dtype::Bf16 {
        let compute = plan.precision.compute;
        let message = format!("requires compute=bf16, but compute={compute}");
        refuse("precision.compute", message, "use precision.compute = \"bf16\"");
    }
    if layout.tensor > 1 {
        let message =
            format!("has one scale per matrix, which tensor={} would split", layout.tensor);
        refuse("layout.tensor", message, "use tensor=1, or another axis");
    }
    if layout.pipe > 1 && layout.schedule.splits() {
        let message = format!("does not defer weight gradients, but schedule={}", layout.schedule);
        refuse("layout.schedule", message, "use schedule = \"1f1b\" or \"interleaved\"");
    }
    if layout.offload.activations() {
        let message = format!("keeps its inputs on the GPU, but offload={}", layout.offload.name());
        refuse("layout.offload", message, "use offload = \"optimizer+gradients\", or remove fp8");
    }
    for (key, name, size) in sizes(plan) {
        if !size.is_multiple_of(MULTIPLE) {
            let message =
                format!("requires sizes that are multiples of {MULTIPLE}, but {name}={size}");
            let near = size.next_multiple_of(MULTIPLE);
            refuse(key, message, &format!("use for example {name}={near}"));
        }
    }
}

/// Rows and columns of the matrices, with the key that sets them.
fn sizes(plan: &Plan) -> Vec<(&'static str, &'static str, usize)> {
    let shape = &plan.model;
    let tokens = plan.train.micro_batch * plan.data.seq / plan.layout.context;
    let mut sizes = vec![
        ("model.dim", "dim", shape.dim),
        ("model.heads", "heads*head_dim", shape.attention_dim()),
        ("model.kv_heads", "kv_heads*head_dim", shape.kv_heads * shape.head_dim),
        ("train.micro_batch", "micro_batch*seq/context", tokens),
    ];
    if shape.moe.is_none() {
        sizes.push(("model.ffn", "ffn", shape.ffn));
    }
    if plan.precision.fp8 == Fp8::LayersAndHead {
        sizes.push(("model.vocab", "vocab", shape.vocab));
    }
    sizes
}
