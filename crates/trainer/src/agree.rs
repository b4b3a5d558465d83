//! Flags and errors that all ranks exchange, so that all of them react at the same step. Carries no tensors.

use lockstep_comm::{Group, Op};

use crate::Error;

/// Flags of one rank, or the union over all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Flags {
    /// A rank is still writing checkpoint files.
    pub writing: bool,
    /// A rank failed to write its part of the checkpoint.
    pub failed: bool,
    /// A rank was asked to stop.
    pub stop: bool,
    /// Steps of a timeline that was asked for; 0 for none.
    pub trace: u64,
}

impl Flags {
    fn to_array(self) -> [i64; 4] {
        let [writing, failed, stop] = [self.writing, self.failed, self.stop].map(i64::from);
        [writing, failed, stop, self.trace as i64]
    }

    fn from_array([writing, failed, stop, trace]: [i64; 4]) -> Flags {
        let [writing, failed, stop] = [writing, failed, stop].map(|flag| flag > 0);
        Flags { writing, failed, stop, trace: trace as u64 }
    }
}

/// Combines the flags of all ranks: each flag is set if any rank set it. Collective.
///
/// One all-reduce of 32 bytes.
pub fn agree(group: &Group, mine: Flags) -> Result<Flags, Error> {
    let mut flags = mine.to_array();
    group.all_reduce(&mut flags, Op::Max)?;
    Ok(Flags::from_array(flags))
}

/// Error of the lowest rank that has one, with that rank, on all ranks. Collective.
///
/// One all-gather of 8 bytes, and a broadcast of the text if there is an error.
pub fn first_error(group: &Group, mine: Option<String>) -> Result<Option<(usize, String)>, Error> {
    let mine = mine.map(String::into_bytes);
    // 0 means no error; an empty text is an error, too.
    let coded_len = mine.as_ref().map_or(0, |text| text.len() as i64 + 1);
    let mut lengths = vec![0; group.size()];
    group.all_gather(&[coded_len], &mut lengths)?;
    let Some(rank) = lengths.iter().position(|len| *len > 0) else { return Ok(None) };
    let mut text = match mine {
        Some(text) if rank == group.rank() => text,
        _ => vec![0; lengths[rank] as usize - 1],
    };
    group.broadcast(&mut text, rank)?;
    Ok(Some((rank, String::from_utf8_lossy(&text).into_owned())))
}

#[cfg(test)]
mod tests {
    use super::{Flags, agree, first_error};
    use lockstep_comm::on_threads;

    #[test]
    fn a_flag_of_one_rank_is_set_on_all() {
        let none = Flags::default();
        for flags in [
            none,
            Flags { writing: true, ..none },
            Flags { failed: true, ..none },
            Flags { stop: true, ..none },
            Flags { trace: 3, ..none },
        ] {
            let agreed = on_threads(3, |world| {
                agree(&world, if world.rank() == 1 { flags } else { none }).unwrap()
            });
            assert_eq!(agreed, [flags; 3]);
        }
    }

    #[test]
    fn the_first_error_reaches_all_ranks() {
        let errors = |failing: &[usize]| {
            on_threads(3, |world| {
                let rank = world.rank();
                let mine = failing.contains(&rank).then(|| format!("error of {rank}"));
                first_error(&world, mine).unwrap()
            })
        };
        assert_eq!(errors(&[]), [None, None, None]);
        for failing in [&[0][..], &[2], &[1, 2]] {
            let first = Some((failing[0], format!("error of {}", failing[0])));
            assert_eq!(errors(failing), [first.clone(), first.clone(), first]);
        }
    }
}
