//! Checkpoints and Hugging Face folders, held against what transformers wrote in `fixtures/pytorch`; the ledger of
//! an online learner.

mod checkpoints;
mod exports;
mod imports;
mod rollouts;
mod support;
