//! The backend of a group's collectives: our own lane, or an external engine with its own algorithms.

use crate::call::Algo;
use crate::call::error::Result;
use crate::call::traffic::Traffic;
use crate::group::args::CollectiveArgs;
use crate::group::dispatch::dispatch;
use crate::health::watch::Watch;
use crate::lane::Lane;
use lockstep_types::Dtype;

pub(crate) enum Backend {
    Lane(Box<Lane>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Engine>),
}

impl Backend {
    /// Whether an external engine performs the calls and chooses the algorithms.
    pub(crate) fn is_engine(&self) -> bool {
        match self {
            Backend::Lane(_) => false,
            #[cfg(feature = "mpi")]
            Backend::Mpi(_) => true,
        }
    }

    /// Our own lane, which collectives on device memory use too.
    pub(crate) fn lane(&mut self) -> &mut Lane {
        match self {
            Backend::Lane(lane) => lane,
            #[cfg(feature = "mpi")]
            Backend::Mpi(_) => unreachable!("a group over MPI has no lane"),
        }
    }

    /// The library that carries the group.
    #[cfg(feature = "mpi")]
    pub(crate) fn mpi(&mut self) -> &mut crate::mpi::Engine {
        match self {
            Backend::Lane(_) => unreachable!("MPI does not carry the group"),
            Backend::Mpi(engine) => engine,
        }
    }

    /// Performs a collective and returns the traffic of this member; zero for engines, which do not
    /// report it.
    pub(crate) fn perform(
        &mut self,
        watch: Watch,
        args: CollectiveArgs,
        algo: Algo,
        dtype: Dtype,
    ) -> Result<Traffic> {
        match self {
            Backend::Lane(lane) => {
                let before = lane.traffic;
                lane.begin(watch);
                let result = dispatch(lane, args, algo, dtype);
                lane.end();
                result.map(|()| lane.traffic - before)
            }
            #[cfg(feature = "mpi")]
            Backend::Mpi(engine) => {
                engine.perform(&watch, args, dtype).map(|()| Traffic::default())
            }
        }
    }
}
