//! A model's weights on disk: checkpoints of a run, and Hugging Face folders in and out. Knows nothing of ranks
//! or devices, and computes nothing.
//!
//! Everything is a list of named f32 tensors that is read one at a time ([`Tensors`]), so a model passes through
//! in the memory of its largest tensor; what is mapped besides, the system takes back when it wants.
//!
//! ```no_run
//! use lockstep_ckpt::{Carried, Head, Tensors, find, hf, load, save};
//! use std::path::Path;
//!
//! let model = hf::Source::open(Path::new("Llama-3.2-1B"))?;
//! let (shape, plan) = (model.shape().clone(), serde_json::Value::Null);
//! let head = Head { step: 0, shape, plan, carried: Carried::default() };
//! save(Path::new("runs/tuned"), &head, &model, None)?;
//!
//! let checkpoint = load(&find(Path::new("runs/tuned"))?)?;
//! let mut gain = vec![0.0; checkpoint.head().shape.dim];
//! checkpoint.params().read("head.norm.gain", &mut gain);
//! # Ok::<(), lockstep_ckpt::Error>(())
//! ```

mod carried;
mod error;
mod folder;
pub mod hf;
mod partial;
pub mod rollouts;
pub mod safetensors;
mod tensors;

pub use carried::Carried;
pub use error::{Error, Result};
pub use folder::{
    Checkpoint, Head, Moments, Stored, before, find, latest, load, newest_step, prune, save,
    save_owing, sweep,
};
pub use tensors::{Named, Slices, Tensors, params_of};
