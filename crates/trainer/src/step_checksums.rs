//! Checksums of the values that a rank computes in a step. If two replays of a step have different checksums, a machine
//! computed a wrong result. Changes no state, and does not reduce gradients, so that an error stays on its rank.

use lockstep_data::Source;
use lockstep_plan::model::Part;

use crate::gather_texts::gather_texts;
use crate::{Error, Rank, train_sample};

/// Checksums of one rank in one step.
pub(crate) struct StepChecksums {
    values: Vec<Checksum>,
    /// Samples of the global batch with a loss that is not finite.
    pub bad_samples: Vec<usize>,
}

struct Checksum {
    /// Position in the computation, comparable between ranks.
    order: i64,
    place: String,
    checksum: u64,
}

/// First difference between two replays of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divergence {
    /// Ranks that differ first; several if they compute the value together.
    pub ranks: Vec<usize>,
    pub place: String,
}

impl Rank<'_> {
    /// Runs forward and backward of a step and records checksums. Collective.
    pub(crate) fn step_checksums(
        &mut self,
        source: &Source,
        step: u64,
    ) -> Result<StepChecksums, Error> {
        let whole = Part::whole(self.plan.model.blocks());
        let names: Vec<String> = self.model.part.blocks.iter().map(|b| b.name.clone()).collect();
        let index = |name: &str| whole.blocks.iter().position(|block| block.name == name);
        let indices: Vec<i64> =
            names.iter().map(|name| index(name).expect("a block of this model") as i64).collect();
        let device = self.device.clone();
        let (mut values, mut bad_samples) = (Vec::new(), Vec::new());

        for micro in 0..self.plan.train.accumulation {
            let order = |index: i64| (micro as i64 + 1) * ORDER_STRIDE + index;
            let in_micro_batch = |what: &str| format!("{what}, micro-batch {micro}");
            let first = train_sample(self.plan, step, self.first_sample(micro));
            let losses = self.infer(source, first, micro, |_, block, x| {
                let place = in_micro_batch(&format!("{} (its output)", names[block]));
                let checksum = device.checksum(x.view());
                values.push(Checksum { order: order(indices[block]), place, checksum });
            })?;
            let Some(losses) = losses else { continue };
            let (place, checksum) = (in_micro_batch("the loss"), device.checksum(losses.view()));
            values.push(Checksum { order: order(whole.blocks.len() as i64), place, checksum });
            let losses: Vec<f32> = device.to_vec(losses.view());
            let mut rest = &losses[..];
            // Layout: (runs of positions, sequences of the micro-batch, positions of the run).
            for run in self.plan.runs(self.group.rank()) {
                for row in 0..self.plan.train.micro_batch {
                    let (losses, tail) = rest.split_at(run.len);
                    rest = tail;
                    if losses.iter().any(|loss| !loss.is_finite()) {
                        bad_samples.push(first.index + row);
                    }
                }
            }
        }
        self.groups.check()?;

        // Again with backward; gradients are not reduced.
        self.unreduced_passes(source, step)?;
        let last = (self.plan.train.accumulation as i64 + 2) * ORDER_STRIDE;
        for (block, name) in names.iter().enumerate().rev() {
            let Some(gradient) = self.store.gradients.get(block) else { continue };
            let place = format!("{name} (its gradient)");
            let checksum = device.checksum(gradient);
            values.push(Checksum { order: last - indices[block], place, checksum });
        }
        self.store.clear();
        Ok(StepChecksums { values, bad_samples })
    }

    /// First difference between two replays on any rank. Collective.
    pub(crate) fn divergence(
        &self,
        one: &StepChecksums,
        other: &StepChecksums,
    ) -> Result<Option<Divergence>, Error> {
        let mut pairs = one.values.iter().zip(&other.values);
        let mine = pairs.find(|(one, other)| one.checksum != other.checksum).map(|(one, _)| one);
        let mut orders = vec![0; self.group.size()];
        self.group.all_gather(&[mine.map_or(i64::MAX, |first| first.order)], &mut orders)?;
        let places = gather_texts(self.group, mine.map_or("", |first| &first.place))?;
        Ok(first_divergence(&orders, &places))
    }

    /// Sorted samples of all ranks whose loss is not finite. Collective.
    pub(crate) fn bad_samples(&self, checksums: &StepChecksums) -> Result<Vec<usize>, Error> {
        let mine = checksums.bad_samples.iter().map(|sample| sample.to_string());
        let mine: Vec<String> = mine.collect();
        let texts = gather_texts(self.group, &mine.join(" "))?;
        let mut all: Vec<usize> = texts
            .iter()
            .flat_map(|text| text.split(' ').filter_map(|sample| sample.parse().ok()))
            .collect();
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }
}

