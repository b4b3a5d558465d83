//! Checkpoints, Hugging Face folders compared with those that transformers wrote (`fixtures/pytorch`), and the ledger of
//! an online learner.

mod checkpoints;
mod crashes;
mod exports;
mod flips;
mod forged;
mod imports;
mod retention;
mod rollouts;
mod run_lock;
mod state;
mod support;
