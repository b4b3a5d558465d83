//! The optimizer step.

use std::ops::Range;

use super::elementwise::{count, flag, float_kernel, optional, vectors};
use super::{Arg, Cuda, Source};
use crate::cpu::adamw::Factors;
use crate::{AdamW, Dtype, OptimizerState, View};

pub(crate) const OPTIMIZER: Source =
    Source { name: "optimizer", code: include_str!("kernels/optimizer.cu") };

/// Changes between elements that decay and elements that do not, in one launch; as in the kernel.
const MOST_TURNS: usize = 12;

/// One AdamW step, with the arithmetic of the CPU. Weight decay applies to the elements of the runs that say so.
pub(crate) fn adamw(
    cuda: &Cuda,
    settings: &AdamW,
    mut state: OptimizerState<'_>,
    gradient: View<'_>,
    runs: &[(Range<usize>, bool)],
) {
    let n = gradient.len();
    for state in [&state.parameters, &state.first_moment, &state.second_moment] {
        assert_eq!((state.len(), state.dtype()), (n, Dtype::F32), "{n} gradients for {state:?}");
    }
    if let Some(copy) = &state.bf16_copy {
        assert_eq!((copy.len(), copy.dtype()), (n, Dtype::Bf16), "{n} gradients for {copy:?}");
    }
    for launch in launches(runs) {
        let range = launch[0].0.start..launch[launch.len() - 1].0.end;
        run(cuda, settings, state.part(range.clone()), gradient.part(range), launch);
    }
}

/// Divides runs into groups that follow each other without gaps and take turns, short enough for one launch.
fn launches(runs: &[(Range<usize>, bool)]) -> impl Iterator<Item = &[(Range<usize>, bool)]> {
    let follows =
        |a: &(Range<usize>, bool), b: &(Range<usize>, bool)| a.0.end == b.0.start && a.1 != b.1;
    runs.chunk_by(follows).flat_map(|group| group.chunks(MOST_TURNS + 1))
}

fn run(
    cuda: &Cuda,
    settings: &AdamW,
    state: OptimizerState<'_>,
    gradient: View<'_>,
    runs: &[(Range<usize>, bool)],
) {
    let OptimizerState { parameters, bf16_copy, first_moment, second_moment } = state;
    let (n, start) = (gradient.len(), runs[0].0.start);
    let kernel = match bf16_copy {
        Some(_) => float_kernel!("adamw_and_copy", gradient.dtype()),
        None => float_kernel!("adamw", gradient.dtype()),
    };
    let f: Factors = settings.factors();
    let mut args = vec![
        parameters.into(),
        first_moment.into(),
        second_moment.into(),
        gradient.into(),
        optional(bf16_copy.as_ref().map(|copy| copy.as_view())),
        count(n),
        f.decay.into(),
        f.one_minus_beta1.into(),
        f.beta2.into(),
        f.one_minus_beta2.into(),
        f.step_size.into(),
        f.correction2.into(),
        f.eps.into(),
        f.scale.into(),
        flag(runs[0].1),
    ];
    let turns = runs[1..].iter().map(|(run, _)| (run.start - start) as i64);
    let turns = turns.chain(std::iter::repeat(i64::MAX)).take(MOST_TURNS);
    args.extend(turns.map(Arg::from));
    // The factors change with every step.
    cuda.launch_now(&OPTIMIZER, kernel, vectors(n, Dtype::F32, 1), &args);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_take_turns_share_a_launch() {
        let runs: Vec<(Range<usize>, bool)> =
            (0..30).map(|run| (10 * run..10 * run + 10, run % 2 == 0)).collect();
        let sizes: Vec<usize> = launches(&runs).map(<[_]>::len).collect();
        assert_eq!(sizes, [13, 13, 4]);
        let gap = [(0..5, true), (6..9, false), (9..12, true), (12..14, true)];
        let sizes: Vec<usize> = launches(&gap).map(<[_]>::len).collect();
        assert_eq!(sizes, [1, 2, 1]);
        assert_eq!(launches(&[]).count(), 0);
    }
}
