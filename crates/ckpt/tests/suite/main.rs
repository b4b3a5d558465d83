//! Checkpoints and Hugging Face folders, held against what transformers wrote in `fixtures/pytorch`.

mod checkpoints;
mod exports;
mod imports;
mod support;
