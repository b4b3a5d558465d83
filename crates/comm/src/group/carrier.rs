//! What carries out a group's collectives: our own lane, or an engine that brings its own.

use crate::call::Algo;
use crate::call::cost::Traffic;
use crate::call::error::Result;
use crate::group::lane::Lane;
use crate::group::work::{Work, perform};
use crate::health::watch::Watch;
use lockstep_types::Dtype;

pub(crate) enum Carrier {
    Lane(Box<Lane>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Engine>),
}

impl Carrier {
    /// Whether it is an engine: then the choice of the algorithm is not ours.
    pub(crate) fn is_engine(&self) -> bool {
        match self {
            Carrier::Lane(_) => false,
            #[cfg(feature = "mpi")]
            Carrier::Mpi(_) => true,
        }
    }

    /// Does it, and says what this member sent; of an engine we do not know.
    pub(crate) fn perform(
        &mut self,
        watch: Watch,
        work: Work,
        algo: Algo,
        dtype: Dtype,
    ) -> Result<Traffic> {
        match self {
            Carrier::Lane(lane) => {
                let before = lane.traffic;
                lane.begin(watch);
                let result = perform(lane, work, algo, dtype);
                lane.end();
                result.map(|()| Traffic {
                    messages: lane.traffic.messages - before.messages,
                    bytes: lane.traffic.bytes - before.bytes,
                })
            }
            #[cfg(feature = "mpi")]
            Carrier::Mpi(engine) => {
                engine.perform(&watch, work, dtype).map(|()| Traffic::default())
            }
        }
    }
}
