//! Kinds of computing, by which time is counted: those that `bench step` counts a running step by, so that what was
//! predicted and what came can be laid side by side.

use serde::{Deserialize, Serialize};

/// A kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OpClass {
    Matmul,
    Attention,
    Rope,
    Norm,
    Activation,
    Embedding,
    Loss,
    Optimizer,
    Routing,
    /// Residuals, biases, dropout, casts.
    Elementwise,
}

impl OpClass {
    pub const ALL: [OpClass; 10] = [
        OpClass::Matmul,
        OpClass::Attention,
        OpClass::Rope,
        OpClass::Norm,
        OpClass::Activation,
        OpClass::Embedding,
        OpClass::Loss,
        OpClass::Optimizer,
        OpClass::Routing,
        OpClass::Elementwise,
    ];

    /// Whether models of all families do it in the same way, with as much work for each number.
    pub fn same_in_all(self) -> bool {
        use OpClass::{Attention, Loss, Matmul, Optimizer};
        matches!(self, Matmul | Attention | Loss | Optimizer)
    }

    /// As `bench step` calls it.
    pub fn name(self) -> &'static str {
        match self {
            OpClass::Matmul => "matmul",
            OpClass::Attention => "attention",
            OpClass::Rope => "rope",
            OpClass::Norm => "norm",
            OpClass::Activation => "activation",
            OpClass::Embedding => "embedding",
            OpClass::Loss => "loss",
            OpClass::Optimizer => "optimizer",
            OpClass::Routing => "routing",
            OpClass::Elementwise => "elementwise",
        }
    }
}

/// Seconds of each kind.
pub type ByClass = [f64; OpClass::ALL.len()];
