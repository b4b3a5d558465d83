//! All-gather of texts of different lengths.

use lockstep_comm::Group;

use crate::Error;

/// Texts of all ranks, in rank order. Collective.
///
/// Two all-gathers: the lengths, then the texts padded to the longest.
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
    fn all_ranks_get_all_texts() {
        for texts in [["", "", ""], ["", "ü", ""], ["one", "", "three, at length"]] {
            let all = on_threads(3, |world| gather_texts(&world, texts[world.rank()]).unwrap());
            assert_eq!(all, [texts; 3]);
        }
    }
}
