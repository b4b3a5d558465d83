//! One file per axis of the mesh: what ranks exchange so that all train one model. Acts on buffers and
//! groups; knows no layer names.

pub mod data;
