//! What the bits of a multiply do not depend on, and how far they are from exact sums.

use super::gemm::{DTYPES, NT, Values, case, outcome};
use half::bf16;
use lockstep_kernels::Dtype;
use lockstep_kernels::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use lockstep_kernels::cpu::{Cpu, Level};

/// Above the path for few rows, a row's bits do not depend on how many rows there are.
#[test]
fn a_row_is_the_same_among_fewer() {
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

/// Rows that begin on a cache line are read as they lie, and others packed: the same bits, however often columns come in
/// chunks, with rows that fill no panel, and with pieces of k that fill no tile.
#[test]
fn rows_that_lie_well_give_the_same_bits() {
    for (m, n, k, stride) in [
        (1100, 1300, 1024, 1024),
        (200, 600, 2112, 2112),
        (300, 1200, 2112, 2112),
        (300, 1200, 1050, 1056),
        // Rows in few sets of a cache, and a last piece so short that it would have room there.
        (300, 1200, 1056, 2048),
    ] {
        let Values::Bf16(b) = Values::new(Dtype::Bf16, n * k, 2) else { unreachable!() };
        let Values::Bf16(rows) = Values::new(Dtype::Bf16, m * stride, 1) else { unreachable!() };
        let multiply = |past: usize, threads, scale| {
            // The same values on a cache line, or some elements past one.
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
        // Sums in the output, and sums that wait.
        for scale in [1.0, 0.5] {
            let packed = multiply(5, 1, scale);
            assert!(multiply(0, 1, scale) == packed, "({m}, {n}, {k})");
            assert!(multiply(0, 3, scale) == packed, "({m}, {n}, {k}) on three threads");
        }
    }
}

/// Root of the mean squared error of one product against sums in f64, relative to what sums of such products are like.
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

/// Tiles multiply bf16, but an f32 is three of them: no bit of it may be lost on the way.
#[test]
fn f32_on_tiles_is_as_exact_as_multiply_adds() {
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
    let beside_denormals = |x: f32, i: usize| if i.is_multiple_of(3) { x * 1e-39 } else { x };
    type Kind = (&'static str, fn(f32, usize) -> f32);
    let kinds: [Kind; 7] = [
        ("uniform", uniform),
        ("positive", positive),
        ("of sixty powers of two", spread),
        ("of 24 bits", whole),
        ("tiny", tiny),
        ("cancelling", near_one),
        ("beside denormals", beside_denormals),
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
            println!("{name}, k = {k}: {tiles:.2e} on tiles, {plain:.2e} by multiply-adds");
            // A little more where the pieces of a long k, which are added alike, make all of the error.
            let allowed = if k > 10_000 { 1.2 * plain } else { plain };
            assert!(tiles <= allowed, "{name}, k = {k}: {tiles:e} on tiles, {plain:e} without");
        }
    }
}
