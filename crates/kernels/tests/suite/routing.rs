use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::routing::{self, Choice, ChoiceBackward, Grouping, Slots};
use lockstep_kernels::cpu::{Cpu, balance, reduce};
use lockstep_kernels::reference::routing as reference;
use lockstep_kernels::{Capacity, DROPPED, Router};

crate::both_types!(gather_and_combine_match_the_reference);

const ROUTERS: [Router; 4] = [
    Router { experts: 1, top_k: 1, renormalize: true },
    Router { experts: 8, top_k: 2, renormalize: true },
    Router { experts: 7, top_k: 1, renormalize: false },
    Router { experts: 100, top_k: 6, renormalize: false },
];

struct Chosen {
    probs: Vec<f32>,
    log_sum: Vec<f32>,
    chosen: Vec<u32>,
    weights: Vec<f32>,
}

fn choose(cpu: &Cpu, router: Router, logits: &[f32]) -> Chosen {
    let tokens = logits.len() / router.experts;
    let slots = tokens * router.top_k;
    let mut got = Chosen {
        probs: vec![0.0; logits.len()],
        log_sum: vec![0.0; tokens],
        chosen: vec![0; slots],
        weights: vec![0.0; slots],
    };
    let Chosen { probs, log_sum, chosen, weights } = &mut got;
    routing::choose(cpu, router, logits, Choice { probs, log_sum, chosen, weights });
    got
}

