//! The model is a function of data and parameters: the same bytes for any number of ranks and threads.

use lockstep_comm::on_threads_with;
use lockstep_gbdt::{Booster, Growth, Matrix, ModelFormat, Objective, Params, Reduction, Team};

use crate::support::{Data, binary, mixed, options, train};

fn same_model(name: &str, data: &Data, params: &Params) {
    let alone = train(data, params, 1, 1).to_bytes(ModelFormat::Ubj);
    for (ranks, threads) in [(1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 2), (8, 1)] {
        let model = train(data, params, ranks, threads).to_bytes(ModelFormat::Ubj);
        assert!(model == alone, "{name}: {ranks} ranks × {threads} threads");
    }
}

fn params(objective: Objective) -> Params {
    Params { objective, rounds: 4, max_depth: 4, ..Params::default() }
}

#[test]
fn squared_error() {
    same_model("plain", &mixed(1500), &params(Objective::SquaredError));
}

#[test]
fn more_bins_than_bytes() {
    let params = Params { max_bin: 1000, ..params(Objective::SquaredError) };
    same_model("words", &mixed(3000), &params);
}

#[test]
fn few_bins() {
    let params = Params { max_bin: 3, ..params(Objective::SquaredError) };
    same_model("three bins", &mixed(700), &params);
}

#[test]
fn loss_guided_growth() {
    let params =
        Params { grow: Growth::Loss, max_depth: 0, max_leaves: 13, ..params(Objective::Logistic) };
    same_model("loss", &binary(mixed(1500)), &params);
}

#[test]
fn regularization_and_sampling() {
    let params = Params {
        alpha: 0.5,
        gamma: 0.1,
        lambda: 2.0,
        subsample: 0.6,
        colsample_bytree: 0.8,
        colsample_bylevel: 0.9,
        colsample_bynode: 0.7,
        max_leaves: 9,
        seed: 7,
        ..params(Objective::Logistic)
    };
    same_model("sampled", &binary(mixed(1500)), &params);
}

#[test]
fn weights_and_monotone_constraints() {
    let mut data = mixed(1200);
    data.weight = Some((0..data.rows()).map(|row| (row % 4) as f32 * 0.7).collect());
    let monotone = [("f0".to_string(), 1), ("f1".to_string(), -1)].into();
    same_model("weighted", &data, &Params { monotone, ..params(Objective::SquaredError) });
}

#[test]
fn classes() {
    let mut data = mixed(1200);
    data.label.iter_mut().for_each(|label| *label = (*label * 1.3).clamp(0.0, 4.0).floor());
    same_model("softmax", &data, &Params { classes: 5, ..params(Objective::Softmax) });
}

#[test]
fn counts_medians_and_quantiles() {
    let mut data = mixed(900);
    data.label.iter_mut().for_each(|label| *label = label.max(0.0).floor());
    same_model("poisson", &data, &params(Objective::Poisson));
    let mut data = mixed(900);
    same_model("median", &data, &params(Objective::AbsoluteError));
    data.weight = Some((0..data.rows()).map(|row| 0.5 + (row % 3) as f32).collect());
    same_model("quantile", &data, &Params { quantile: 0.9, ..params(Objective::Quantile) });
}

#[test]
fn rankings() {
    let mut data = mixed(900);
    data.label.iter_mut().for_each(|label| *label = label.clamp(0.0, 4.0).floor());
    data.group = Some((0..data.rows()).map(|row| (row as f64).sqrt() as u64).collect());
    same_model("rank", &data, &params(Objective::Rank));
}

/// Small histograms are all-reduced, large ones reduce-scattered. Both give the same model.
#[test]
fn both_reductions() {
    let reductions = |max_bin: usize| {
        let params = Params { max_bin, ..params(Objective::SquaredError) };
        let data = mixed(1200);
        same_model(&format!("{max_bin} bins"), &data, &params);
        let found = on_threads_with(&options(), 2, |world| {
            let team = Team::new(1);
            let table = data.shard(2, world.rank());
            let matrix = Matrix::new(&world, &table, None, max_bin, &team).unwrap();
            Booster::new(&world, &team, &matrix, &params).unwrap().reduction()
        });
        assert_eq!(found[0], found[1]);
        found[0]
    };
    assert_eq!(reductions(2), Reduction::All);
    assert_eq!(reductions(4096), Reduction::Scatter);
}

#[test]
fn cuts_do_not_depend_on_the_ranks() {
    let mut data = mixed(2000);
    for weighted in [false, true] {
        data.weight = weighted.then(|| (0..data.rows()).map(|row| (row % 7) as f32).collect());
        for max_bin in [2, 16, 256] {
            let cuts = |ranks: usize| {
                on_threads_with(&options(), ranks, |world| {
                    let table = data.shard(ranks, world.rank());
                    Matrix::new(&world, &table, None, max_bin, &Team::new(2)).unwrap().cuts
                })
                .swap_remove(0)
            };
            let alone = cuts(1);
            for feature in &alone.features {
                let limit = if feature.categories > 0 { 6 } else { max_bin };
                assert!(feature.bins() + usize::from(feature.missing) <= limit + 1, "{feature:?}");
                assert!(feature.thresholds.is_sorted());
            }
            for ranks in [2, 5] {
                assert_eq!(cuts(ranks), alone, "{ranks} ranks, {max_bin} bins");
            }
        }
    }
}
