//! What ranks exchange, on every size of group. One binary, to link once.

mod compress;
