//! Properties of training programs that affect memory and time: which activations they save, which kernels they fuse,
//! what they overlap. They hold for every model and layout. README.md states which of them were fitted, and on what.

use lockstep_plan::reduction::Program;
use serde::{Deserialize, Serialize};

/// A training program.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Software {
    pub name: String,
    /// Bytes per parameter of working weights.
    pub weights: f64,
    /// Bytes per parameter of stored gradients.
    pub gradients: f64,
    /// Bytes per parameter of master weights and moments.
    pub optimizer: f64,
    /// Bytes per gradient element on the wire.
    pub wire: f64,
    /// Bytes per parameter that the optimizer step reads and writes, including norm, scaling and copies.
    pub stepped: f64,
    /// FlashAttention: the matrix of scores is never written to memory.
    pub flash: bool,
    pub selective: Selective,
    pub saved: SavedActivations,
    /// Bytes per logit that exist at once, and that the loss moves, forward and backward.
    pub logits: [f64; 2],
    /// Memory traffic of element-wise operations relative to fully fused kernels.
    pub unfused: f64,
    /// Matmuls add biases and residuals in their epilogue. Bias gradients are then separate passes.
    pub epilogues: bool,
    /// Kernels launched per layer, forward and backward.
    pub kernels: [f64; 2],
    /// Tensor parallel communication overlaps with weight gradients.
    pub tensor_overlap: bool,
    /// Gradient reduction overlaps with the backward pass.
    pub data_overlap: bool,
    /// ZeRO-1 uses reduce-scatter; otherwise all-reduce.
    pub scatters: bool,
    /// With keep_gathered, gradients are accumulated unsharded and reduced once per step.
    #[serde(default)]
    pub accumulates_unsharded: bool,
    /// Messages between pipeline stages overlap with the passes.
    pub pipe_overlap: bool,
    /// Each tensor rank sends its part of a message between stages (Megatron's scatter/gather optimization).
    pub pipe_cut: bool,
    /// With FP8 matmuls, their saved inputs are stored in FP8 (Transformer Engine). Otherwise they are cast again
    /// (torchao).
    #[serde(default)]
    pub fp8_inputs: bool,
    /// With FP8 matmuls, extra bytes per parameter of a layer: FP8 copies of the weights, row by row and transposed. 0
    /// if they replace the bf16 weights, which takes the same memory.
    #[serde(default)]
    pub fp8_weights: f64,
    /// Efficiency of this program's attention kernels relative to the accelerator's best.
    pub attention: f64,
    /// The tensor axis distributes whole experts, with the tokens of its ranks, instead of sharding each expert.
    pub whole_experts: bool,
    /// A token is sent once to every host that has one of its experts, and forwarded inside the host (DeepEP).
    pub once_per_host: bool,
    /// Gradients accumulate in one buffer of all parameters that is never freed (Megatron's distributed optimizer).
    #[serde(default)]
    pub whole_gradients: bool,
    /// An extra gradient buffer exists for every matrix shape.
    pub spare_gradients: bool,
    /// Buckets and staging buffers of a fixed size.
    pub buffers_gib: f64,
    /// Allocator overhead as a fraction of allocated memory.
    pub slack: f64,
}

/// Meaning of "selective" recomputation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selective {
    /// Recompute scores, softmax and weighted sum (Korthikanti et al. 2022).
    CoreAttention,
    /// Recompute the inner activations of the feed-forward.
    FeedForward,
    /// Recompute everything except attention and every second matmul.
    OtherMatmuls,
}

/// Activations that a layer saves for backward in addition to those that every program saves: the inputs of attention
/// and feed-forward, q, k, v, the attention output and the feed-forward before its activation.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SavedActivations {
    /// Outputs of norms; otherwise recomputed.
    pub norms: bool,
    /// Outputs of activation functions; otherwise recomputed.
    pub activations: bool,
    /// Bytes per token and column of the stream that unfused operations save.
    pub dim: f64,
    /// Bytes per token and column of the feed-forward that unfused operations save.
    pub ffn: f64,
}

const SAVE_ALL: SavedActivations =
    SavedActivations { norms: true, activations: true, dim: 0.0, ffn: 0.0 };

impl Software {
    /// The inputs of the reduction policy that depend on the program.
    pub(crate) fn program(&self) -> Program {
        Program {
            overlaps: self.data_overlap,
            reduce_scatters: self.scatters,
            accumulates_unsharded: self.accumulates_unsharded,
        }
    }

