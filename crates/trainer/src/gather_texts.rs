//! Words of all ranks, known to all.

use lockstep_comm::Group;

use crate::Error;

/// What each rank says, in the order of the ranks. All of them call it.
///
/// Two all-gathers: of the lengths, and of texts as long as the longest.
pub(crate) fn gather_texts(group: &Group, mine: &str) -> Result<Vec<String>, Error> {
    let mut lengths = vec![0; group.size()];
    group.all_gather(&[mine.len() as i64], &mut lengths)?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    if longest == 0 {
        return Ok(vec![String::new(); group.size()]);
    }
    let mut padded = mine.as_bytes().to_vec();
    padded.resize(longest, 0);
    let mut all = vec![0; longest * group.size()];
    group.all_gather(&padded, &mut all)?;
    let text = |(text, len): (&[u8], i64)| String::from_utf8_lossy(&text[..len as usize]).into();
    Ok(all.chunks_exact(longest).zip(lengths).map(text).collect())
}

#[cfg(test)]
mod tests {
    use super::gather_texts;
    use lockstep_comm::on_threads;

    #[test]
    fn everybody_hears_everybody() {
        for said in [["", "", ""], ["", "ü", ""], ["one", "", "three, at length"]] {
            let heard = on_threads(3, |world| gather_texts(&world, said[world.rank()]).unwrap());
            assert_eq!(heard, [said, said, said]);
        }
    }
}
