//! Classes of device operations, by which compute time is measured and predicted.

use serde::{Deserialize, Serialize};

/// Class of a device operation.
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

    pub const fn name(self) -> &'static str {
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
