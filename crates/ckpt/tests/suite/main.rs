//! Checkpoints and Hugging Face folders, held against what transformers wrote in `fixtures/pytorch`; the ledger of
//! an online learner.

mod checkpoints;
mod crashes;
mod exports;
mod flips;
mod imports;
mod rollouts;
mod state;
mod support;
