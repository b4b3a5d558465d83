//! A rank's state to and from a checkpoint.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Carried, Checkpoint, Head, Moments, Named, Tensors, params_of};
use lockstep_kernels::{Device, Dtype, View};
use lockstep_model::{Store, Weights};
use lockstep_plan::model::{Part, Shape};
use lockstep_plan::{Compression, Plan};
use serde_json::Value;

use crate::{Error, Rank};

/// A whole model's tensors of one kind, in host memory.
pub struct Whole {
    list: Vec<Named>,
    values: HashMap<String, Vec<f32>>,
}

impl Tensors for Whole {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) {
        let values = self.values.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        out.copy_from_slice(values);
    }
}

impl Whole {
    /// A tensor's values.
    pub fn get(&self, name: &str) -> &[f32] {
        self.values.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Their names and sizes, in the order of the forward pass.
    pub fn names(&self) -> &[Named] {
        &self.list
    }
}

/// What a checkpoint is made of.
pub struct Snapshot {
    pub params: Whole,
    first: Whole,
    second: Whole,
    /// What each rank had not sent of its gradients, where they are compressed.
    owed: Vec<Vec<f32>>,
    carried: Carried,
}

impl Snapshot {
    /// Writes a checkpoint into the run's folder: where.
    pub fn save(&self, plan: &Plan, run: &Path, step: u64) -> Result<PathBuf, Error> {
        let shape = plan.model.clone();
        let (plan, carried) =
            (serde_json::to_value(plan).unwrap_or(Value::Null), self.carried.clone());
        let head = Head { step, shape, plan, carried };
        let moments = Moments { first: &self.first, second: &self.second };
        Ok(lockstep_ckpt::save_owing(run, &head, &self.params, Some(moments), &self.owed)?)
    }
}

impl Rank<'_> {
    /// The whole state, at the first rank; the others help. All ranks call it.
    pub fn snapshot(&self) -> Result<Option<Snapshot>, Error> {
        let params = self.params()?;
        let first = self.gathered(|block, unit| self.optimizer.moments(block, unit).0)?;
        let second = self.gathered(|block, unit| self.optimizer.moments(block, unit).1)?;
        let owed = self.owed()?;
        Ok(params.zip(first).zip(second).map(|((params, first), second)| Snapshot {
            params,
            first,
            second,
            owed,
            carried: self.carried.clone(),
        }))
    }

    /// What each rank has not sent of its gradients, at the first rank.
    fn owed(&self) -> Result<Vec<Vec<f32>>, Error> {
        if self.plan.comm.compression == Compression::None {
            return Ok(vec![]);
        }
        let mine = self.store.reduction.owed();
        let mut lengths = vec![0i64; self.group.size()];
        self.group.all_gather(&[mine.len() as i64], &mut lengths)?;
        if self.group.rank() != 0 {
            self.group.send(&mine, 0)?;
            return Ok(vec![]);
        }
        let mut all = vec![mine];
        for (rank, len) in lengths.into_iter().enumerate().skip(1) {
            let mut theirs = vec![0.0; len as usize];
            self.group.receive(&mut theirs, rank)?;
            all.push(theirs);
        }
        Ok(all)
    }

    /// All parameters, at the first rank; the others help. All ranks call it.
    pub fn params(&self) -> Result<Option<Whole>, Error> {
        self.gathered(|block, unit| self.store.weights.own(block, unit))
    }

    /// Takes over the moments of a checkpoint, and what was not sent, if it has them.
    pub(crate) fn load_moments(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        if let Some(owed) = checkpoint.owed(self.group.rank())? {
            let Store { reduction, gradients, .. } = &mut self.store;
            if !reduction.owe(&self.device, &self.peers, gradients, &owed) {
                tracing::warn!(
                    "the checkpoint is of another layout: what its ranks had not sent of their \
                     gradients is left out, one step's rounding or selection"
                );
            }
        }
        let Some(moments) = checkpoint.moments() else { return Ok(()) };
        let mut values = Vec::new();
        for (block, unit, piece) in pieces(&self.model.part) {
            let (first, second) = self.optimizer.moments_mut(block, unit);
            for (from, to) in [(moments.first, first), (moments.second, second)] {
                values.resize(piece.whole_len, 0.0);
                from.read(&piece.name, &mut values);
                for (whole, here, len) in &piece.runs {
                    let to = to.view_mut().part(*here..here + len);
                    self.device.write(to, &values[*whole..whole + len]);
                }
            }
        }
        Ok(())
    }