#[test]
fn routing_and_its_gradient_match_the_reference() {
    let sizes = [(0, 1), (0, 3), (1, 1), (17, 1), (18, 3), (1000, 1), (1000, 8)];
    for (router, (tokens, scopes)) in
        ROUTERS.into_iter().flat_map(|router| sizes.map(|size| (router, size)))
    {
        let Router { experts, top_k, .. } = router;
        let logits: Vec<f32> =
            numbers::<f32>(tokens * experts, 1).iter().map(|x| 2.0 * x).collect();
        let dweights = numbers::<f32>(tokens * top_k, 2);
        let (probs, chosen, weights) = reference::choose(router, &to_f64(&logits));
        // Gradient of weights · dweights + 0.5 balance + 0.25 z.
        let mut dlogits =
            reference::weights_backward(router, &to_f64(&logits), &chosen, &to_f64(&dweights));
        let balance = reference::balance_backward(&to_f64(&logits), experts, &chosen, scopes);
        let z = reference::z_loss_backward(&to_f64(&logits), experts);
        dlogits
            .iter_mut()
            .zip(balance.iter().zip(&z))
            .for_each(|(d, (b, z))| *d += 0.5 * b + 0.25 * z);
        let losses = if tokens == 0 {
            vec![0.0; 2]
        } else {
            vec![
                reference::balance_loss(&to_f64(&logits), experts, &chosen, scopes),
                reference::z_loss(&to_f64(&logits), experts),
            ]
        };
        let which = chosen.iter().map(|&expert| expert as f64).collect();
        everywhere(
            &format!("{router:?}, {tokens} in {scopes}"),
            3e-6,
            [probs, which, weights, dlogits, losses],
            |cpu| {
                let got = choose(cpu, router, &logits);
                let [mut counts, mut sums, mut slopes] =
                    [(); 3].map(|_| vec![0.0; scopes * experts]);
                let loads = balance::Loads { counts: &mut counts, sums: &mut sums };
                balance::loads(cpu, experts, &got.chosen, &got.probs, loads);
                let each = || counts.chunks(experts).zip(sums.chunks(experts));
                for ((counts, _), slopes) in each().zip(slopes.chunks_mut(experts)) {
                    balance::gradient(counts, top_k, 0.5 / tokens as f32, slopes);
                }
                let mut dlogits = vec![0.0; logits.len()];
                let from = ChoiceBackward {
                    probs: &got.probs,
                    log_sum: &got.log_sum,
                    chosen: &got.chosen,
                    weights: &got.weights,
                    dweights: &dweights,
                    balance: &slopes,
                    z_loss: 0.25 / tokens as f32,
                };
                routing::choose_backward(cpu, router, &from, &mut dlogits);
                let losses = if tokens == 0 {
                    vec![0.0; 2]
                } else {
                    let balance = each().map(|(counts, sums)| balance::loss(counts, sums, top_k));
                    let z = reduce::sum_of_squares(cpu, &got.log_sum) / tokens as f64;
                    vec![balance.sum::<f64>() / scopes as f64, z]
                };
                let which = got.chosen.iter().map(|&expert| expert as f64).collect();
                [to_f64(&got.probs), which, to_f64(&got.weights), to_f64(&dlogits), losses]
            },
        );
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    let router = Router { experts: 4, top_k: 2, renormalize: true };
    let got = choose(&Cpu::new(1), router, &[0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0]);
    assert_eq!(got.chosen, [1, 2, 0, 1]);
}

#[test]
fn grouping_matches_the_reference() {
    for (slots, experts, scopes) in
        [(0, 3, 1), (0, 3, 2), (1, 1, 1), (34, 8, 1), (36, 8, 3), (1000, 7, 4), (2000, 64, 1)]
    {
        let room = |slots| Some(Capacity { slots, scopes });
        for capacity in [None, room(0), room(1), room(slots / scopes / experts), room(slots)] {
            let chosen = integers(slots, experts, 5);
            let (mut order, mut starts, mut place) =
                (vec![0; slots], vec![0; experts + 1], vec![0; slots]);
            let cpu = Cpu::new(1);
            let filled = routing::group(
                &cpu,
                &chosen,
                capacity,
                grouping(&mut order, &mut starts, &mut place),
            );
            let expected = reference::group(&chosen, experts, capacity);
            assert_eq!(
                (&order[..filled], &starts, &place),
                (&expected.0[..], &expected.1, &expected.2),
                "{capacity:?}"
            );
            assert!(order[filled..].iter().all(|&slot| slot == DROPPED));
        }
    }
}

/// Capacity is counted per scope: two sequences together give the same result as one after the other.
#[test]
fn capacity_is_counted_per_scope() {
    let (cpu, experts) = (Cpu::new(1), 3);
    let group = |chosen: &[u32], scopes| {
        let (mut order, mut starts) = (vec![0; chosen.len()], vec![0; experts + 1]);
        let mut place = vec![0; chosen.len()];
        let capacity = Some(Capacity { slots: 2, scopes });
        routing::group(&cpu, chosen, capacity, grouping(&mut order, &mut starts, &mut place));
        place.iter().map(|&place| place == DROPPED).collect::<Vec<_>>()
    };
    let (one, other) = ([0, 0, 0, 1, 2, 0], [1, 1, 0, 1, 1, 0]);
    let apart = [group(&one, 1), group(&other, 1)].concat();
    assert_eq!(group(&[one, other].concat(), 2), apart);
    assert_ne!(group(&[one, other].concat(), 1), apart);
}

fn gather_and_combine_match_the_reference<E: Float>() {
    for (tokens, dim, top_k, capacity) in [
        (0, 8, 2, None),
        (1, 1, 1, None),
        (17, 7, 2, Some(3)),
        (700, 65, 2, None),
        (1000, 17, 3, Some(100)),
    ] {
        let (experts, slots) = (5, tokens * top_k);
        let (x, dy, residual) = (
            numbers::<E>(tokens * dim, 1),
            numbers::<E>(tokens * dim, 2),
            numbers::<E>(tokens * dim, 6),
        );
        let (chosen, weights) = (integers(slots, experts, 3), numbers::<f32>(slots, 4));
        let capacity = capacity.map(|slots| Capacity { slots, scopes: 1 });
        let (order, _, place) = reference::group(&chosen, experts, capacity);
        let rows = numbers::<E>(order.len() * dim, 5);
        let gathered = order
            .iter()
            .flat_map(|&slot| to_f64(&x[slot as usize / top_k * dim..][..dim]))
            .collect();
        let combined = reference::combine(&to_f64(&rows), dim, top_k, &place, &to_f64(&weights));
        let (drows, dweights) = reference::combine_backward(
            &to_f64(&rows),
            dim,
            top_k,
            &place,
            &to_f64(&weights),
            &to_f64(&dy),
        );
        let plain = reference::combine(&to_f64(&rows), dim, top_k, &place, &vec![1.0; slots]);
        let added = plain.iter().zip(&residual).map(|(x, r)| x + r.as_f32() as f64).collect();
        let expected = [gathered, combined, added, drows, dweights];
        everywhere(
            &format!("{tokens} tokens, {capacity:?}"),
            tolerance::<E>(1e-5),
            expected,
            |cpu| {
                let (mut gathered, mut drows) =
                    (vec![E::default(); rows.len()], vec![E::default(); rows.len()]);
                routing::gather(cpu, &x, top_k, &order, &mut gathered);
                let (mut combined, mut added) =
                    (vec![E::round_from(7.0); x.len()], residual.clone());
                let weighted = Slots { top_k, place: &place, weights: &weights };
                routing::combine(cpu, &rows, weighted, &mut combined, false);
                routing::combine(cpu, &rows, Slots { weights: &[], ..weighted }, &mut added, true);
                // Backward of `combine`: the gradient of the rows is dy, gathered and scaled. The gradient of the weights is
                // the dot product of gathered dy with the rows, moved back from places to slots.
                routing::gather(cpu, &dy, top_k, &order, &mut drows);
                let (mut dots, mut dweights) = (vec![7.0; order.len()], vec![7.0; slots]);
                routing::row_dots(cpu, &rows, &drows, dim, &mut dots);
                let unweighted = Slots { top_k: 1, place: &place, weights: &[] };
                routing::combine(cpu, &dots, unweighted, &mut dweights, false);
                let mut factors = vec![7.0; order.len()];
                routing::gather(cpu, &weights, 1, &order, &mut factors);
                routing::scale_rows(cpu, &mut drows, dim, &factors);
                [
                    to_f64(&gathered),
                    to_f64(&combined),
                    to_f64(&added),
                    to_f64(&drows),
                    to_f64(&dweights),
                ]
            },
        );
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    for router in &ROUTERS[..3] {
        let logits = to_f64(&numbers::<f32>(4 * router.experts, 1));
        let (_, chosen, _) = reference::choose(*router, &logits);
        let dw = to_f64(&numbers::<f32>(chosen.len(), 2));
        let expected = finite_differences(&logits, |logits| {
            dot(&reference::weights_of(*router, logits, &chosen), &dw)
        });
        close(
            "weights",
            1e-8,
            &expected,
            &reference::weights_backward(*router, &logits, &chosen, &dw),
        );
        for scopes in [1, 2] {
            let expected = finite_differences(&logits, |logits| {
                reference::balance_loss(logits, router.experts, &chosen, scopes)
            });
            let backward = reference::balance_backward(&logits, router.experts, &chosen, scopes);
            close("balance", 1e-8, &expected, &backward);
        }
        let expected =
            finite_differences(&logits, |logits| reference::z_loss(logits, router.experts));
        close("z", 1e-8, &expected, &reference::z_loss_backward(&logits, router.experts));
    }
    let (dim, top_k, place) = (3, 2, [2, 0, DROPPED, 1]);
    let [rows, weights, dy] = [9, 4, 6].map(|n| to_f64(&numbers::<f32>(n, n as u64)));
    let (drows, dweights) = reference::combine_backward(&rows, dim, top_k, &place, &weights, &dy);
    let loss = |rows: &[f64], weights: &[f64]| {
        dot(&reference::combine(rows, dim, top_k, &place, weights), &dy)
    };
    close("rows", 1e-8, &finite_differences(&rows, |rows| loss(rows, &weights)), &drows);
    close(
        "weights",
        1e-8,
        &finite_differences(&weights, |weights| loss(&rows, weights)),
        &dweights,
    );
}

fn grouping<'a>(order: &'a mut [u32], starts: &'a mut [u32], place: &'a mut [u32]) -> Grouping<'a> {
    Grouping { order, starts, place }
}
