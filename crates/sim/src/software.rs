//! What a training program is like, as far as memory and time depend on it: what it keeps, what it fuses, what it
//! overlaps. Facts about programs, each the same for every model and layout; README.md says which of them were fitted,
//! and on what.

use serde::{Deserialize, Serialize};

/// A training program.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Software {
    pub name: String,
    /// Bytes per parameter: the weights that are computed with.
    pub weights: f64,
    /// Of gradients, as they are held.
    pub gradients: f64,
    /// Of masters and moments.
    pub optimizer: f64,
    /// Bytes of a gradient on the wire.
    pub wire: f64,
    /// Bytes per parameter that the optimizer step reads and writes, with norm, scaling and copies.
    pub stepped: f64,
    /// Attention in tiles: the square of scores is never written.
    pub flash: bool,
    pub selective: Selective,
    pub kept: SavedActivations,
    /// Bytes per logit that exist at once, and that the loss moves, forward and backward.
    pub logits: [f64; 2],
    /// Passes over memory of element-wise work, of what well fused kernels need.
    pub unfused: f64,
    /// Whether multiplies add biases and residuals on their way out. Gradients of biases are then passes of their own.
    pub epilogues: bool,
    /// Kernels that the host starts for a layer, forward and backward.
    pub kernels: [f64; 2],
    /// Whether exchanges of the tensor axis go on beside weight gradients.
    pub tensor_overlap: bool,
    /// Whether sums of gradients go on beside the backward pass.
    pub data_overlap: bool,
    /// Whether ZeRO-1 sums gradients only where they are stepped; otherwise everywhere.
    pub scatters: bool,
    /// Whether messages between stages go on beside the passes.
    pub pipe_overlap: bool,
    /// Of a message between stages, each rank of the tensor axis sends its part.
    pub pipe_cut: bool,
    /// Of what an accelerator's attention in tiles reaches, what this program's kernels do.
    pub attention: f64,
    /// Whether the tensor axis deals out experts, with the tokens of its ranks, instead of cutting each.
    pub whole_experts: bool,
    /// Whether a token goes once to every host that has an expert of it, and is handed on there (DeepEP).
    pub once_per_host: bool,
    /// Whether a gradient buffer of every shape of matrix exists beside the gradients.
    pub spare_gradients: bool,
    /// Buckets and staging buffers of a fixed size.
    pub buffers_gib: f64,
    /// Of what tensors take, what the allocator takes besides.
    pub slack: f64,
}

/// What "selective" recompute means.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selective {
    /// Scores, softmax and weighted sum (Korthikanti et al. 2022).
    CoreAttention,
    /// The wide inner part of the feed-forward.
    FeedForward,
    /// Everything but attention and every other matrix multiply.
    OtherMatmuls,
}

/// What a layer keeps for its backward pass beside the inputs of its halves, q, k, v, the heads' output and the
/// wide part before its activation, which everybody keeps.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SavedActivations {
    /// What norms put out; otherwise they are done again.
    pub norms: bool,
    /// What activation functions put out; otherwise they are done again.
    pub activations: bool,
    /// Bytes per token and number of the stream's width, of operations that are not fused.
    pub dim: f64,
    /// The same of the feed-forward's width.
    pub ffn: f64,
}

const KEEPS_ALL: SavedActivations =
    SavedActivations { norms: true, activations: true, dim: 0.0, ffn: 0.0 };

impl Software {
    /// What the descriptions below begin with: 16-bit training with f32 masters, fused kernels, everything in turn.
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
            kept: KEEPS_ALL,
            logits: [10.0, 24.0],
            unfused: 1.0,
            epilogues: false,
            kernels: [28.0, 44.0],
            tensor_overlap: false,
            data_overlap: false,
            scatters: true,
            pipe_overlap: false,
            pipe_cut: false,
            attention: 1.0,
            whole_experts: false,
            once_per_host: false,
            spare_gradients: false,
            buffers_gib: 0.0,
            slack: 0.02,
        }
    }

    /// This one.
    pub fn lockstep() -> Software {
        Software {
            selective: Selective::FeedForward,
            kept: SavedActivations { norms: false, activations: false, dim: 0.0, ffn: 0.0 },
            logits: [8.0, 24.0],
            epilogues: true,
            kernels: [14.0, 28.0],
            data_overlap: true,
            pipe_overlap: true,
            ..Software::plain("lockstep")
        }
    }

    /// Megatron-LM of 2021: fused kernels, attention with its square, everything in turn.
    pub fn megatron_2021() -> Software {
        Software {
            flash: false,
            logits: [10.0, 40.0],
            pipe_cut: true,
            slack: 0.04,
            ..Software::plain("megatron 2021")
        }
    }

    /// Megatron-LM of 2022, with sequence parallelism: the tensor axis beside weight gradients.
    pub fn megatron_2022() -> Software {
        Software { name: "megatron 2022".into(), tensor_overlap: true, ..Software::megatron_2021() }
    }

    /// Megatron-Core with Transformer Engine and fused cross-entropy.
    pub fn megatron_core() -> Software {
        Software {
            name: "megatron core".into(),
            flash: true,
            logits: [4.0, 12.0],
            kernels: [18.0, 30.0],
            whole_experts: true,
            spare_gradients: true,
            ..Software::megatron_2021()
        }
    }

    /// Megatron-Core with exchanges beside the computing, and attention as it is since 2025.
    pub fn megatron_2025() -> Software {
        Software {
            name: "megatron 2025".into(),
            tensor_overlap: true,
            data_overlap: true,
            pipe_overlap: true,
            ..Software::megatron_core()
        }
    }

    /// NeMo of 2024: the same with attention of the generation before, which reached two thirds of that on H100s.
    pub fn nemo() -> Software {
        Software { name: "nemo".into(), attention: 0.64, ..Software::megatron_2025() }
    }

    /// Megatron-DeepSpeed, as BLOOM was trained with: ZeRO-1, one 16-bit gradient.
    pub fn megatron_deepspeed() -> Software {
        Software {
            name: "megatron-deepspeed".into(),
            gradients: 2.0,
            wire: 2.0,
            scatters: false,
            kernels: [85.0, 130.0],
            // Two buckets of 5e8 numbers to reduce from, one to gather into, and one in f32.
            buffers_gib: 4.7,
            ..Software::megatron_2021()
        }
    }

    /// torchtitan without compile: FSDP2, f32 parameters, gathered in bf16.
    pub fn torchtitan() -> Software {
        Software {
            weights: 0.0,
            stepped: 40.0,
            selective: Selective::OtherMatmuls,
            kept: SavedActivations { norms: true, activations: true, dim: 12.0, ffn: 2.0 },
            unfused: 2.5,
            kernels: [40.0, 70.0],
            data_overlap: true,
            pipe_overlap: true,
            slack: 0.05,
            ..Software::plain("torchtitan")
        }
    }

    /// torchtitan with compile.
    pub fn torchtitan_compiled() -> Software {
        Software {
            name: "torchtitan compiled".into(),
            kept: KEEPS_ALL,
            unfused: 1.2,
            kernels: [16.0, 30.0],
            ..Software::torchtitan()
        }
    }

    /// nanotron: f32 accumulation of gradients, little fused.
    pub fn nanotron() -> Software {
        Software {
            stepped: 40.0,
            kept: SavedActivations { norms: true, activations: true, dim: 12.0, ffn: 2.0 },
            logits: [11.0, 60.0],
            unfused: 2.0,
            kernels: [40.0, 70.0],
            slack: 0.05,
            ..Software::plain("nanotron")
        }
    }
}
