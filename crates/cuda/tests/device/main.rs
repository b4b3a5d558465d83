//! Wrong kernels, which the emulated GPU must report, and right ones, which it must not. A report ends the process, so that
//! each wrong kernel has its own. Tests of right kernels run on a GPU too.

mod hopper;
mod races;
