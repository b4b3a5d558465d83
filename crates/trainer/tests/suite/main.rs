//! Training as a whole: against PyTorch, against itself on several ranks, and when numbers go wrong.

mod pytorch;
