//! What a rank computed in a step, in checksums: two traces of one step differ where a machine computed something
//! else the second time. Changes nothing, and sums nothing over the ranks, so that what is wrong on one of them
//! stays there as long as it can.

use half::bf16;
use lockstep_data::{Source, Split};
use lockstep_kernels::{Device, Dtype, Element, View};
use lockstep_plan::model::Part;

use crate::gather_texts::gather_texts;
use crate::{Error, Rank};

/// One rank's way through a step.
pub(crate) struct Trace {
    seen: Vec<Seen>,
    /// Samples of the global batch with a loss that is not finite.
    pub bad: Vec<usize>,
}

struct Seen {
    /// Which comes before which, whatever the rank.
    order: i64,
    what: String,
    checksum: u64,
}

/// Where the ranks' two traces part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divergence {
    /// Those that differ first; several where they compute it together, or exchange it.
    pub ranks: Vec<usize>,
    pub place: String,
}

impl Rank<'_> {
    /// Does a step's passes and remembers what came out. All ranks call it.
    pub(crate) fn trace(&mut self, source: &Source, step: u64) -> Result<Trace, Error> {
        let whole = Part::whole(self.plan.model.blocks());
        let names: Vec<String> = self.model.part.blocks.iter().map(|b| b.name.clone()).collect();
        let place = |name: &str| whole.blocks.iter().position(|block| block.name == name);
        let places: Vec<i64> =
            names.iter().map(|name| place(name).expect("a block of this model") as i64).collect();
        let (device, mut seen, mut bad) = (self.device.clone(), Vec::new(), Vec::new());

        for micro in 0..self.plan.train.accumulation {
            let order = |place: i64| (micro as i64 + 1) * STEP + place;
            let told = |what: &str| format!("{what}, micro-batch {micro}");
            let losses = self.infer(source, Split::Train, step, micro, |_, block, x| {
                let what = told(&format!("{} (its output)", names[block]));
                seen.push(Seen {
                    order: order(places[block]),
                    what,
                    checksum: checksum(&device, x.view()),
                });
            })?;
            let Some(losses) = losses else { continue };
            let (what, checksum) = (told("the loss"), checksum(&device, losses.view()));
            seen.push(Seen { order: order(whole.blocks.len() as i64), what, checksum });
            let first = self.first_sample(micro);
            let losses = read::<f32>(&device, losses.view());
            let mut values = &losses[..];
            // Run after run of positions, and in each all sequences of the micro-batch.
            for run in self.plan.runs(self.group.rank()) {
                for row in 0..self.plan.train.micro_batch {
                    let (own, rest) = values.split_at(run.len);
                    values = rest;
                    if own.iter().any(|loss| !loss.is_finite()) {
                        bad.push(first + row);
                    }
                }
            }
        }
        self.groups.check()?;

        // Once more to the gradients, which stay each rank's own.
        self.unsummed(source, step)?;
        let last = (self.plan.train.accumulation as i64 + 2) * STEP;
        for (block, name) in names.iter().enumerate().rev() {
            let Some(gradient) = self.store.gradients.get(block) else { continue };
            let what = format!("{name} (its gradient)");
            seen.push(Seen {
                order: last - places[block],
                what,
                checksum: checksum(&device, gradient),
            });
        }
        self.store.clear();
        Ok(Trace { seen, bad })
    }

    /// Where two traces of the same step part, on whichever rank they do first. All ranks call it.
    pub(crate) fn parting(&self, one: &Trace, other: &Trace) -> Result<Option<Divergence>, Error> {
        let mut pairs = one.seen.iter().zip(&other.seen);
        let mine = pairs.find(|(one, other)| one.checksum != other.checksum).map(|(one, _)| one);
        let mut orders = vec![0; self.group.size()];
        self.group.all_gather(&[mine.map_or(i64::MAX, |seen| seen.order)], &mut orders)?;
        let said = gather_texts(self.group, mine.map_or("", |seen| &seen.what))?;
        Ok(first_of(&orders, &said))
    }

    /// The samples of all ranks whose loss is not finite, in order. All ranks call it.
    pub(crate) fn bad_samples(&self, trace: &Trace) -> Result<Vec<usize>, Error> {
        let mine: Vec<String> = trace.bad.iter().map(|sample| sample.to_string()).collect();
        let said = gather_texts(self.group, &mine.join(" "))?;
        let mut all: Vec<usize> = said
            .iter()
            .flat_map(|text| text.split(' ').filter_map(|sample| sample.parse().ok()))
            .collect();
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }
}

