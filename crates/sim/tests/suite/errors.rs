//! Prediction errors relative to measurements.

/// Prints the relative errors of (name, predicted, measured) as a table and returns their mean absolute value.
pub fn mean_error(title: &str, rows: &[(String, f64, f64)]) -> f64 {
    println!("{title}");
    for (name, predicted, measured) in rows {
        println!(
            "  {name:60} {predicted:12.4} {measured:12.4} {:+7.2}%",
            100.0 * (predicted / measured - 1.0)
        );
    }
    let mean =
        rows.iter().map(|(_, predicted, measured)| (predicted / measured - 1.0).abs()).sum::<f64>();
    let mean = mean / rows.len() as f64;
    println!(
        "  mean of {}: {:.2}%, worst {:.2}%\n",
        rows.len(),
        100.0 * mean,
        100.0 * worst_error(rows)
    );
    mean
}

/// Largest absolute relative error.
pub fn worst_error(rows: &[(String, f64, f64)]) -> f64 {
    rows.iter()
        .map(|(_, predicted, measured)| (predicted / measured - 1.0).abs())
        .fold(0.0, f64::max)
}

/// Spearman's rank correlation, with averaged ranks for ties.
pub fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    let first: Vec<f64> = pairs.iter().map(|pair| pair.0).collect();
    let second: Vec<f64> = pairs.iter().map(|pair| pair.1).collect();
    let (first, second) = (ranks(&first), ranks(&second));
    let n = pairs.len() as f64;
    let mean = (n + 1.0) / 2.0;
    let product = |a: &[f64], b: &[f64]| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum()
    };
    product(&first, &second) / (product(&first, &first) * product(&second, &second)).sqrt()
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count() as f64;
        let equal = values.iter().filter(|other| *other == value).count() as f64;
        below + (equal + 1.0) / 2.0
    };
    values.iter().map(rank).collect()
}

#[test]
fn rank_correlation_of_small_lists() {
    assert_eq!(rank_correlation(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]), 1.0);
    assert_eq!(rank_correlation(&[(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]), -1.0);
}
