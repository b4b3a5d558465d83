//! Products of groups of rows: one launch, one product per group, and the choice between them give the same results.

use lockstep_kernels::{Dtype, Float, GroupedMatmul, RowGroups, Stack, Tag};

use crate::check::*;
use crate::matmul::product;

crate::both_types!(grouped_products_match_the_reference);

/// Rows of each group; outputs and inputs of the matrices; an offset of the operands. The sizes have all kinds of remainders
/// of the tiles of a kernel, and numbers that it does not take.
fn cases() -> Vec<(Vec<usize>, [usize; 2], usize)> {
    vec![
        (vec![0, 0], [8, 16], 0),
        (vec![0, 5, 130, 0, 64, 1, 0], [24, 40], 0),
        (vec![100, 300], [264, 136], 0),
        (vec![128, 0, 64], [512, 64], 0),
        (vec![9, 4], [5, 17], 0),
        (vec![9, 4], [16, 8], 1),
        ((0..70).map(|i| i * 7 % 5).collect(), [16, 8], 0),
    ]
}

/// Elements before the first matrix and after each.
const GAP: usize = 8;

fn grouped_products_match_the_reference<E: Float>() {
    let has_kernel = device().cuda_report().is_some_and(|gpu| gpu.capability.starts_with("9."));
    for on in [Some(false), Some(true), None] {
        device().set_grouped_matmul(on);
        for (counts, sizes, offset) in cases() {
            // All the groups of these cases are short, so that one launch is always better where it is possible.
            let fits = offset == 0 && sizes.iter().all(|size| size % 8 == 0);
            let in_one_launch = on != Some(false) && fits && has_kernel && E::DTYPE == Dtype::Bf16;
            case::<E>(&counts, sizes, offset, in_one_launch);
        }
    }
    device().set_grouped_matmul(None);
}

fn case<E: Float>(
    counts: &[usize],
    [outputs, inputs]: [usize; 2],
    offset: usize,
    in_one_launch: bool,
) {
    let (count, total) = (counts.len(), counts.iter().sum::<usize>());
    let (size, stride) = (outputs * inputs, outputs * inputs + GAP);
    let stack = Stack { first: GAP, stride, count, rows: outputs, cols: inputs };
    let mut starts = vec![0u32];
    starts.extend(counts.iter().scan(0, |end, count| {
        *end += *count as u32;
        Some(*end)
    }));
    // Scaled so that products are near 1.
    let scale = 1.0 / (inputs.max(outputs) as f32).sqrt();
    let scaled = |n, stream| -> Vec<E> {
        numbers::<E>(n, stream).iter().map(|x| E::round_from(x.as_f32() * scale)).collect()
    };
    let (x, dy) = (numbers::<E>(total * inputs, 1), scaled(total * outputs, 2));
    let weights = scaled(GAP + count * stride, 3);
    let before = numbers::<f32>(weights.len(), 4);
    let (x64, dy64, weights64) = (to_f64(&x), to_f64(&dy), to_f64(&weights));

    // Elements that are no part of a matrix stay.
    let [mut y, mut dx] = [vec![], vec![]];
    let (mut added, mut fresh) = (to_f64(&before), weights64.clone());
    for (index, bounds) in starts.windows(2).enumerate() {
        let [first, rows] = [bounds[0] as usize, (bounds[1] - bounds[0]) as usize];
        let weight = &weights64[stack.range(index)];
        let x = &x64[first * inputs..][..rows * inputs];
        let dy = &dy64[first * outputs..][..rows * outputs];
        y.extend(product((x, false), (weight, true), [rows, inputs, outputs]));
        dx.extend(product((dy, false), (weight, false), [rows, outputs, inputs]));
        let dw = product((dy, true), (x, false), [outputs, rows, inputs]);
        added[stack.range(index)].iter_mut().zip(&dw).for_each(|(sum, dw)| *sum += dw);
        fresh[stack.range(index)].copy_from_slice(&dw);
        assert_eq!(dw.len(), size);
    }
    let twice = fresh.iter().enumerate().map(|(i, dw)| {
        let in_matrix = (0..count).any(|index| stack.range(index).contains(&i));
        if in_matrix { 2.0 * dw } else { *dw }
    });
    let expected = [y, dx, added, twice.collect(), fresh.clone()];

    let bound = if size_of::<E>() == 2 { 0.03 } else { 1e-5 };
    check(&format!("{counts:?} rows, {inputs} to {outputs}"), bound, expected, || {
        let device = device();
        let mut places = device.empty(1, starts.len(), Dtype::U32, Tag::Buffers);
        device.write(places.view_mut(), &starts);
        let groups = RowGroups::new(places);
        let (x, dy) =
            (Data::new(offset, (total, inputs), &x), Data::new(offset, (total, outputs), &dy));
        let weights = Data::row(offset, &weights);
        let empty = |cols| Data::new(offset, (total, cols), &vec![E::default(); total * cols]);
        let [mut y, mut dx] = [outputs, inputs].map(empty);
        let mut added = Data::row(offset, &before);
        let [mut fresh, mut twice] = [(); 2].map(|()| Data::row(offset, &weights.read::<E>()));

        let of = (weights.view(), stack);
        let work = GroupedMatmul::linear(&groups, of, x.view(), y.view_mut());
        assert_eq!(device.grouped_matmul(work), in_one_launch && total > 0, "one launch");
        device.grouped_matmul(GroupedMatmul::linear_dx(&groups, of, dy.view(), dx.view_mut()));
        let gradient = |grads: &mut Data, accumulate| {
            let grads = (grads.view_mut(), stack);
            let mut work = GroupedMatmul::linear_dw(&groups, grads, dy.view(), x.view());
            work.accumulate = accumulate;
            device.grouped_matmul(work);
        };
        gradient(&mut added, true);
        gradient(&mut fresh, false);
        gradient(&mut twice, false);
        gradient(&mut twice, true);
        let [y, dx, twice, fresh] = [y, dx, twice, fresh].map(|data| data.read_f64::<E>());
        [y, dx, added.read_f64::<f32>(), twice, fresh]
    });
}
