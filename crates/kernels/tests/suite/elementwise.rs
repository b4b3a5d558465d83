use crate::check::*;
use half::bf16;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::elementwise::{self, Columns};
use lockstep_kernels::reference::elementwise as reference;

crate::both_types!(matches_the_reference casts_round_to_nearest columns_are_copied_and_added_in_place);

fn matches_the_reference<E: Float>() {
    for n in LENGTHS {
        let (a, b) = (numbers::<E>(n, 1), numbers::<E>(n, 2));
        let sum = reference::sum(&to_f64(&a), &to_f64(&b));
        let right = [sum, to_f64(&a), vec![1.5; n]];
        everywhere(&format!("elements, {n}"), tolerance::<E>(1e-6), right, |cpu| {
            let (mut added, mut copied, mut filled) = (a.clone(), b.clone(), a.clone());
            elementwise::add(cpu, &mut added, &b);
            elementwise::copy(cpu, &a, &mut copied);
            elementwise::fill(cpu, &mut filled, E::round_from(1.5));
            [added, copied, filled].map(|x| to_f64(&x))
        });
    }
}

/// Casts to bf16 round like the half crate; casts to f32 are exact.
fn casts_round_to_nearest<E: Float>() {
    for n in LENGTHS {
        let x = numbers::<E>(n, 3);
        let narrow: Vec<f64> = x.iter().map(|x| bf16::from_f32(x.as_f32()).to_f64()).collect();
        everywhere(&format!("casts of {n}"), 0.0, [narrow, to_f64(&x)], |cpu| {
            let (mut narrow, mut whole) = (vec![bf16::ZERO; n], vec![0f32; n]);
            elementwise::cast(cpu, &x, &mut narrow);
            elementwise::cast(cpu, &x, &mut whole);
            [to_f64(&narrow), to_f64(&whole)]
        });
    }
}

/// Copies and adds columns into a wider f32 matrix, whose other columns stay unchanged.
fn columns_are_copied_and_added_in_place<E: Float>() {
    for (rows, stride) in [(1, 7), (17, 40), (700, 33)] {
        let (from, to) = (numbers::<E>(rows * stride, 1), numbers::<f32>(rows * (stride + 5), 2));
        for (first, at, width) in [(0, 0, stride), (3, 9, stride - 5), (stride - 1, 2, 1)] {
            let columns =
                Columns { from_stride: stride, from: first, to_stride: stride + 5, to: at, width };
            let expected = |added: bool| {
                let mut expected = to_f64(&to);
                let rows = expected.chunks_mut(stride + 5).zip(from.chunks(stride));
                for (row, from) in rows {
                    for i in 0..width {
                        let old = if added { row[at + i] } else { 0.0 };
                        row[at + i] = old + f64::from(from[first + i].as_f32());
                    }
                }
                expected
            };
            let right = [expected(false), expected(true)];
            everywhere(&format!("{columns:?} of {rows}"), 1e-6, right, |cpu| {
                let (mut copied, mut added) = (to.clone(), to.clone());
                elementwise::copy_columns(cpu, &from, &mut copied, &columns);
                elementwise::add_columns(cpu, &from, &mut added, &columns);
                [to_f64(&copied), to_f64(&added)]
            });
        }
    }
}