    /// Base of the descriptions below: 16-bit training with f32 master weights, fused kernels, no overlap.
    fn plain(name: &str) -> Software {
        Software {
            name: name.into(),
            weights: 2.0,
            gradients: 4.0,
            optimizer: 12.0,
            wire: 4.0,
            stepped: 34.0,
            flash: true,
            selective: Selective::CoreAttention,
            saved: SAVE_ALL,
            logits: [10.0, 24.0],
            unfused: 1.0,
            epilogues: false,
            kernels: [28.0, 44.0],
            tensor_overlap: false,
            data_overlap: false,
            scatters: true,
            accumulates_unsharded: false,
            pipe_overlap: false,
            pipe_cut: false,
            fp8_inputs: false,
            fp8_weights: 0.0,
            attention: 1.0,
            whole_experts: false,
            once_per_host: false,
            whole_gradients: false,
            spare_gradients: false,
            buffers_gib: 0.0,
            slack: 0.02,
        }
    }

    pub fn lockstep() -> Software {
        Software {
            selective: Selective::FeedForward,
            saved: SavedActivations { norms: false, activations: false, dim: 0.0, ffn: 0.0 },
            logits: [8.0, 24.0],
            epilogues: true,
            kernels: [14.0, 28.0],
            data_overlap: true,
            pipe_overlap: true,
            // Lockstep does not train in FP8; plans assume Transformer Engine with bf16 weights.
            fp8_inputs: true,
            fp8_weights: 2.0,
            ..Software::plain("lockstep")
        }
    }

    /// Megatron-LM of 2021: fused kernels, no FlashAttention, no overlap.
    pub fn megatron_2021() -> Software {
        Software {
            flash: false,
            logits: [10.0, 40.0],
            pipe_cut: true,
            whole_gradients: true,
            slack: 0.04,
            ..Software::plain("megatron 2021")
        }
    }

    /// Megatron-LM of 2022: tensor parallel communication overlaps with weight gradients.
    pub fn megatron_2022() -> Software {
        Software { name: "megatron 2022".into(), tensor_overlap: true, ..Software::megatron_2021() }
    }

    /// Megatron-Core with Transformer Engine and fused cross-entropy.
    pub fn megatron_core() -> Software {
        Software {
            name: "megatron core".into(),
            flash: true,
            fp8_inputs: true,
            logits: [4.0, 12.0],
            kernels: [18.0, 30.0],
            whole_experts: true,
            spare_gradients: true,
            ..Software::megatron_2021()
        }
    }

    /// Megatron-Core of 2025: overlaps all communication.
    pub fn megatron_2025() -> Software {
        Software {
            name: "megatron 2025".into(),
            tensor_overlap: true,
            data_overlap: true,
            pipe_overlap: true,
            ..Software::megatron_core()
        }
    }

    /// NeMo of 2024: the previous generation of attention kernels, at about two thirds of the speed on H100s.
    pub fn nemo() -> Software {
        Software { name: "nemo".into(), attention: 0.64, ..Software::megatron_2025() }
    }

    /// Megatron-DeepSpeed as used for BLOOM: ZeRO-1 with 16-bit gradients.
    pub fn megatron_deepspeed() -> Software {
        Software {
            name: "megatron-deepspeed".into(),
            gradients: 2.0,
            wire: 2.0,
            scatters: false,
            kernels: [85.0, 130.0],
            // Two reduce buckets of 5e8 elements, one gather bucket, and one in f32.
            buffers_gib: 4.7,
            ..Software::megatron_2021()
        }
    }

    /// torchtitan without torch.compile: FSDP2 with f32 parameters, gathered in bf16.
    pub fn torchtitan() -> Software {
        Software {
            weights: 0.0,
            stepped: 40.0,
            selective: Selective::OtherMatmuls,
            saved: SavedActivations { norms: true, activations: true, dim: 12.0, ffn: 2.0 },
            unfused: 2.5,
            kernels: [40.0, 70.0],
            data_overlap: true,
            accumulates_unsharded: true,
            pipe_overlap: true,
            slack: 0.05,
            ..Software::plain("torchtitan")
        }
    }

    /// torchtitan with torch.compile.
    pub fn torchtitan_compiled() -> Software {
        Software {
            name: "torchtitan compiled".into(),
            saved: SAVE_ALL,
            unfused: 1.2,
            kernels: [16.0, 30.0],
            ..Software::torchtitan()
        }
    }

    /// nanotron: f32 gradient accumulation, few fused kernels.
    pub fn nanotron() -> Software {
        Software {
            stepped: 40.0,
            saved: SavedActivations { norms: true, activations: true, dim: 12.0, ffn: 2.0 },
            logits: [11.0, 60.0],
            whole_gradients: true,
            unfused: 2.0,
            kernels: [40.0, 70.0],
            slack: 0.05,
            ..Software::plain("nanotron")
        }
    }
}
