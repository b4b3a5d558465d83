//! What carries out a group's collectives: our own lane, or an engine that brings its own.

use crate::call::Algo;
use crate::cost::Traffic;
use crate::element::DType;
use crate::error::Result;
use crate::lane::Lane;
use crate::watch::Watch;
use crate::work::{Work, perform};

pub(crate) enum Carrier {
    Lane(Box<Lane>),
}

impl Carrier {
    /// The algorithm as the call names it.
    pub(crate) fn algo(&self, chosen: Algo) -> Algo {
        match self {
            Carrier::Lane(_) => chosen,
        }
    }

    /// Does it, and says what this member sent.
    pub(crate) fn perform(
        &mut self,
        watch: Watch,
        work: Work,
        algo: Algo,
        dtype: DType,
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
        }
    }
}
