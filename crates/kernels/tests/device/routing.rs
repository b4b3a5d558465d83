use lockstep_kernels::reference::routing as reference;
use lockstep_kernels::{Capacity, Combine, DROPPED, Float, Router, RouterOutput, RouterSaved};

use crate::check::*;

crate::both_types!(gather_and_combine_match_the_reference);

const ROUTERS: [Router; 4] = [
    Router { experts: 1, top_k: 1, renormalize: true },
    Router { experts: 8, top_k: 2, renormalize: true },
    Router { experts: 7, top_k: 1, renormalize: false },
    Router { experts: 100, top_k: 6, renormalize: false },
];

struct Routed {
    probs: Data,
    log_sum: Data,
    chosen: Data,
    weights: Data,
}

fn route(router: &Router, tokens: usize, logits: &[f32]) -> Routed {
    let Router { experts, top_k, .. } = *router;
    let zeros = |cols| Data::new(0, (tokens, cols), &vec![0f32; tokens * cols]);
    let (mut probs, mut log_sum, mut weights) = (zeros(experts), zeros(1), zeros(top_k));
    let mut chosen = Data::new(0, (tokens, top_k), &vec![0u32; tokens * top_k]);
    let logits = Data::new(0, (tokens, experts), logits);
    let output = RouterOutput {
        probs: probs.view_mut(),
        log_sum: log_sum.view_mut(),
        chosen: chosen.view_mut(),
        weights: weights.view_mut(),
    };
    device().route(router, logits.view(), output);
    Routed { probs, log_sum, chosen, weights }
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
        let wide = to_f64(&logits);
        let (probs, chosen, weights) = reference::choose(router, &wide);
        // Gradient of weights · dweights + 0.5 balance + 0.25 z.
        let dweights_wide = to_f64(&dweights);
        let mut dlogits = reference::weights_backward(router, &wide, &chosen, &dweights_wide);
        let balance = reference::balance_backward(&wide, experts, &chosen, scopes);
        let z = reference::z_loss_backward(&wide, experts);
        for ((d, balance), z) in dlogits.iter_mut().zip(&balance).zip(&z) {
            *d += 0.5 * balance + 0.25 * z;
        }
        let loss = match tokens {
            0 => 0.0,
            _ => reference::balance_loss(&wide, experts, &chosen, scopes),
        };
        let expected = [probs, as_f64(&chosen), weights, dlogits, vec![loss]];
        check(&format!("{router:?}, {tokens} in {scopes}"), 3e-6, expected, || {
            let Routed { probs, log_sum, chosen, weights } = route(&router, tokens, &logits);
            let [mut counts, mut sums, mut slopes] =
                [(); 3].map(|_| Data::new(0, (scopes, experts), &vec![0f32; scopes * experts]));
            device().expert_loads(
                &router,
                chosen.view(),
                probs.view(),
                counts.view_mut(),
                sums.view_mut(),
            );
            let loss = device().balance_loss(&router, counts.view(), sums.view());
            let weight = 0.5 / tokens as f32;
            let weight = if tokens == 0 { 0.0 } else { weight };
            device().balance_gradient(&router, counts.view(), weight, slopes.view_mut());
            let mut dlogits = Data::new(0, (tokens, experts), &logits);
            let dweights = Data::new(0, (tokens, top_k), &dweights);
            let saved = RouterSaved {
                probs: probs.view(),
                log_sum: log_sum.view(),
                chosen: chosen.view(),
                weights: weights.view(),
                dweights: dweights.view(),
                balance: slopes.view(),
                z_loss: if tokens == 0 { 0.0 } else { 0.25 / tokens as f32 },
            };
            device().route_backward(&router, saved, dlogits.view_mut());
            [
                probs.read_f64::<f32>(),
                as_f64(&chosen.read::<u32>()),
                weights.read_f64::<f32>(),
                dlogits.read_f64::<f32>(),
                vec![loss.get()],
            ]
        });
    }
}

/// Without auxiliary losses.
#[test]
fn the_gradient_of_the_weights_matches_the_reference() {
    for router in ROUTERS {
        let (tokens, Router { experts, top_k, .. }) = (37, router);
        let logits = numbers::<f32>(tokens * experts, 1);
        let dweights = numbers::<f32>(tokens * top_k, 2);
        let (_, chosen, _) = reference::choose(router, &to_f64(&logits));
        let expected =
            reference::weights_backward(router, &to_f64(&logits), &chosen, &to_f64(&dweights));
        check(&format!("{router:?}"), 3e-6, [expected], || {
            let Routed { probs, log_sum, chosen, weights } = route(&router, tokens, &logits);
            let mut dlogits = Data::new(0, (tokens, experts), &logits);
            let dweights = Data::new(0, (tokens, top_k), &dweights);
            let none = Data::new::<f32>(0, (0, experts), &[]);
            let saved = RouterSaved {
                probs: probs.view(),
                log_sum: log_sum.view(),
                chosen: chosen.view(),
                weights: weights.view(),
                dweights: dweights.view(),
                balance: none.view(),
                z_loss: 0.0,
            };
            device().route_backward(&router, saved, dlogits.view_mut());
            [dlogits.read_f64::<f32>()]
        });
    }
}

#[test]
fn loads_are_added_to() {
    let router = Router { experts: 3, top_k: 1, renormalize: true };
    let routed = route(&router, 2, &[0.0, 9.0, 0.0, 0.0, 0.0, 9.0]);
    let mut counts = Data::row(0, &[1f32, 2.0, 3.0]);
    let mut sums = Data::row(0, &[10f32, 20.0, 30.0]);
    let (chosen, probs) = (routed.chosen.view(), routed.probs.view());
    device().expert_loads(&router, chosen, probs, counts.view_mut(), sums.view_mut());
    assert_eq!(counts.read::<f32>(), [1.0, 3.0, 4.0]);
    close("sums", 1e-3, &[10.0, 21.0, 31.0], &sums.read_f64::<f32>());
}

