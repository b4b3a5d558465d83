//! Builds a rank's share of a run, does optimizer steps, and loops until the run is done. Knows nothing of
//! the command line: whoever runs it is told what happens.

mod error;
mod evaluate;
mod find_nan;
mod optimizer;
mod peak;
mod rank;
mod run;
mod stored;
mod text;

pub use error::Error;
pub use optimizer::Optimizer;
pub use peak::measure_peak;
pub use rank::{Rank, Stepped, dtype};
pub use run::{Event, Run, Start, run};
pub use stored::load_weights;
pub use text::{Wanted, generate};
