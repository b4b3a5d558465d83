//! Auxiliary losses of routers.

/// Sum of the routers' auxiliary losses of one stage and micro-batch. Each layer adds its part in its forward pass, so
/// no layer or stage waits for another.
#[derive(Default)]
pub struct Auxiliary {
    loss: f64,
    /// Slots dropped because their expert was full.
    pub dropped: u64,
}

impl Auxiliary {
    /// Adds a layer's weighted losses: the mean over this rank's tokens, divided by the layers of the whole model, so
    /// that stages add up.
    pub(super) fn add(&mut self, loss: f64, dropped: usize) {
        self.loss += loss;
        self.dropped += dropped as u64;
    }

    /// The weighted losses of the layers so far.
    pub(crate) fn loss(&self) -> f64 {
        self.loss
    }
}
