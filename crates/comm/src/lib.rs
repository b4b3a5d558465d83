//! Moving bytes between ranks: worlds, groups and the collectives on them.
//! Knows nothing of axes, tensors or models.

pub mod launch;
