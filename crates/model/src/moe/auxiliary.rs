//! What routers' auxiliary losses come to, layer by layer as a forward pass goes.

/// What the routers of a stage did with a micro-batch.
///
/// Each layer's part is complete when its forward pass is: no layer waits for another, on this stage or the
/// next.
#[derive(Default)]
pub struct Auxiliary {
    loss: f64,
    /// Slots that their expert had no room for.
    pub dropped: u64,
}

impl Auxiliary {
    /// For a new micro-batch.
    pub(crate) fn clear(&mut self) {
        *self = Auxiliary::default();
    }

    /// A layer's weighted losses, the mean for this rank's tokens and divided by the layers of the whole
    /// model: stages add up.
    pub(super) fn add(&mut self, loss: f64, dropped: usize) {
        self.loss += loss;
        self.dropped += dropped as u64;
    }

    /// The weighted losses of the layers so far.
    pub(crate) fn loss(&self) -> f64 {
        self.loss
    }
}