#[test]
fn ties_go_to_the_lower_index() {
    let router = Router { experts: 4, top_k: 2, renormalize: true };
    let routed = route(&router, 2, &[0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0]);
    assert_eq!(routed.chosen.read::<u32>(), [1, 2, 0, 1]);
}

#[test]
fn grouping_matches_the_reference() {
    for (slots, experts, scopes) in [
        (0, 3, 1),
        (0, 3, 2),
        (1, 1, 1),
        (34, 8, 1),
        (36, 8, 3),
        (1000, 7, 4),
        (2000, 64, 1),
        (30_000, 5, 3),
        (300_000, 130, 1),
    ] {
        let room = |slots| Some(Capacity { slots, scopes });
        for capacity in [None, room(0), room(1), room(slots / scopes / experts), room(slots)] {
            let chosen = integers(slots, experts, 5);
            let expected = reference::group(&chosen, experts, capacity);
            let [mut order, mut place] = [(); 2].map(|_| Data::row(0, &vec![7u32; slots]));
            let mut starts = Data::row(0, &vec![7u32; experts + 1]);
            device().group_slots(
                Data::row(0, &chosen).view(),
                capacity,
                order.view_mut(),
                starts.view_mut(),
                place.view_mut(),
            );
            let what = format!("{slots} slots, {experts} experts, {capacity:?}");
            let starts = starts.read::<u32>();
            assert_eq!(starts, expected.1, "{what}");
            assert_eq!(place.read::<u32>(), expected.2, "{what}");
            let (order, filled) = (order.read::<u32>(), starts[experts] as usize);
            assert_eq!(order[..filled], expected.0, "{what}");
            assert!(order[filled..].iter().all(|&slot| slot == DROPPED), "{what}");
        }
    }
}

fn gather_and_combine_match_the_reference<E: Float>() {
    for ((tokens, dim, top_k, capacity), offset) in [
        (0, 8, 2, None),
        (1, 1, 1, None),
        (17, 7, 2, Some(3)),
        (700, 65, 2, None),
        (300, 520, 2, Some(50)),
        (1000, 17, 3, Some(100)),
    ]
    .into_iter()
    .flat_map(|case| OFFSETS.map(|offset| (case, offset)))
    {
        let (experts, slots) = (5, tokens * top_k);
        let [x, dy, residual] = [1, 2, 6].map(|stream| numbers::<E>(tokens * dim, stream));
        let (chosen, weights) = (integers(slots, experts, 3), numbers::<f32>(slots, 4));
        let capacity = capacity.map(|slots| Capacity { slots, scopes: 1 });
        let (order, _, place) = reference::group(&chosen, experts, capacity);
        let places = order.len();
        let rows = numbers::<E>(places * dim, 5);
        let gathered = order
            .iter()
            .flat_map(|&slot| to_f64(&x[slot as usize / top_k * dim..][..dim]))
            .collect();
        let (wide, weights_wide) = (to_f64(&rows), to_f64(&weights));
        let combined = reference::combine(&wide, dim, top_k, &place, &weights_wide);
        let (drows, dweights) =
            reference::combine_backward(&wide, dim, top_k, &place, &weights_wide, &to_f64(&dy));
        let plain = reference::combine(&wide, dim, top_k, &place, &vec![1.0; slots]);
        let added = plain.iter().zip(to_f64(&residual)).map(|(x, r)| x + r).collect();
        let expected = [gathered, combined, added, drows, dweights];
        let what = format!("{tokens} tokens, {capacity:?} from {offset}");
        check(&what, tolerance::<E>(1e-5), expected, || {
            let matrix = |rows, values: &[E]| Data::new(offset, (rows, dim), values);
            let (x, dy, rows) = (matrix(tokens, &x), matrix(tokens, &dy), matrix(places, &rows));
            let (order, place) = (Data::row(0, &order), Data::row(0, &place));
            let weights = Data::row(0, &weights);
            let mut gathered = matrix(places, &rows.read::<E>());
            device().gather(x.view(), top_k, order.view(), gathered.view_mut());
            let (mut combined, mut added) = (matrix(tokens, &residual), matrix(tokens, &residual));
            let from = Combine { place: place.view(), weights: Some(weights.view()), top_k };
            device().combine(rows.view(), from, combined.view_mut(), false);
            let plain = Combine { weights: None, ..from };
            device().combine(rows.view(), plain, added.view_mut(), true);
            // Backward of `combine`: the gradient of the rows is dy, gathered and scaled. The gradient of the weights is
            // the dot product of gathered dy with the rows, moved back from places to slots.
            let mut drows = matrix(places, &rows.read::<E>());
            device().gather(dy.view(), top_k, order.view(), drows.view_mut());
            let [mut dots, mut factors] =
                [(); 2].map(|_| Data::new(0, (places, 1), &vec![7f32; places]));
            device().row_dots(rows.view(), drows.view(), dots.view_mut());
            let mut dweights = Data::new(0, (slots, 1), &vec![7f32; slots]);
            let single = Combine { place: place.view(), weights: None, top_k: 1 };
            device().combine(dots.view(), single, dweights.view_mut(), false);
            device().gather(weights.view().shaped(slots, 1), 1, order.view(), factors.view_mut());
            device().scale_rows(drows.view_mut(), factors.view());
            let [gathered, combined, added, drows] =
                [gathered, combined, added, drows].map(|x| x.read_f64::<E>());
            [gathered, combined, added, drows, dweights.read_f64::<f32>()]
        });
    }
}
