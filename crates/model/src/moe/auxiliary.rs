//! Auxiliary losses of routers.

use lockstep_kernels::Scalar;

/// Sum of the routers' auxiliary losses of one stage and micro-batch. Each layer adds its part in its forward pass, so
/// no layer or stage waits for another.
#[derive(Default)]
pub struct Auxiliary {
    layers: Vec<LayerLosses>,
    /// Slots dropped because their expert was full.
    pub dropped: u64,
}

impl Auxiliary {
    /// Prepares for a new micro-batch; keeps the allocation.
    pub(crate) fn clear(&mut self) {
        self.layers.clear();
        self.dropped = 0;
    }

    pub(super) fn add(&mut self, losses: LayerLosses, dropped: usize) {
        self.layers.push(losses);
        self.dropped += dropped as u64;
    }

    /// The weighted losses of the layers so far. Waits for the device.
    pub(crate) fn loss(&self) -> f64 {
        self.layers.iter().fold(0.0, |sum, layer| sum + layer.loss())
    }
}

/// Auxiliary losses of one layer's router, still being computed by the device.
pub(super) struct LayerLosses {
    /// Weight and value of the balance loss over sequences.
    pub balance: Option<(f64, Scalar)>,
    /// Weight of the z-loss.
    pub z_loss: f64,
    /// Sum of the squared log-sum-exps of this rank's tokens.
    pub log_sum_squares: Scalar,
    pub tokens: usize,
    /// Layers of the whole model.
    pub layers: usize,
}

impl LayerLosses {
    /// The weighted mean over this rank's tokens, divided by the layers of the whole model, so that stages add up.
    fn loss(&self) -> f64 {
        let z = self.log_sum_squares.get() / self.tokens.max(1) as f64;
        let balance = self.balance.as_ref().map_or(0.0, |(weight, loss)| weight * loss.get());
        (balance + self.z_loss * z) / self.layers as f64
    }
}
