//! A gradient came out infinite or as no number: on which rank, and in which layer, it began.

use lockstep_data::{Source, Split};

use crate::rank::dtype;
use crate::{Error, Rank};

/// Room for a place's name when ranks tell each other.
const NAME: usize = 120;

impl Rank<'_> {
    /// Does the step's passes once more, looking; the parameters are still what they were. All ranks take
    /// part, and all give the same answer.
    pub(crate) fn find_nan(&mut self, source: &Source, step: u64) -> Error {
        let place =
            self.first_bad_output(source, step).or_else(|| self.first_bad_gradient(source, step));
        self.gradients.clear();
        match self.agree(place) {
            Ok((rank, place)) => Error::NotFinite { step, rank, place },
            Err(error) => error,
        }
    }

    fn first_bad_output(&mut self, source: &Source, step: u64) -> Option<String> {
        (0..self.plan.train.accumulation).find_map(|micro| {
            let first =
                self.group.rank() * self.plan.local_batch() + micro * self.plan.train.micro_batch;
            self.load(source, Split::Train, step, first);
            self.model.first_not_finite(&self.device, &self.weights, &self.batch, dtype(self.plan))
        })
    }

    /// Backward runs from the head: the last block that is bad is where it began.
    fn first_bad_gradient(&mut self, source: &Source, step: u64) -> Option<String> {
        self.gradients.clear();
        self.passes(source, step);
        let bad = |(_, gradient): &(usize, &lockstep_kernels::Tensor)| {
            self.device.count_not_finite(gradient.view()) > 0
        };
        let (block, _) = self.gradients.iter().filter(bad).last()?;
        Some(format!("{} (its gradient)", self.weights.layout[block].name))
    }

    /// The lowest rank that found something, and what.
    fn agree(&self, place: Option<String>) -> Result<(usize, String), Error> {
        let mut mine = [0u8; NAME];
        let name = place.unwrap_or_default();
        let len = name.len().min(NAME);
        mine[..len].copy_from_slice(&name.as_bytes()[..len]);
        let mut all = vec![0u8; NAME * self.group.size()];
        self.group.all_gather(&mine, &mut all)?;
        let told = |name: &[u8]| {
            let end = name.iter().position(|&byte| byte == 0).unwrap_or(NAME);
            String::from_utf8_lossy(&name[..end]).into_owned()
        };
        let found = all.chunks_exact(NAME).enumerate().find(|(_, name)| name[0] != 0);
        Ok(match found {
            Some((rank, name)) => (rank, told(name)),
            // Finite everywhere, and not so summed.
            None => (self.group.rank(), "the sum of all ranks' gradients".into()),
        })
    }
}
