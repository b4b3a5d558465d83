//! Training state on disk: sharded checkpoints, and import and export of Hugging Face folders. Knows nothing about
//! devices and computes nothing.
//!
//! A tensor has a global name. A rank saves slices of tensors, described by their position in the whole tensor
//! ([`Piece`]), and loads the slices that it needs from whatever pieces contain them. A checkpoint can therefore be
//! loaded on any layout.
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

mod checkpoint;
mod chunks;
mod coverage;
mod diff;
mod disk;
mod error;
mod extra_state;
mod folder;
mod generation;
pub mod hf;
mod manifest;
mod partial;
mod regular;
mod retention;
pub mod rollouts;
mod run_lock;
pub mod safetensors;
mod save;
mod tensors;
mod validate;
mod writer;

pub use checkpoint::{Checkpoint, Stored, load};
pub use diff::{TensorDiff, diff};
pub use disk::{Disk, DiskOp};
pub use error::{Error, Result};
pub use extra_state::ExtraState;
pub use folder::{
    before, find, find_step, folder, is_checkpoint, latest, progress_since, run_of, steps, sweep,
};
pub use generation::{advance, advance_from, claim, newest};
pub use lockstep_plan::model::Runs;
pub use manifest::{
    CHUNK, FileSum, Head, Manifest, Piece, PieceAt, Position, TensorAt, TensorKind, Written,
};
pub use retention::{Keep, Retention, prune};
pub use run_lock::{Holder, RunLock};
pub use save::{abandon, begin, commit, partial_folder, save};
pub use tensors::{Named, Slices, Tensors, params_of};
pub use writer::write_pieces;
