//! A word that all ranks exchange after every step, so that what one of them knows, all of them act upon at the
//! same step. Never waits for anything but the others' word, and carries no data: it says what is to be done.

use lockstep_comm::{Group, Op};

use crate::Error;

/// What a rank says; what any rank says, all ranks hear. A new thing to say is one more field.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Flags {
    /// Some rank is still at work on a checkpoint's files.
    pub writing: bool,
    /// Some rank's work on the checkpoint has failed.
    pub failed: bool,
    /// Some rank was asked to stop.
    pub stop: bool,
}

impl Flags {
    fn flags(self) -> [i64; 3] {
        [self.writing, self.failed, self.stop].map(i64::from)
    }

    fn of(flags: [i64; 3]) -> Flags {
        let [writing, failed, stop] = flags.map(|flag| flag > 0);
        Flags { writing, failed, stop }
    }
}

/// The word of all ranks together. All of them call it, after the same step.
///
/// One all-reduce of a few bytes.
pub fn agree(group: &Group, mine: Flags) -> Result<Flags, Error> {
    let mut flags = mine.flags();
    group.all_reduce(&mut flags, Op::Max)?;
    Ok(Flags::of(flags))
}

/// The trouble of the lowest rank that has any, told to all: which rank, and what. All ranks call it.
///
/// An all-gather of a number, and a broadcast of the text where there is one.
pub fn first_error(group: &Group, mine: Option<String>) -> Result<Option<(usize, String)>, Error> {
    let mine = mine.map(String::into_bytes);
    // A text without words is trouble too.
    let said = mine.as_ref().map_or(0, |text| text.len() as i64 + 1);
    let mut lengths = vec![0; group.size()];
    group.all_gather(&[said], &mut lengths)?;
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
    fn what_one_says_all_hear() {
        let none = Flags::default();
        for (said, word) in [
            (none, none),
            (Flags { writing: true, ..none }, Flags { writing: true, ..none }),
            (Flags { failed: true, ..none }, Flags { failed: true, ..none }),
            (Flags { stop: true, ..none }, Flags { stop: true, ..none }),
        ] {
            let heard = on_threads(3, |world| {
                agree(&world, if world.rank() == 1 { said } else { none }).unwrap()
            });
            assert_eq!(heard, [word; 3]);
        }
    }

    #[test]
    fn the_first_trouble_is_known_to_all() {
        let told = |troubled: &[usize]| {
            on_threads(3, |world| {
                let rank = world.rank();
                let mine = troubled.contains(&rank).then(|| format!("of {rank}"));
                first_error(&world, mine).unwrap()
            })
        };
        assert_eq!(told(&[]), [None, None, None]);
        for troubled in [&[0][..], &[2], &[1, 2]] {
            let first = Some((troubled[0], format!("of {}", troubled[0])));
            assert_eq!(told(troubled), [first.clone(), first.clone(), first]);
        }
    }
}
