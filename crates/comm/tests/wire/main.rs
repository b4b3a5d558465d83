//! The connections between ranks.

mod frames;
