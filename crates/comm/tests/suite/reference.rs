//! Expected results of collectives, and inputs that every element type represents exactly.

use half::{bf16, f16};
use lockstep_comm::{Element, Op};

/// A number type of the tests.
pub trait Number: Element {
    fn of(n: u32) -> Self;
    fn combine(values: &[Self], op: Op) -> Self;
}

macro_rules! numbers {
    ($($t:ty, $from:expr, $to:expr, $wide:ty);* $(;)?) => {$(
        impl Number for $t {
            fn of(n: u32) -> $t {
                ($from)(n)
            }

            fn combine(values: &[$t], op: Op) -> $t {
                let wide: Vec<$wide> = values.iter().map(|v| ($to)(*v)).collect();
                let n = wide.len() as $wide;
                let folded = wide.iter().copied().reduce(|a, b| match op {
                    Op::Sum | Op::Mean => a + b,
                    Op::Product => a * b,
                    Op::Min => if a < b { a } else { b },
                    Op::Max => if a > b { a } else { b },
                });
                let folded = folded.expect("at least one rank");
                let value = if op == Op::Mean { folded / n } else { folded };
                <$t as Narrow<$wide>>::narrow(value)
            }
        }
    )*};
}

trait Narrow<W> {
    fn narrow(wide: W) -> Self;
}

macro_rules! narrow {
    ($($t:ty, $wide:ty, $f:expr);* $(;)?) => {$(
        impl Narrow<$wide> for $t {
            fn narrow(wide: $wide) -> $t {
                ($f)(wide)
            }
        }
    )*};
}

narrow!(
    f32, f64, |w| w as f32;
    f64, f64, |w| w;
    f16, f64, f16::from_f64;
    bf16, f64, bf16::from_f64;
    i32, i128, |w| w as i32;
    i64, i128, |w| w as i64;
    u8, i128, |w| w as u8;
);

numbers!(
    f32, |n| n as f32, f64::from, f64;
    f64, f64::from, |v| v, f64;
    f16, |n| f16::from_f32(n as f32), |v: f16| v.to_f64(), f64;
    bf16, |n| bf16::from_f32(n as f32), |v: bf16| v.to_f64(), f64;
    i32, |n| n as i32, i128::from, i128;
    i64, i64::from, i128::from, i128;
    u8, |n| n as u8, i128::from, i128;
);

/// Input of a rank at an index: small, different for each rank, and such that every operator over eight
/// ranks is exact in every type (products of ones and at most three twos).
pub fn input<T: Number>(rank: usize, index: usize, op: Op) -> T {
    match op {
        Op::Product => T::of(if (index + rank).is_multiple_of(3) && rank < 5 { 2 } else { 1 }),
        // A mean must be exact in integers too: equal on all ranks.
        Op::Mean => T::of((index % 7) as u32),
        _ => T::of(((rank * 3 + index) % 9) as u32),
    }
}

/// A multiple of the periods of all inputs, and odd, so that data misplaced by whole pages is detected.
const PERIOD: usize = 63;

pub fn inputs<T: Number>(rank: usize, len: usize, op: Op) -> Vec<T> {
    repeated(len, |i| input(rank, i, op))
}

/// The combined inputs of all ranks.
pub fn combined<T: Number>(ranks: usize, len: usize, op: Op) -> Vec<T> {
    repeated(len, |i| {
        let values: Vec<T> = (0..ranks).map(|r| input(r, i, op)).collect();
        T::combine(&values, op)
    })
}

/// Computed for one period and repeated, so that large buffers are checked quickly.
fn repeated<T: Number>(len: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let period: Vec<T> = (0..PERIOD.min(len)).map(value).collect();
    let mut values = period.repeat(len.div_ceil(PERIOD));
    values.truncate(len);
    values
}
