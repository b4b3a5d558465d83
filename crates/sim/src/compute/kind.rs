//! Kinds of computing, by which time is counted: those that `bench step` counts a running step by, so that what was
//! foretold and what came can be laid side by side.

use serde::{Deserialize, Serialize};

/// A kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
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

impl Kind {
    pub const ALL: [Kind; 10] = [
        Kind::Matmul,
        Kind::Attention,
        Kind::Rope,
        Kind::Norm,
        Kind::Activation,
        Kind::Embedding,
        Kind::Loss,
        Kind::Optimizer,
        Kind::Routing,
        Kind::Elementwise,
    ];

    /// Whether models of all families do it in the same way, with as much work for each number.
    pub fn same_in_all(self) -> bool {
        use Kind::{Attention, Loss, Matmul, Optimizer};
        matches!(self, Matmul | Attention | Loss | Optimizer)
    }

    /// As `bench step` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Matmul => "matmul",
            Kind::Attention => "attention",
            Kind::Rope => "rope",
            Kind::Norm => "norm",
            Kind::Activation => "activation",
            Kind::Embedding => "embedding",
            Kind::Loss => "loss",
            Kind::Optimizer => "optimizer",
            Kind::Routing => "routing",
            Kind::Elementwise => "elementwise",
        }
    }
}

/// Seconds of each kind.
pub type ByKind = [f64; Kind::ALL.len()];
