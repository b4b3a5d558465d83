//! A gradient came out infinite or as no number: on which rank, and in which layer, it began.

use lockstep_data::{Source, Split};

use crate::{Error, Rank};

/// Room for a place's name when ranks tell each other.
const NAME: usize = 120;

impl Rank<'_> {
    /// Does the step's passes once more, looking; the parameters are still what they were. All ranks take
    /// part, and all give the same answer.
    pub(crate) fn find_nan(&mut self, source: &Source, step: u64) -> Error {
        let found = self.look_for_nan(source, step);
        self.store.clear();
        match found {
            Ok((rank, place)) => Error::NotFinite { step, rank, place },
            Err(error) => error,
        }
    }

    fn look_for_nan(&mut self, source: &Source, step: u64) -> Result<(usize, String), Error> {
        let mut found = Found { place: self.first_bad_parameter(), how: Bad::Parameter };
        for micro in 0..self.plan.train.accumulation {
            let place = self.first_bad_output(source, step, micro)?;
            found = found.or(place, Bad::Output);
        }
        // Once more to the gradients, which stay each rank's own this time.
        self.unsummed(source, step)?;
        let place = self.first_bad_gradient();
        self.agree(found.or(place, Bad::Gradient))
    }

    /// A step's passes, after which each rank has its own gradients.
    pub(crate) fn unsummed(&mut self, source: &Source, step: u64) -> Result<(), Error> {
        self.in_flight.land();
        self.store.clear();
        self.store.unsummed = true;
        let passed = self.passes(source, step);
        self.store.unsummed = false;
        passed.map(drop)
    }

    fn first_bad_parameter(&self) -> Option<String> {
        let part = &self.model.part;
        for (block, (params, units)) in part.blocks.iter().zip(&part.shards).enumerate() {
            for (unit, shard) in units.iter().enumerate() {
                let own = self.store.weights.own(block, unit);
                for (start, param) in params.placed() {
                    let Some(run) = shard.within(start..start + param.len()) else { continue };
                    if self.device.count_non_finite(own.part(run)) > 0 {
                        return Some(format!("{} (the parameter itself)", param.whole.name));
                    }
                }
            }
        }
        None
    }

    /// The first block whose output is not finite in a micro-batch.
    fn first_bad_output(
        &mut self,
        source: &Source,
        step: u64,
        micro: usize,
    ) -> Result<Option<String>, Error> {
        let mut found = None;
        let losses = self.infer(source, Split::Train, step, micro, |device, block, x| {
            if found.is_none() && device.count_non_finite(x.view()) > 0 {
                found = Some(block);
            }
        })?;
        let blocks = &self.model.part.blocks;
        if let Some(losses) = losses.filter(|_| found.is_none()) {
            found = (self.device.count_non_finite(losses.view()) > 0).then_some(blocks.len() - 1);
        }
        Ok(found.map(|block| format!("{} (its output)", blocks[block].name)))
    }

    /// Backward runs from the head: the last block that is bad is where it began.
    fn first_bad_gradient(&self) -> Option<String> {
        let gradients = &self.store.gradients;
        let bad = |block: &usize| {
            gradients.get(*block).is_some_and(|own| self.device.count_non_finite(own) > 0)
        };
        let block = (0..gradients.blocks()).rev().find(bad)?;
        Some(format!("{} (its gradient)", self.model.part.blocks[block].name))
    }

    /// What is closest to the cause, on the lowest rank that found it: earlier stages have lower ranks.
    fn agree(&self, found: Found) -> Result<(usize, String), Error> {
        let mut mine = [0u8; NAME];
        let name = found.place.unwrap_or_default();
        let len = name.len().min(NAME - 1);
        mine[0] = if name.is_empty() { u8::MAX } else { found.how as u8 };
        mine[1..len + 1].copy_from_slice(&name.as_bytes()[..len]);
        let mut all = vec![0u8; NAME * self.group.size()];
        self.group.all_gather(&mine, &mut all)?;
        let told = |name: &[u8]| {
            let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
            String::from_utf8_lossy(&name[..end]).into_owned()
        };
        let best = all.chunks_exact(NAME).enumerate().min_by_key(|(rank, name)| (name[0], *rank));
        Ok(match best {
            Some((rank, name)) if name[0] != u8::MAX => (rank, told(&name[1..])),
            // Finite everywhere, and not so summed.
            _ => (self.group.rank(), "the sum of all ranks' gradients".into()),
        })
    }
}

/// What is not finite, from the cause to its consequences: peers of other axes see only these.
#[derive(Clone, Copy)]
enum Bad {
    Parameter,
    Output,
    Gradient,
}

struct Found {
    place: Option<String>,
    how: Bad,
}

impl Found {
    fn or(self, place: Option<String>, how: Bad) -> Found {
        if self.place.is_some() { self } else { Found { place, how } }
    }
}
