//! Loads of experts in a step: the sums over all ranks, their report, and the slots that the next step balances with.

use lockstep_plan::model::{Balance, Moe};

use crate::Rank;

/// Loads of the experts over the global batch of a step. The load of an expert is its number of slots (tokens × top_k)
/// divided by the mean of its layer: 1 if experts are used evenly.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertLoad {
    /// Lowest load of an expert in any layer.
    pub min: f64,
    /// Highest load of an expert in any layer.
    pub max: f64,
    /// Highest load in a layer, mean over the layers.
    pub imbalance: f64,
    /// Slots dropped because their expert was full, as a fraction of all slots. `None` without a capacity.
    pub dropped_fraction: Option<f64>,
    /// The weighted balance loss, if it is over the global batch.
    pub(crate) balance_loss: f64,
}

impl Rank<'_> {
    /// Writes this rank's loads to the numbers that all ranks sum. All ranks of the tensor axis route the same tokens;
    /// one of them counts.
    pub(crate) fn write_loads(&mut self, dropped: u64) {
        let Some(loads) = &mut self.loads else { return };
        let (last, sums) =
            self.sums[Rank::SCALARS..].split_last_mut().expect("a model with experts");
        match self.groups.is_tensor_root() {
            true => loads.read(&self.device, sums),
            false => sums.fill(0.0),
        }
        *last = dropped as f64;
    }

    /// The loads of the global batch, after the ranks have summed their numbers.
    pub(crate) fn expert_load(&self) -> Option<ExpertLoad> {
        let moe = self.plan.model.moe?;
        let (dropped, sums) = self.sums[Rank::SCALARS..].split_last()?;
        let layers = || sums.chunks_exact(2 * moe.experts).map(|layer| layer.split_at(moe.experts));
        let count = layers().count() as f64;
        let (mut min, mut max, mut imbalance, mut total) = (f64::INFINITY, 0f64, 0.0, 0.0);
        for (slots, _) in layers() {
            let all: f64 = slots.iter().sum();
            let loads = || slots.iter().map(|slots| slots * moe.experts as f64 / all.max(1.0));
            let highest = loads().fold(0.0, f64::max);
            (min, max) = (loads().fold(min, f64::min), max.max(highest));
            imbalance += highest / count;
            total += all;
        }
        let balance_loss = match moe.balance {
            Balance::Sequence => 0.0,
            Balance::Batch => {
                layers().map(|(slots, probs)| balance_loss(&moe, slots, probs)).sum::<f64>() / count
            }
        };
        Some(ExpertLoad {
            min,
            max,
            imbalance,
            dropped_fraction: moe.capacity.map(|_| dropped / total.max(1.0)),
            balance_loss: moe.aux_loss * balance_loss,
        })
    }

    /// Load of each expert by layer, with two decimals. Empty if there are more than [`MOST_LOADS`].
    pub(crate) fn expert_loads(&self) -> Vec<Vec<f32>> {
        let Some(moe) = self.plan.model.moe else { return Vec::new() };
        let sums = &self.sums[Rank::SCALARS..];
        if sums.len() > 2 * MOST_LOADS {
            return Vec::new();
        }
        let layer = |slots: &[f64]| {
            let mean = slots.iter().sum::<f64>().max(1.0) / moe.experts as f64;
            slots.iter().map(|slots| (100.0 * slots / mean).round() as f32 / 100.0).collect()
        };
        sums.chunks_exact(2 * moe.experts).map(|sums| layer(&sums[..moe.experts])).collect()
    }

    /// Keeps the slots of this step for the balance loss of the next one.
    pub(crate) fn keep_slots(&mut self) {
        let Some(moe) = self.plan.model.moe else { return };
        let slots = &mut self.extra.expert_slots;
        slots.clear();
        if moe.balance == Balance::Batch && moe.aux_loss > 0.0 {
            let layers = self.sums[Rank::SCALARS..].chunks_exact(2 * moe.experts);
            slots.extend(layers.flat_map(|layer| &layer[..moe.experts]).map(|slots| *slots as u64));
        }
    }
}

/// Most loads of experts in a line of ranks.jsonl.
const MOST_LOADS: usize = 4096;

/// `experts · Σ f · P` of one layer, see `lockstep_model::ExpertLoads`.
fn balance_loss(moe: &Moe, slots: &[f64], probs: &[f64]) -> f64 {
    let tokens = slots.iter().sum::<f64>().max(1.0) / moe.top_k as f64;
    let both = slots.iter().zip(probs).map(|(slots, probs)| slots / tokens * (probs / tokens));
    moe.experts as f64 * both.sum::<f64>()
}
