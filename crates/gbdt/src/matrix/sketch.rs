//! Choice of thresholds.
//!
//! A feature gets at most B bins: `max_bin`, less one if some rows have no value. If it has at most B distinct values,
//! every one has its own bin. Otherwise threshold k of B - 1 is the smallest value up to which the weights of all rows
//! add up to at least k/B of the total, rounded up; equal thresholds and the smallest value are dropped. Weights are
//! integers, multiples of 2⁻³¹ of the largest weight. The quantiles are exact, so they are the same for any number of
//! ranks, in any order of rows.
//!
//! Messages for a batch of F features, per rank: an all-reduce of 16 F bytes (counts, largest categories), an all-gather
//! of 4 F bytes per rank (numbers of distinct values, up to B + 1), an all-gather of the distinct values of features
//! that have at most B on every rank (4 bytes each), and for the others 32 all-reduces of 8 (B - 1) bytes (see
//! `select.rs`). In a group of one rank nothing is sent.

use std::ops::Range;

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;

use crate::collective::{all_succeed, gather_bytes, gather_counts};
use crate::data::Table;
use crate::error::{Error, Result};
use crate::matrix::cuts::{Cuts, FeatureCuts};
use crate::matrix::select::{Sorted, Target, key_of, select, value_of};
use crate::params::MAX_BINS;

/// Memory for the sorted values of a batch of features, in bytes.
const BATCH_BYTES: u64 = 32 << 20;

/// Rows that are read for all features of a batch before the next rows.
const BLOCK_ROWS: usize = 4096;

/// Chooses thresholds for the rows of all ranks. Collective.
pub fn sketch(group: &Group, table: &Table, max_bin: usize, team: &Team) -> Result<Cuts> {
    let rows = gather_counts(group, table.rows() as u64)?;
    let (total, longest) = (rows.iter().sum::<u64>(), rows.iter().copied().max().unwrap_or(0));
    let weights = quantize_weights(group, table.weight.as_deref())?;
    let weights = weights.as_deref();
    let width = if weights.is_some() { 12 } else { 4 };
    let batch = (BATCH_BYTES / (longest * width).max(1)).clamp(team.size() as u64, 256) as usize;
    let mut features = Vec::new();
    while features.len() < table.features() {
        let first = features.len();
        let columns = first..(first + batch).min(table.features());
        let lists = all_succeed(group, sort_columns(table, columns.clone(), weights, team))?;
        features.extend(cut_batch(group, &lists, table, &columns, (total, max_bin))?);
    }
    Ok(Cuts { features })
}

/// Weights as integers; `None` if all rows of all ranks have the same weight.
fn quantize_weights(group: &Group, weights: Option<&[f32]>) -> Result<Option<Vec<u32>>> {
    let mut bounds = [0.0f32, 0.0];
    for weight in weights.unwrap_or(&[]) {
        bounds = [bounds[0].max(*weight), bounds[1].max(-*weight)];
    }
    let mut weighted = [i64::from(weights.is_some_and(|weights| !weights.is_empty()))];
    group.all_reduce(&mut bounds, Op::Max)?;
    group.all_reduce(&mut weighted, Op::Max)?;
    if weighted[0] == 0 || bounds[0] == 0.0 {
        return Ok(None);
    }
    let scale = f64::from(1u32 << 31) / f64::from(bounds[0]);
    let quantize = |weight: &f32| (f64::from(*weight) * scale).round() as u32;
    Ok(Some(weights.unwrap_or(&[]).iter().map(quantize).collect()))
}

