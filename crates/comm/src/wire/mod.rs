//! The connections between ranks: the frames on them.
//! Never decides what is said in a frame.

pub mod frame;

pub use frame::{FrameError, FrameHeader, Kind, read_frame, write_frame};
