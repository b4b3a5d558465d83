//! A value that is not finite stops the run before the step, and is located.

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_trainer::{Error, Rank};

use crate::plans::{plan, source};

#[test]
fn a_nan_is_reported_with_step_rank_and_layer_and_changes_nothing() {
    let plan = plan(2, &[]);
    let source = source();
    on_threads(2, |world| {
        let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
        rank.step(&source, 1).unwrap();
        if world.rank() == 1 {
            let range = rank.model.part.blocks[2].range("mlp.up.weight");
            let (master, _) = rank.store.weights.own_mut(2, 0);
            let at = range.start + 5;
            rank.device.write(master.part(at..at + 1), &[f32::NAN]);
        }
        let own = |rank: &Rank<'_>| rank.device.to_vec::<f32>(rank.store.weights.own(1, 0));
        let before = own(&rank);
        let error = rank.step(&source, 2).map(|_| ()).unwrap_err();
        match &error {
            Error::NotFinite { step: 2, rank: 1, place } => {
                assert!(place.starts_with("layers.1.mlp.up.weight"), "{place}");
            }
            other => panic!("{other}"),
        }
        assert!(own(&rank) == before, "a parameter has changed");
    });
}