    /// Tensors of which each rank has pieces, put together at the first rank.
    fn gathered<'b>(
        &'b self,
        own: impl Fn(usize, usize) -> View<'b>,
    ) -> Result<Option<Whole>, Error> {
        // What this rank speaks for, piece after piece.
        let mut mine = Vec::new();
        for (block, unit, piece) in pieces(&self.model.part).into_iter().filter(|(.., p)| p.speaks)
        {
            let own = own(block, unit);
            for (_, here, len) in &piece.runs {
                let start = mine.len();
                mine.resize(start + len, 0.0);
                self.device.read(own.part(*here..here + len), &mut mine[start..]);
            }
        }
        if self.group.rank() != 0 {
            self.group.send(&mine, 0)?;
            return Ok(None);
        }
        let list = params_of(&self.plan.model);
        let mut values: HashMap<String, Vec<f32>> =
            list.iter().map(|named| (named.name.clone(), vec![0.0; named.len()])).collect();
        for rank in 0..self.group.size() {
            let part = self.plan.part(rank);
            let theirs: Vec<Piece> =
                pieces(&part).into_iter().map(|(.., piece)| piece).filter(|p| p.speaks).collect();
            if rank > 0 {
                let len = theirs.iter().flat_map(|piece| &piece.runs).map(|(.., len)| len).sum();
                mine.resize(len, 0.0);
                self.group.receive(&mut mine, rank)?;
            }
            let mut at = 0;
            for piece in theirs {
                let whole =
                    values.get_mut(&piece.name).expect("every rank has this model's tensors");
                for (start, _, len) in piece.runs {
                    whole[start..start + len].copy_from_slice(&mine[at..at + len]);
                    at += len;
                }
            }
        }
        Ok(Some(Whole { list, values }))
    }

    /// Whether all that hold the same parameters hold the same bits.
    pub(crate) fn check_equal(&self) -> Result<(), Error> {
        let mut hashes = [0u64; 2];
        let part = &self.model.part;
        for (block, units) in part.held.iter().enumerate() {
            for (unit, held) in units.iter().enumerate() {
                let hash = &mut hashes[usize::from(held.unit.expert)];
                let own = self.store.weights.own(block, unit);
                *hash = own.host::<f32>().iter().fold(*hash, |hash, value| {
                    (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
                });
            }
        }
        use lockstep_plan::Circle::{Copies, ExpertCopies};
        for (circle, hash) in [Copies, ExpertCopies].into_iter().zip(hashes) {
            let group = self.peers.circle(circle);
            let mut all = vec![0i64; group.size()];
            group.all_gather(&[hash as i64], &mut all)?;
            if let Some(other) = all.iter().position(|other| *other != all[0]) {
                return Err(Error::Mistake(format!(
                    "rank {} starts from other parameters than rank {}; give all ranks the same \
                     run file, seed and checkpoint",
                    group.members()[other],
                    group.members()[0]
                )));
            }
        }
        Ok(())
    }
}

/// A parameter, or what a rank has of it in one unit.
struct Piece {
    /// The whole tensor's, with its elements.
    name: String,
    whole_len: usize,
    /// Whether this rank is the one to tell it.
    speaks: bool,
    /// Where each run lies in the whole tensor and in this rank's run of the unit, and how long it is.
    runs: Vec<(usize, usize, usize)>,
}

/// All pieces of a rank: block, unit, piece.
fn pieces(part: &Part) -> Vec<(usize, usize, Piece)> {
    let mut all = Vec::new();
    for (block, (params, units)) in part.blocks.iter().zip(&part.held).enumerate() {
        for (unit, held) in units.iter().enumerate() {
            for (start, param) in params.placed() {
                let overlap = |(whole, run): (usize, std::ops::Range<usize>)| {
                    let first = start + run.start;
                    let here = held.within(first..start + run.end)?;
                    Some((whole + held.own.start + here.start - first, here.start, here.len()))
                };
                let runs: Vec<_> = param.runs().filter_map(overlap).collect();
                if !runs.is_empty() {
                    let name = param.whole.name.clone();
                    let whole_len = param.whole.dims.iter().product();
                    let speaks = part.speaks_for(param);
                    all.push((block, unit, Piece { name, whole_len, speaks, runs }));
                }
            }
        }
    }
    all
}

/// A rank's piece of the parameters of a checkpoint or of any other list of tensors.
pub fn load_weights(
    device: &Device,
    part: &Part,
    dtype: Dtype,
    zero: u8,
    from: &dyn Tensors,
) -> Weights {
    Weights::load(device, part, dtype, zero, |param, out| from.read(&param.whole.name, out))
}

/// The same of a whole model, for a rank by itself.
pub fn load_whole(device: &Device, shape: &Shape, dtype: Dtype, from: &dyn Tensors) -> Weights {
    load_weights(device, &Part::whole(shape), dtype, 0, from)
}
