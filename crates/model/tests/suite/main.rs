//! Consistency of models: gradients equal finite differences, recomputed activations equal saved ones, cached generation
//! equals whole sequences, experts on several ranks equal those on one. The trainer compares models with PyTorch.

mod cache;
mod custom;
mod experts;
mod gradients;
mod setup;
