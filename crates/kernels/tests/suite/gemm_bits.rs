//! Bitwise reproducibility of the matrix multiplication, and its distance from exact sums.

use super::gemm::{DTYPES, NT, Values, case, outcome};
use half::bf16;
use lockstep_kernels::Dtype;
use lockstep_kernels::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use lockstep_kernels::cpu::{Cpu, Level};

/// Except in the path for few rows, the bits of a row do not depend on the number of rows.
#[test]
fn bits_of_a_row_do_not_depend_on_the_number_of_rows() {
    for level in Level::of_this_machine().and_below() {
        for dtype in DTYPES {
            let rows = |m| {
                let case = case(m, 70, 1100, dtype, NT);
                outcome(&case, |gemm| gemm::run(&Cpu::at(level, 1), gemm)).0.as_f32()
            };
            assert_eq!(rows(9)[..], rows(100)[..9 * 70], "{level:?} {dtype}");
        }
    }
}

/// Rows aligned to cache lines are read in place, others are packed. Both give the same bits, for several column chunks,
/// partial panels and partial tiles of k.
#[test]
fn aligned_and_packed_rows_give_the_same_bits() {
    for (m, n, k, stride) in [
        (1100, 1300, 1024, 1024),
        (200, 600, 2112, 2112),
        (300, 1200, 2112, 2112),
        (300, 1200, 1050, 1056),
        // Rows that map to few cache sets, and a last piece short enough to fit there.
        (300, 1200, 1056, 2048),
    ] {
        let Values::Bf16(b) = Values::new(Dtype::Bf16, n * k, 2) else { unreachable!() };
        let Values::Bf16(rows) = Values::new(Dtype::Bf16, m * stride, 1) else { unreachable!() };
        let multiply = |past: usize, threads, scale| {
            // The same values aligned to a cache line, or offset by some elements.
            let mut room = vec![bf16::ZERO; m * stride + 128];
            let start = room.as_ptr().align_offset(64) + past;
            let a = &mut room[start..start + m * stride];
            a.copy_from_slice(&rows);
            let mut out = vec![0.0; m * n];
            gemm::run(
                &Cpu::at(Level::of_this_machine(), threads),
                Gemm {
                    m,
                    n,
                    k,
                    a: Matrix { data: Data::Bf16(a), stride, transposed: false },
                    b: Matrix { data: Data::Bf16(&b), stride: k, transposed: true },
                    out: DataMut::F32(&mut out),
                    out_stride: n,
                    accumulate: false,
                    scale,
                    epilogue: Epilogue::default(),
                },
            );
            out
        };
        // Partial sums in the output, and in a buffer.
        for scale in [1.0, 0.5] {
            let packed = multiply(5, 1, scale);
            assert!(multiply(0, 1, scale) == packed, "({m}, {n}, {k})");
            assert!(multiply(0, 3, scale) == packed, "({m}, {n}, {k}) on three threads");
        }
    }
}

/// Root mean square error of a product against f64 sums, relative to the typical size of such sums.
fn error(level: Level, a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize)) -> f64 {
    let mut out = vec![0.0f32; m * n];
    let view = |values, transposed| Matrix { data: Data::F32(values), stride: k, transposed };
    gemm::run(
        &Cpu::at(level, 1),
        Gemm {
            m,
            n,
            k,
            a: view(a, false),
            b: view(b, true),
            out: DataMut::F32(&mut out),
            out_stride: n,
            accumulate: false,
            scale: 1.0,
            epilogue: Epilogue::default(),
        },
    );
    let (mut squares, mut scale) = (0.0, 0.0);
    for (row, a) in out.chunks(n).zip(a.chunks(k)) {
        for (sum, b) in row.iter().zip(b.chunks(k)) {
            let products = || a.iter().zip(b).map(|(x, y)| *x as f64 * *y as f64);
            squares += (*sum as f64 - products().sum::<f64>()).powi(2);
            scale += products().map(|product| product * product).sum::<f64>();
        }
    }
    (squares / scale).sqrt()
}

/// AMX multiplies f32 as three bf16 terms. No bit may be lost.
#[test]
fn f32_on_amx_is_as_exact_as_fma() {
    if Level::of_this_machine() < Level::Amx {
        return;
    }
    let Values::F32(noise) = Values::new(Dtype::F32, 1 << 19, 7) else { unreachable!() };
    let uniform = |x: f32, _: usize| x;
    let positive = |x: f32, _: usize| x.abs();
    let spread = |x: f32, i: usize| x * (2.0f32).powi((i * 7919 % 61) as i32 - 30);
    let whole = |x: f32, _: usize| (x * 8_388_607.0).round();
    let tiny = |x: f32, _: usize| x * 1e-30;
    let near_one = |x: f32, i: usize| if i.is_multiple_of(2) { 1.0 + x / 4096.0 } else { -1.0 };
    let with_denormals = |x: f32, i: usize| if i.is_multiple_of(3) { x * 1e-39 } else { x };
    type Kind = (&'static str, fn(f32, usize) -> f32);
    let kinds: [Kind; 7] = [
        ("uniform", uniform),
        ("positive", positive),
        ("sixty binary orders of magnitude", spread),
        ("24-bit integers", whole),
        ("tiny", tiny),
        ("cancelling", near_one),
        ("mixed with denormals", with_denormals),
    ];
    for (name, of) in kinds {
        for (m, n, k) in [(40, 50, 96), (33, 65, 1500), (9, 9, 20_000)] {
            let some = |from: usize, len: usize| -> Vec<f32> {
                noise[from..][..len].iter().enumerate().map(|(i, x)| of(*x, i)).collect()
            };
            let a = some(0, m * k);
            let b =
                if name == "tiny" { noise[m * k..][..n * k].to_vec() } else { some(m * k, n * k) };
            let (tiles, plain) =
                [Level::Amx, Level::Avx512].map(|level| error(level, &a, &b, (m, n, k))).into();
            println!("{name}, k = {k}: {tiles:.2e} on AMX, {plain:.2e} with FMA");
            // A little more for long k, where adding the pieces, which both do in the same way, causes all of the error.
            let allowed = if k > 10_000 { 1.2 * plain } else { plain };
            assert!(tiles <= allowed, "{name}, k = {k}: {tiles:e} on AMX, {plain:e} with FMA");
        }
    }
}