/// The sorted values of some columns.
fn sort_columns(
    table: &Table,
    columns: Range<usize>,
    weights: Option<&[u32]>,
    team: &Team,
) -> Result<Vec<Sorted>> {
    let parts = crate::par::pieces(columns.len(), 1, team.size());
    let sorted = crate::par::map(team, parts.len(), &|part| {
        let mine = columns.start + parts[part].start..columns.start + parts[part].end;
        let mut values: Vec<Vec<f32>> = vec![Vec::new(); mine.len()];
        let mut pairs: Vec<Vec<(f32, u32)>> = vec![Vec::new(); mine.len()];
        let mut first = 0;
        for chunk in &table.chunks {
            for start in (0..chunk.rows).step_by(BLOCK_ROWS) {
                let block = start..(start + BLOCK_ROWS).min(chunk.rows);
                for (index, column) in mine.clone().enumerate() {
                    let mut infinite = None;
                    match weights {
                        None => chunk.column(column, block.clone(), |row, value| {
                            if value.is_infinite() {
                                infinite.get_or_insert(row);
                            }
                            values[index].push(value);
                        }),
                        Some(weights) => chunk.column(column, block.clone(), |row, value| {
                            if value.is_infinite() {
                                infinite.get_or_insert(row);
                            }
                            pairs[index].push((value, weights[first + row]));
                        }),
                    }
                    if let Some(row) = infinite {
                        return Err(Error::Input(format!(
                            "row {} of this rank: feature {:?} is infinite; use NaN for a missing value",
                            first + row + 1,
                            table.names[column]
                        )));
                    }
                }
            }
            first += chunk.rows;
        }
        let sort = |index: usize| match weights {
            None => Sorted::of(&std::mem::take(&mut values[index])),
            Some(_) => Sorted::weighted(std::mem::take(&mut pairs[index]).into_iter()),
        };
        Ok((0..mine.len()).map(sort).collect::<Vec<Sorted>>())
    });
    Ok(sorted.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Thresholds of a batch of features. `limits` are the rows of all ranks and `max_bin`.
fn cut_batch(
    group: &Group,
    lists: &[Sorted],
    table: &Table,
    columns: &Range<usize>,
    limits: (u64, usize),
) -> Result<Vec<FeatureCuts>> {
    let (rows, max_bin) = limits;
    // Present rows, and the total of their weights.
    let mut counts: Vec<i64> =
        lists.iter().flat_map(|list| [list.len() as i64, list.total() as i64]).collect();
    group.all_reduce(&mut counts, Op::Sum)?;
    let mut features: Vec<FeatureCuts> = counts
        .chunks_exact(2)
        .map(|count| FeatureCuts {
            present: count[0] as u64,
            missing: (count[0] as u64) < rows,
            ..FeatureCuts::default()
        })
        .collect();
    let most: Vec<usize> =
        features.iter().map(|feature| (max_bin - usize::from(feature.missing)).max(1)).collect();
    let distinct: Vec<Vec<u32>> =
        lists.iter().zip(&most).map(|(list, most)| list.distinct(*most)).collect();
    let unions = unite(group, &distinct, &most)?;
    let ends = all_ends(group, lists)?;
    let mut targets = Vec::new();
    for (index, feature) in features.iter_mut().enumerate() {
        let column = columns.start + index;
        feature.min = if feature.present > 0 { value_of(ends[index].0) } else { 0.0 };
        if let Some(words) = &table.categories[column] {
            feature.categories =
                categories(&table.names[column], words, feature, value_of(ends[index].1))?;
            continue;
        }
        match &unions[index] {
            Some(values) => {
                feature.thresholds = values.iter().skip(1).map(|key| value_of(*key)).collect();
            }
            None => {
                let (total, most) = (counts[2 * index + 1] as u128, most[index] as u128);
                let weight = |k: u128| (total * k).div_ceil(most).max(1) as u64;
                targets.extend((1..most).map(|k| Target { list: index, weight: weight(k) }));
            }
        }
    }
    // A list without weight has no quantiles.
    targets.retain(|target| counts[2 * target.list + 1] > 0);
    for (target, key) in targets.iter().zip(select(group, lists, &targets)?) {
        let feature = &mut features[target.list];
        let last = feature.thresholds.last().copied().unwrap_or(feature.min);
        if key > key_of(last) {
            feature.thresholds.push(value_of(key));
        }
    }
    Ok(features)
}

/// The number of categories of a feature.
fn categories(name: &str, words: &[String], feature: &FeatureCuts, max: f32) -> Result<usize> {
    let count = match (words.len(), feature.present) {
        (0, 0) => 0,
        (0, _) if feature.min >= 0.0 && max.fract() == 0.0 && max < MAX_BINS as f32 => {
            max as usize + 1
        }
        (0, _) => {
            return Err(Error::Input(format!(
                "categorical feature {name:?} has values from {} to {max}; use codes from 0 to {}",
                feature.min,
                MAX_BINS - 1
            )));
        }
        (words, _) => words,
    };
    match count < MAX_BINS {
        true => Ok(count),
        false => Err(Error::Input(format!(
            "categorical feature {name:?} has {count} categories, at most {} are supported",
            MAX_BINS - 1
        ))),
    }
}

/// Smallest and largest key of each list on all ranks.
fn all_ends(group: &Group, lists: &[Sorted]) -> Result<Vec<(u32, u32)>> {
    let ends = |list: &Sorted| match list.ends() {
        Some((first, last)) => [-i64::from(first), i64::from(last)],
        None => [i64::MIN, i64::MIN],
    };
    let mut all: Vec<i64> = lists.iter().flat_map(ends).collect();
    group.all_reduce(&mut all, Op::Max)?;
    let pair = |pair: &[i64]| match pair {
        [i64::MIN, _] => (0, 0),
        pair => (-pair[0] as u32, pair[1] as u32),
    };
    Ok(all.chunks_exact(2).map(pair).collect())
}

/// The distinct keys of all ranks, for features that have at most `most` of them.
fn unite(group: &Group, mine: &[Vec<u32>], most: &[usize]) -> Result<Vec<Option<Vec<u32>>>> {
    if group.size() == 1 {
        let few = |(keys, most): (&Vec<u32>, &usize)| (keys.len() <= *most).then(|| keys.clone());
        return Ok(mine.iter().zip(most).map(few).collect());
    }
    let lengths: Vec<u32> = mine.iter().map(|keys| keys.len() as u32).collect();
    let mut all = vec![0; lengths.len() * group.size()];
    group.all_gather(&lengths, &mut all)?;
    let few: Vec<bool> = (0..mine.len())
        .map(|index| {
            (0..group.size()).all(|rank| all[rank * mine.len() + index] as usize <= most[index])
        })
        .collect();
    let keys = mine.iter().zip(&few).filter(|(_, few)| **few).flat_map(|(keys, _)| keys);
    let bytes: Vec<u8> = keys.flat_map(|key| key.to_le_bytes()).collect();
    let gathered = gather_bytes(group, &bytes)?;
    let mut unions: Vec<Option<Vec<u32>>> = few.iter().map(|few| few.then(Vec::new)).collect();
    for (rank, bytes) in gathered.iter().enumerate() {
        let mut keys =
            bytes.chunks_exact(4).map(|key| u32::from_le_bytes(key.try_into().expect("four")));
        for (index, union) in unions.iter_mut().enumerate() {
            if let Some(union) = union {
                union.extend(keys.by_ref().take(all[rank * mine.len() + index] as usize));
            }
        }
    }
    for (union, most) in unions.iter_mut().zip(most) {
        if let Some(keys) = union {
            keys.sort_unstable();
            keys.dedup();
            if keys.len() > *most {
                *union = None;
            }
        }
    }
    Ok(unions)
}
