//! A rank's state to and from a checkpoint.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Checkpoint, Head, Moments, Named, Tensors, params_of};
use lockstep_kernels::{Device, View};
use lockstep_model::Weights;
use serde_json::Value;

use crate::{Error, Rank};

/// Tensors in device memory, copied out as they are asked for.
struct OnDevice<'a, F> {
    device: &'a Device,
    list: Vec<Named>,
    places: HashMap<String, (usize, Range<usize>)>,
    /// The flat buffer of a block.
    buffer: F,
}

impl<'a, F: Fn(usize) -> View<'a>> Tensors for OnDevice<'a, F> {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) {
        let (block, range) = self.places.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        self.device.read((self.buffer)(*block).part(range.clone()), out);
    }
}

impl Rank<'_> {
    /// Writes a checkpoint into the run's folder: where.
    pub fn save(&self, run: &Path, step: u64) -> Result<PathBuf, Error> {
        let plan = serde_json::to_value(self.plan).unwrap_or(Value::Null);
        let head = Head { step, shape: self.plan.model.clone(), plan };
        let params = self.on_device(|block| self.weights.master(block));
        let first = self.on_device(|block| self.optimizer.moments(block).0);
        let second = self.on_device(|block| self.optimizer.moments(block).1);
        let moments = Moments { first: &first, second: &second };
        Ok(lockstep_ckpt::save(run, &head, &params, Some(moments))?)
    }

    /// Takes the moments of a checkpoint over, if it has them.
    pub(crate) fn load_moments(&mut self, checkpoint: &Checkpoint) {
        let Some(moments) = checkpoint.moments() else { return };
        let mut values = Vec::new();
        for (name, param, block, range) in self.weights.tensors() {
            let (first, second) = self.optimizer.moments_mut(block);
            for (from, to) in [(moments.first, first), (moments.second, second)] {
                values.resize(param.len(), 0.0);
                from.read(&name, &mut values);
                self.device.write(to.view_mut().part(range.clone()), &values);
            }
        }
    }

    fn on_device<'b, F: Fn(usize) -> View<'b>>(&'b self, buffer: F) -> OnDevice<'b, F> {
        let places =
            self.weights.tensors().map(|(name, _, block, range)| (name, (block, range))).collect();
        OnDevice { device: &self.device, list: params_of(&self.plan.model), places, buffer }
    }
}

/// The parameters of a checkpoint or of any other list of tensors.
pub fn load_weights(
    device: &Device,
    shape: &lockstep_plan::model::Shape,
    dtype: lockstep_kernels::Dtype,
    from: &dyn Tensors,
) -> Weights {
    let read = |name: &str, _: &lockstep_plan::model::Param, out: &mut [f32]| {
        from.read(name, out);
        Ok::<(), std::convert::Infallible>(())
    };
    Weights::load(device, shape, dtype, read).unwrap_or_else(|never| match never {})
}
