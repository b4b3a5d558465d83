//! Small collectives on values: errors, texts, counts and sums that do not depend on the number of ranks.

use lockstep_comm::{Group, Op};

use crate::error::{Error, Result};

/// Returns the value if all ranks succeeded. Otherwise every rank fails: with its own error, or with that of the lowest
/// rank that has one. Collective.
///
/// One all-gather of 8 bytes, and a broadcast of the text if there is an error.
pub fn all_succeed<T>(group: &Group, mine: Result<T>) -> Result<T> {
    if group.size() == 1 {
        return mine;
    }
    let text = mine.as_ref().err().map(|error| error.to_string().into_bytes());
    // 0 means no error; an empty text is an error, too.
    let coded_len = text.as_ref().map_or(0, |text| text.len() as i64 + 1);
    let mut lengths = vec![0; group.size()];
    group.all_gather(&[coded_len], &mut lengths)?;
    let Some(rank) = lengths.iter().position(|len| *len > 0) else { return mine };
    let mut text = match text {
        Some(text) if rank == group.rank() => text,
        _ => vec![0; lengths[rank] as usize - 1],
    };
    group.broadcast(&mut text, rank)?;
    mine.and_then(|_| {
        Err(Error::OtherRank { rank, what: String::from_utf8_lossy(&text).into_owned() })
    })
}

/// One value per rank, on all ranks. Collective: one all-gather of 8 bytes.
pub fn gather_counts(group: &Group, mine: u64) -> Result<Vec<u64>> {
    let mut all = vec![0i64; group.size()];
    group.all_gather(&[mine as i64], &mut all)?;
    Ok(all.into_iter().map(|count| count as u64).collect())
}

/// The bytes of each rank, on all ranks. Collective: one all-gather of lengths and one of buffers that are padded to the
/// longest.
pub fn gather_bytes(group: &Group, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let lengths = gather_counts(group, mine.len() as u64)?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    let mut padded = mine.to_vec();
    padded.resize(longest, 0);
    let mut all = vec![0; longest * group.size()];
    group.all_gather(&padded, &mut all)?;
    let piece = |(rank, len): (usize, &u64)| all[rank * longest..][..*len as usize].to_vec();
    Ok(lengths.iter().enumerate().map(piece).collect())
}

/// Sum of nonnegative terms of all ranks, independent of their order and of the number of ranks: terms are rounded to
/// multiples of a power of two that the largest term and the number of terms determine. NaN if a term is not finite.
/// Collective: two all-reduces of 16 bytes.
pub fn exact_sum(group: &Group, terms: &mut dyn Iterator<Item = f64>) -> Result<f64> {
    let terms: Vec<f64> = terms.collect();
    // A maximum of NaN would be NaN on all ranks as well, but infinity is as bad.
    let largest = terms.iter().fold(0.0f64, |max, term| if max >= *term { max } else { *term });
    let finite = terms.iter().all(|term| term.is_finite());
    let mut bounds = [if finite { largest } else { f64::INFINITY }, 0.0];
    group.all_reduce(&mut bounds, Op::Max)?;
    let mut count = [terms.len() as i64];
    group.all_reduce(&mut count, Op::Sum)?;
    if bounds[0] == 0.0 || count[0] == 0 {
        return Ok(0.0);
    }
    if !bounds[0].is_finite() {
        return Ok(f64::NAN);
    }
    let scale = power_of_two_below((1i64 << 61) as f64 / (bounds[0] * count[0] as f64));
    let mut sum = [terms.iter().map(|term| (term * scale).round() as i64).sum::<i64>()];
    group.all_reduce(&mut sum, Op::Sum)?;
    Ok(sum[0] as f64 / scale)
}

/// The largest power of two that is at most `x`, within the range of normal numbers.
pub fn power_of_two_below(x: f64) -> f64 {
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i64 - 1023;
    let exponent = if x.is_infinite() { 1000 } else { exponent.clamp(-1000, 1000) };
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::on_threads;

    #[test]
    fn powers_of_two() {
        for (x, expected) in [(1.0, 1.0), (1.5, 1.0), (4.0, 4.0), (0.3, 0.25), (1e9, 536870912.0)] {
            assert_eq!(power_of_two_below(x), expected);
        }
    }

    #[test]
    fn a_sum_has_the_same_bits_for_any_number_of_ranks() {
        let terms: Vec<f64> = (1..1000).map(|i| (i as f64).sqrt() * 1e-3).collect();
        let sum = |ranks: usize| {
            on_threads(ranks, |world| {
                let range = lockstep_comm::shard_range(terms.len(), ranks, world.rank());
                exact_sum(&world, &mut terms[range].iter().copied()).unwrap()
            })
        };
        let alone = sum(1)[0];
        assert!((alone - terms.iter().sum::<f64>()).abs() < 1e-9);
        for ranks in [2, 3, 5] {
            assert!(sum(ranks).iter().all(|sum| sum.to_bits() == alone.to_bits()));
        }
    }

    #[test]
    fn an_error_of_one_rank_reaches_all() {
        let ends = on_threads(3, |world| {
            let mine = match world.rank() {
                1 => Err(Error::Input("bad".into())),
                _ => Ok(()),
            };
            all_succeed(&world, mine).unwrap_err().to_string()
        });
        assert_eq!(ends, ["rank 1: bad", "bad", "rank 1: bad"]);
    }
}
