//! Locates the first NaN or infinite value of a step: its rank and layer.

use lockstep_data::Source;

use crate::{Error, Rank, train_sample};

/// Bytes of a place's name in the all-gather, with one byte for its kind.
const NAME_BYTES: usize = 120;

impl Rank<'_> {
    /// Repeats forward and backward of the step and checks parameters, outputs and gradients. The parameters must not
    /// have changed. Returns the same error on all ranks. Collective.
    pub(crate) fn find_nan(&mut self, source: &Source, step: u64) -> Error {
        let found = self.locate(source, step);
        self.store.clear();
        match found {
            Ok((rank, place)) => Error::NotFinite { step, rank, place },
            Err(error) => error,
        }
    }

    fn locate(&mut self, source: &Source, step: u64) -> Result<(usize, String), Error> {
        let mut found = Found { place: self.first_bad_parameter(), kind: ValueKind::Parameter };
        for micro in 0..self.plan.train.accumulation {
            let place = self.first_bad_output(source, step, micro)?;
            found = found.or(place, ValueKind::Output);
        }
        // Again with backward; gradients are not reduced, so that each rank sees only its own.
        self.unreduced_passes(source, step)?;
        let place = self.first_bad_gradient();
        self.agree_on_first(found.or(place, ValueKind::Gradient))
    }

    /// Runs forward and backward of a step without reducing gradients.
    pub(crate) fn unreduced_passes(&mut self, source: &Source, step: u64) -> Result<(), Error> {
        self.in_flight.drop_activations();
        self.store.clear();
        self.store.unsummed = true;
        let result = self.passes(source, step);
        self.store.unsummed = false;
        result.map(drop)
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

    /// First block whose output or loss is not finite in a micro-batch.
    fn first_bad_output(
        &mut self,
        source: &Source,
        step: u64,
        micro: usize,
    ) -> Result<Option<String>, Error> {
        let mut found = None;
        let first = train_sample(self.plan, step, self.first_sample(micro));
        let losses = self.infer(source, first, micro, |device, block, x| {
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

    /// Backward starts at the head, so the last block with a bad gradient is the origin.
    fn first_bad_gradient(&self) -> Option<String> {
        let gradients = &self.store.gradients;
        let bad = |block: &usize| {
            gradients.get(*block).is_some_and(|own| self.device.count_non_finite(own) > 0)
        };
        let block = (0..gradients.blocks()).rev().find(bad)?;
        Some(format!("{} (its gradient)", self.model.part.blocks[block].name))
    }

    /// Finding closest to the cause, on the lowest rank that has it: earlier stages have lower ranks. Collective.
    fn agree_on_first(&self, found: Found) -> Result<(usize, String), Error> {
        let mut mine = [0u8; NAME_BYTES];
        let name = found.place.unwrap_or_default();
        let len = name.len().min(NAME_BYTES - 1);
        mine[0] = if name.is_empty() { u8::MAX } else { found.kind as u8 };
        mine[1..len + 1].copy_from_slice(&name.as_bytes()[..len]);
        let mut all = vec![0u8; NAME_BYTES * self.group.size()];
        self.group.all_gather(&mine, &mut all)?;
        let text = |name: &[u8]| {
            let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
            String::from_utf8_lossy(&name[..end]).into_owned()
        };
        let best =
            all.chunks_exact(NAME_BYTES).enumerate().min_by_key(|(rank, name)| (name[0], *rank));
        Ok(match best {
            Some((rank, name)) if name[0] != u8::MAX => (rank, text(&name[1..])),
            // All values are finite, but their sum is not.
            _ => (self.group.rank(), "the sum of all ranks' gradients".into()),
        })
    }
}

/// Kind of a value that is not finite, in the order of cause and consequence.
#[derive(Clone, Copy)]
enum ValueKind {
    Parameter,
    Output,
    Gradient,
}

struct Found {
    place: Option<String>,
    kind: ValueKind,
}

impl Found {
    fn or(self, place: Option<String>, kind: ValueKind) -> Found {
        if self.place.is_some() { self } else { Found { place, kind } }
    }
}
