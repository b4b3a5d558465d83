//! Comparison of replicas: ranks that must hold the same parameters compare a checksum of them, before the first step
//! and regularly after it. A difference means that a machine computed or transferred something wrong; without the
//! comparison, replicas would drift apart unnoticed. Does not decide what to do about it.

use lockstep_kernels::View;
use lockstep_plan::GroupKind;

use crate::agree::first_error;
use crate::{Error, Rank};

/// Steps between two comparisons. One takes a pass over the parameters, so it costs less than a thousandth of the steps.
pub(crate) const COMPARE_EVERY: u64 = 100;

/// Multiplier of a checksum before it is continued.
const MIX: u64 = 0x517c_c1b7_2722_0a95;

impl Rank<'_> {
    /// A description of replicas whose parameters differ, the same on all ranks. Collective.
    ///
    /// Up to four all-gathers and one of 8 bytes per rank.
    pub(crate) fn find_different_replicas(&self) -> Result<Option<String>, Error> {
        let mut mine = None;
        for (kind, checksum) in self.replica_checksums() {
            let group = self.groups.group(kind);
            let mut all = vec![0i64; group.size()];
            group.all_gather(&[checksum as i64], &mut all)?;
            mine = mine.or_else(|| difference(&all, group.members()));
        }
        Ok(first_error(self.group, mine)?.map(|(_, what)| what))
    }

    /// Fails if replicas have different parameters after a step. Collective.
    pub(crate) fn check_replicas(&self, step: u64) -> Result<(), Error> {
        match self.find_different_replicas()? {
            Some(what) => Err(Error::Diverged { step, what }),
            None => Ok(()),
        }
    }

    /// Checksums of this rank's parameters: of its shards, which its copies share, and of the whole blocks in the
    /// compute type, unless they are gathered for each pass. 0 where a rank has nobody to compare with.
    fn replica_checksums(&self) -> [(GroupKind, u64); 4] {
        use GroupKind::{Copies, ExpertCopies, ExpertShard, Shard};
        let compared = |kind| self.groups.group(kind).size() > 1;
        let of_shards = [Copies, ExpertCopies].map(compared);
        let of_blocks = [Shard, ExpertShard].map(compared);
        let (mut shards, mut blocks) = ([0; 2], [0; 2]);
        let continued = |before: u64, values: View<'_>| {
            (before.rotate_left(5) ^ self.device.checksum(values)).wrapping_mul(MIX)
        };
        for (block, units) in self.model.part.shards.iter().enumerate() {
            for (unit, shard) in units.iter().enumerate() {
                let expert = usize::from(shard.unit.expert);
                if of_shards[expert] {
                    shards[expert] = continued(shards[expert], self.store.weights.own(block, unit));
                }
                let full = self.store.weights.get(block).filter(|_| of_blocks[expert]);
                if let Some(full) = full {
                    let whole = full.part(shard.unit.range.clone());
                    blocks[expert] = continued(blocks[expert], whole);
                }
            }
        }
        [
            (Copies, shards[0]),
            (ExpertCopies, shards[1]),
            (Shard, blocks[0]),
            (ExpertShard, blocks[1]),
        ]
    }
}

/// Names the members whose checksum differs from that of the majority; without a majority, all of them.
fn difference(checksums: &[i64], members: &[usize]) -> Option<String> {
    let count = |checksum: &i64| checksums.iter().filter(|other| *other == checksum).count();
    let most = checksums.iter().max_by_key(|checksum| count(checksum))?;
    if count(most) == checksums.len() {
        return None;
    }
    let ranks = |wanted: &dyn Fn(i64) -> bool| -> Vec<usize> {
        let all = checksums.iter().zip(members);
        all.filter(|(checksum, _)| wanted(**checksum)).map(|(_, rank)| *rank).collect()
    };
    if 2 * count(most) <= checksums.len() {
        let all = list(members);
        return Some(format!("{all} are replicas but have different parameters"));
    }
    let (odd, even) = (ranks(&|checksum| checksum != *most), ranks(&|checksum| checksum == *most));
    let verb = if odd.len() == 1 { "has" } else { "have" };
    Some(format!("{} {verb} other parameters than {}, which agree", list(&odd), list(&even)))
}

/// `rank 3`, `ranks 0, 1 and 2`.
fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(|rank| rank.to_string()).collect();
    match names.split_last() {
        Some((last, first)) if !first.is_empty() => {
            format!("ranks {} and {last}", first.join(", "))
        }
        _ => format!("rank {}", names.join("")),
    }
}

#[cfg(test)]
mod tests {
    use super::difference;
    use crate::Rank;
    use lockstep_comm::on_threads;
    use lockstep_data::{Options, Source};
    use lockstep_kernels::Device;
    use lockstep_plan::{Config, Environment, Plan};

    #[test]
    fn the_rank_that_differs_is_named() {
        for (checksums, text) in [
            (&[5, 5, 5][..], None),
            (&[5], None),
            (&[5, 6], Some("ranks 4 and 6 are replicas but have different parameters")),
            (&[5, 5, 7], Some("rank 8 has other parameters than ranks 4 and 6, which agree")),
            (&[7, 5, 5], Some("rank 4 has other parameters than ranks 6 and 8, which agree")),
            (&[5, 7, 5, 8, 5], Some("ranks 6 and 10 have other parameters than ranks 4, 8 and 12")),
            (&[5, 6, 5, 6], Some("ranks 4, 6, 8 and 10 are replicas but have different")),
        ] {
            let found = difference(checksums, &[4, 6, 8, 10, 12][..checksums.len()]);
            let matches = match (&found, text) {
                (Some(found), Some(text)) => found.contains(text),
                (found, text) => found.is_none() && text.is_none(),
            };
            assert!(matches, "{checksums:?}: {found:?}");
        }
    }

    /// Takes a step on three ranks, flips one bit of a parameter on one of them, and compares.
    fn flip_bit(layout: &str, faulty: usize) -> Vec<Option<String>> {
        let source = Source::open("builtin:grammar", &Options::default()).unwrap();
        let text = format!(
            "[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 6\nmicro_batch = 1\n[layout]\n{layout}"
        );
        let environment = Environment::one_host(3, 1).with_vocab(source.vocab());
        let plan = Plan::resolve(&Config::parse(&text, &[]), &environment).unwrap();
        on_threads(3, |world| {
            let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
            rank.step(&source, 1).unwrap();
            assert_eq!(rank.find_different_replicas().unwrap(), None, "{layout}");
            if world.rank() == faulty {
                let mut value = [0.0f32];
                rank.device.read(rank.store.weights.own(1, 0).part(5..6), &mut value);
                let flipped = f32::from_bits(value[0].to_bits() ^ 1);
                let (master, _) = rank.store.weights.own_mut(1, 0);
                rank.device.write(master.part(5..6), &[flipped]);
            }
            rank.find_different_replicas().unwrap()
        })
    }

    #[test]
    fn a_flipped_bit_in_the_weights_of_one_replica_is_found() {
        for layout in ["data = 3", "data = 3\nzero = 1"] {
            for faulty in [0, 2] {
                for found in flip_bit(layout, faulty) {
                    let text = found.expect("a difference");
                    let name = format!("rank {faulty} has other parameters");
                    assert!(text.starts_with(&name), "{layout}: {text}");
                }
            }
        }
    }
}