/// More than a model has blocks.
const STEP: i64 = 1 << 24;

fn first_of(orders: &[i64], said: &[String]) -> Option<Divergence> {
    let first = *orders.iter().min().filter(|first| **first < i64::MAX)?;
    let ranks: Vec<usize> = (0..orders.len()).filter(|rank| orders[*rank] == first).collect();
    let place = said[ranks[0]].clone();
    Some(Divergence { ranks, place })
}

/// A checksum that depends on every bit.
fn checksum(device: &Device, values: View<'_>) -> u64 {
    let mix = |sum: u64, bits: u64| (sum.rotate_left(5) ^ bits).wrapping_mul(0x517c_c1b7_2722_0a95);
    match values.dtype() {
        Dtype::Bf16 => {
            let values = read::<bf16>(device, values);
            values.iter().fold(0, |sum, value| mix(sum, value.to_bits().into()))
        }
        _ => {
            let values = read::<f32>(device, values);
            values.iter().fold(0, |sum, value| mix(sum, value.to_bits().into()))
        }
    }
}

fn read<E: Element>(device: &Device, view: View<'_>) -> Vec<E> {
    let mut values = vec![E::default(); view.len()];
    device.read(view, &mut values);
    values
}

#[cfg(test)]
mod tests {
    use super::{Divergence, first_of};
    use crate::Rank;
    use lockstep_comm::on_threads;
    use lockstep_data::{Options, Source};
    use lockstep_kernels::Device;
    use lockstep_plan::{Config, Environment, Plan};

    /// Where two traces part between which a bit of one rank's memory has turned over.
    fn parting(layout: &str, guilty: usize, block: usize) -> Divergence {
        let source = Source::open("builtin:grammar", &Options::default()).unwrap();
        let text = format!(
            "[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 4\nmicro_batch = 1\n[layout]\n{layout}"
        );
        let around = Environment::one_host(2, 1).with_vocab(source.vocab());
        let plan = Plan::resolve(&Config::parse(&text, &[]), &around).unwrap();
        let mut told = on_threads(2, |world| {
            let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
            let [one, same] = [(); 2].map(|()| rank.trace(&source, 1).unwrap());
            assert_eq!(rank.parting(&one, &same).unwrap(), None, "{layout}");
            if world.rank() == guilty {
                let mut value = [0.0f32];
                rank.device.read(rank.store.weights.own(block, 0).part(5..6), &mut value);
                let flipped = f32::from_bits(value[0].to_bits() ^ (1 << 20));
                let (master, _) = rank.store.weights.own_mut(block, 0);
                rank.device.write(master.part(5..6), &[flipped]);
            }
            let other = rank.trace(&source, 1).unwrap();
            rank.parting(&one, &other).unwrap().expect("they differ")
        });
        assert_eq!(told[0], told[1], "{layout}: all ranks say the same");
        told.remove(0)
    }

    #[test]
    fn a_bit_that_turned_over_names_rank_and_layer() {
        for (layout, guilty, block, ranks, place) in [
            ("data = 2", 1, 2, vec![1], "layers.1 (its output)"),
            ("data = 2", 0, 1, vec![0], "layers.0 (its output)"),
            // What follows on later stages is no cause.
            ("pipe = 2", 0, 1, vec![0], "layers.0 (its output)"),
            ("pipe = 2", 1, 0, vec![1], "layers.1 (its output)"),
            // Both add to what both then have.
            ("tensor = 2", 1, 2, vec![0, 1], "layers.1 (its output)"),
        ] {
            let place = format!("{place}, micro-batch 0");
            assert_eq!(parting(layout, guilty, block), Divergence { ranks, place }, "{layout}");
        }
    }

    #[test]
    fn the_first_to_part_are_named() {
        let said = ["", "layers.1", "layers.1", "head"].map(String::from);
        assert_eq!(first_of(&[i64::MAX; 4], &said), None);
        let named = |orders| first_of(orders, &said).unwrap();
        assert_eq!(
            named(&[i64::MAX, 7, 7, 9]),
            Divergence { ranks: vec![1, 2], place: "layers.1".into() }
        );
        assert_eq!(
            named(&[i64::MAX, 8, 7, 3]),
            Divergence { ranks: vec![3], place: "head".into() }
        );
    }
}
