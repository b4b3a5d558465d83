//! A model's state on disk: checkpoints that many write and any number read, and Hugging Face folders in and out.
//! Knows nothing of devices, and computes nothing.
//!
//! A tensor has one global name. Whoever saves writes slices of tensors, told by their places in the whole
//! ([`Piece`]); whoever loads asks for slices, and gets them from whatever pieces there are. So a checkpoint of any
//! layout is read on any other.
//!
//! ```no_run
//! use lockstep_ckpt::{Tensors, find, hf, load, save};
//! use std::path::Path;
//!
//! let model = hf::Source::open(Path::new("Llama-3.2-1B"))?;
//! save(Path::new("runs/tuned"), model.shape(), &model)?;
//!
//! let checkpoint = load(&find(Path::new("runs/tuned"))?)?;
//! let mut gain = vec![0.0; checkpoint.head().shape.dim];
//! checkpoint.params().read("head.norm.gain", &mut gain)?;
//! # Ok::<(), lockstep_ckpt::Error>(())
//! ```

mod carried;
mod checkpoint;
mod chunks;
mod diff;
mod disk;
mod error;
mod folder;
mod generation;
pub mod hf;
mod manifest;
mod partial;
pub mod rollouts;
pub mod safetensors;
mod save;
mod tensors;
mod writer;

pub use carried::Carried;
pub use checkpoint::{Checkpoint, Stored, load};
pub use diff::{Apart, diff};
pub use disk::{Act, Disk};
pub use error::{Error, Result};
pub use folder::{
    Keep, before, find, find_step, folder, is_checkpoint, latest, prune, steps, sweep,
};
pub use generation::{advance, claim, newest, succeed};
pub use lockstep_plan::model::Runs;
pub use manifest::{
    CHUNK, FileSum, Head, Kind, Manifest, Piece, PieceAt, Position, TensorAt, Written,
};
pub use save::{abandon, begin, commit, partial_folder, save};
pub use tensors::{Named, Slices, Tensors, params_of};
pub use writer::write_pieces;
