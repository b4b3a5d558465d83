//! Run folders written by hand, as real runs write them: their state, the doctor's verdict, and the page.

mod doctor;
mod fake_run;
mod folders;
#[cfg(feature = "serve")]
mod server;
