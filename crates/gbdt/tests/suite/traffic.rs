//! Bytes sent equal the cost formulas.

use lockstep_comm::{BufferAccess, Options, on_threads_with};
use lockstep_gbdt::{Booster, Matrix, Objective, Params, Reduction, Team};

use crate::support::{mixed, options};

#[test]
fn bytes_sent_equal_the_formula() {
    let data = mixed(2000);
    // Buffers go through slots, where every byte is counted.
    let options = Options { direct_access: false, ..options() };
    for (max_bin, reduction) in [(2, Reduction::All), (2048, Reduction::Scatter)] {
        let params = Params { objective: Objective::SquaredError, max_bin, ..Params::default() };
        for ranks in 2..6 {
            on_threads_with(&options, ranks, |world| {
                let team = Team::new(1);
                let table = data.shard(ranks, world.rank());
                let matrix = Matrix::new(&world, &table, None, max_bin, &team).unwrap();
                let mut booster = Booster::new(&world, &team, &matrix, &params).unwrap();
                assert_eq!(booster.reduction(), reduction);
                let before = world.traffic();
                (0..3).for_each(|_| booster.round().unwrap());
                let sent = world.traffic() - before;
                let predicted = booster.predicted_traffic(BufferAccess::Slots).unwrap();
                assert_eq!(sent, predicted, "{ranks} ranks, {max_bin} bins");
                if reduction == Reduction::Scatter {
                    // XGBoost all-reduces 16 bytes per slot: 2 (P - 1)/P of them leave each rank.
                    let slots =
                        matrix.layout.slots() as u64 * booster.statistics().histograms as u64;
                    let theirs = 2 * 16 * slots * (ranks as u64 - 1) / ranks as u64;
                    assert!(sent.bytes * 10 <= theirs * 4, "{} of {theirs}", sent.bytes);
                }
            });
        }
    }
}