/// Larger than the number of blocks of any model.
const ORDER_STRIDE: i64 = 1 << 24;

fn first_divergence(orders: &[i64], places: &[String]) -> Option<Divergence> {
    let first = *orders.iter().min().filter(|first| **first < i64::MAX)?;
    let ranks: Vec<usize> = (0..orders.len()).filter(|rank| orders[*rank] == first).collect();
    let place = places[ranks[0]].clone();
    Some(Divergence { ranks, place })
}

#[cfg(test)]
mod tests {
    use super::{Divergence, first_divergence};
    use crate::Rank;
    use lockstep_comm::on_threads;
    use lockstep_data::{Options, Source};
    use lockstep_kernels::Device;
    use lockstep_plan::{Config, Environment, Plan};

    /// Divergence of two replays between which one bit of a parameter is flipped on one rank.
    fn flip_bit(layout: &str, faulty: usize, block: usize) -> Divergence {
        let source = Source::open("builtin:grammar", &Options::default()).unwrap();
        let text = format!(
            "[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 4\nmicro_batch = 1\n[layout]\n{layout}"
        );
        let environment = Environment::one_host(2, 1).with_vocab(source.vocab());
        let plan = Plan::resolve(&Config::parse(&text, &[]), &environment).unwrap();
        let mut divergences = on_threads(2, |world| {
            let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
            let [one, same] = [(); 2].map(|()| rank.step_checksums(&source, 1).unwrap());
            assert_eq!(rank.divergence(&one, &same).unwrap(), None, "{layout}");
            if world.rank() == faulty {
                let mut value = [0.0f32];
                rank.device.read(rank.store.weights.own(block, 0).part(5..6), &mut value);
                let flipped = f32::from_bits(value[0].to_bits() ^ (1 << 20));
                let (master, _) = rank.store.weights.own_mut(block, 0);
                rank.device.write(master.part(5..6), &[flipped]);
            }
            let other = rank.step_checksums(&source, 1).unwrap();
            rank.divergence(&one, &other).unwrap().expect("a difference")
        });
        assert_eq!(divergences[0], divergences[1], "{layout}");
        divergences.remove(0)
    }

    #[test]
    fn a_flipped_bit_is_located_by_rank_and_layer() {
        for (layout, faulty, block, ranks, place) in [
            ("data = 2", 1, 2, vec![1], "layers.1 (its output)"),
            ("data = 2", 0, 1, vec![0], "layers.0 (its output)"),
            // Later stages differ, too, but only as a consequence.
            ("pipe = 2", 0, 1, vec![0], "layers.0 (its output)"),
            ("pipe = 2", 1, 0, vec![1], "layers.1 (its output)"),
            // The output is all-reduced, so both ranks differ.
            ("tensor = 2", 1, 2, vec![0, 1], "layers.1 (its output)"),
        ] {
            let place = format!("{place}, micro-batch 0");
            assert_eq!(flip_bit(layout, faulty, block), Divergence { ranks, place }, "{layout}");
        }
    }

    #[test]
    fn the_ranks_with_the_lowest_order_are_reported() {
        let places = ["", "layers.1", "layers.1", "head"].map(String::from);
        assert_eq!(first_divergence(&[i64::MAX; 4], &places), None);
        let first = |orders| first_divergence(orders, &places).unwrap();
        assert_eq!(
            first(&[i64::MAX, 7, 7, 9]),
            Divergence { ranks: vec![1, 2], place: "layers.1".into() }
        );
        assert_eq!(
            first(&[i64::MAX, 8, 7, 3]),
            Divergence { ranks: vec![3], place: "head".into() }
        );
    }
}
