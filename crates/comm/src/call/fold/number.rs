//! Arithmetic of each element type: its accumulator type and the loops over two sources.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use lockstep_types::Element;

/// One reduction over raw buffers.
pub(super) struct Job<'a> {
    pub sources: &'a [*const u8],
    pub destinations: &'a [*mut u8],
    pub bytes: usize,
    pub divisor: usize,
}

/// An element type and its accumulator type: half precisions are accumulated in f32 and rounded once
/// per fold.
pub(super) trait Number: Element {
    type Acc: Arithmetic;
    fn widen(from: &[Self], to: &mut [Self::Acc]);
    fn narrow(from: &[Self::Acc], to: &mut [Self]);
    /// `acc = acc ∘ from`; `scratch` holds the widened source if one is needed.
    fn absorb<O: Binary>(acc: &mut [Self::Acc], from: &[Self], scratch: &mut [Self::Acc]);
    /// Combines two sources in a single pass over memory, if the type supports it.
    ///
    /// # Safety
    /// As for `Fold::combine`.
    unsafe fn pair<O: Binary>(_job: &Job, _count: usize) -> bool {
        false
    }
}

macro_rules! plain_numbers {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Acc = $t;
            #[inline(always)]
            fn widen(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn absorb<O: Binary>(acc: &mut [$t], from: &[$t], _: &mut [$t]) {
                for (a, b) in acc.iter_mut().zip(from) {
                    *a = O::of(*a, *b);
                }
            }
            #[inline(always)]
            unsafe fn pair<O: Binary>(job: &Job, count: usize) -> bool {
                // SAFETY: guaranteed by the caller. A constant divisor of one costs nothing.
                unsafe {
                    match job.divisor {
                        1 => pair(job, count, |a: $t, b: $t| O::of(a, b)),
                        n => pair(job, count, |a: $t, b: $t| O::of(a, b).over(n)),
                    }
                }
            }
        }
    )*};
}
plain_numbers!(f32, f64, i32, i64, u8, u32);

/// Combines two sources element by element. Aliasing buffers are identified first, so that the loops
/// over distinct ones vectorize. Returns false, having done nothing, if there is more than one
/// destination besides the sources.
///
/// # Safety
/// As for `Fold::combine`.
#[inline(always)]
unsafe fn pair<T: Copy>(job: &Job, count: usize, of: impl Fn(T, T) -> T) -> bool {
    let (a, b) = (job.sources[0].cast_mut(), job.sources[1].cast_mut());
    let has = |source: *mut u8| job.destinations.contains(&source);
    let mut others = job.destinations.iter().copied().filter(|p| *p != a && *p != b);
    let other = others.next();
    if others.next().is_some() {
        return false;
    }
    // SAFETY: different pointers do not overlap, and all are `count` elements long; each is turned into
    // a slice once.
    let read = |p: *mut u8| unsafe { std::slice::from_raw_parts(p.cast::<T>(), count) };
    // SAFETY: as above.
    let write = |p: *mut u8| unsafe { std::slice::from_raw_parts_mut(p.cast::<T>(), count) };
    match (has(a), has(b), other) {
        (true, true, None) => {
            for (a, b) in write(a).iter_mut().zip(write(b)) {
                *a = of(*a, *b);
                *b = *a;
            }
        }
        (true, false, Some(c)) => {
            for ((a, b), c) in write(a).iter_mut().zip(read(b)).zip(write(c)) {
                *a = of(*a, *b);
                *c = *a;
            }
        }
        (false, true, Some(c)) => {
            for ((a, b), c) in read(a).iter().zip(write(b)).zip(write(c)) {
                *b = of(*a, *b);
                *c = *b;
            }
        }
        (true, false, None) => {
            for (a, b) in write(a).iter_mut().zip(read(b)) {
                *a = of(*a, *b);
            }
        }
        (false, true, None) => {
            for (a, b) in read(a).iter().zip(write(b)) {
                *b = of(*a, *b);
            }
        }
        (false, false, Some(c)) => {
            for ((a, b), c) in read(a).iter().zip(read(b)).zip(write(c)) {
                *c = of(*a, *b);
            }
        }
        (true, true, Some(_)) | (false, false, None) => return false,
    }
    true
}

macro_rules! half_numbers {
    ($($t:ty, $widen:expr, $narrow:expr);*) => {$(
        impl Number for $t {
            type Acc = f32;
            #[inline(always)]
            fn widen(from: &[$t], to: &mut [f32]) {
                ($widen)(from, to);
            }
            #[inline(always)]
            fn narrow(from: &[f32], to: &mut [$t]) {
                ($narrow)(from, to);
            }
            #[inline(always)]
            fn absorb<O: Binary>(acc: &mut [f32], from: &[$t], scratch: &mut [f32]) {
                Self::widen(from, scratch);
                for (a, b) in acc.iter_mut().zip(&*scratch) {
                    *a = O::of(*a, *b);
                }
            }
        }
    )*};
}
half_numbers!(
    f16, |from: &[f16], to: &mut [f32]| from.convert_to_f32_slice(to),
        |from: &[f32], to: &mut [f16]| to.convert_from_f32_slice(from);
    bf16, bf16_to_f32, bf16_from_f32
);

/// A bf16 is the upper half of an f32. Written as a loop because it vectorizes; a call to `half` does not.
#[inline(always)]
fn bf16_to_f32(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Rounds to nearest, ties to even; a NaN stays a NaN.
#[inline(always)]
fn bf16_from_f32(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        let quiet = (bits >> 16) as u16 | 0x40;
        *to = bf16::from_bits(if from.is_nan() { quiet } else { rounded });
    }
}

pub(super) trait Arithmetic: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
    fn over(self, n: usize) -> Self;
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn plus(self, other: $t) -> $t { self + other }
            #[inline(always)]
            fn times(self, other: $t) -> $t { self * other }
            #[inline(always)]
            fn least(self, other: $t) -> $t {
                if self < other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn greatest(self, other: $t) -> $t {
                if self > other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn over(self, n: usize) -> $t { self / n as $t }
        }
    )*};
}
floats!(f32, f64);

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn plus(self, other: $t) -> $t { self.wrapping_add(other) }
            #[inline(always)]
            fn times(self, other: $t) -> $t { self.wrapping_mul(other) }
            #[inline(always)]
            fn least(self, other: $t) -> $t { self.min(other) }
            #[inline(always)]
            fn greatest(self, other: $t) -> $t { self.max(other) }
            #[inline(always)]
            fn over(self, n: usize) -> $t { self / n as $t }
        }
    )*};
}
integers!(i32, i64, u8, u32);

pub(super) trait Binary {
    fn of<A: Arithmetic>(a: A, b: A) -> A;
}

pub(super) struct Add;
pub(super) struct Times;
pub(super) struct Least;
pub(super) struct Greatest;

impl Binary for Add {
    #[inline(always)]
    fn of<A: Arithmetic>(a: A, b: A) -> A {
        a.plus(b)
    }
}

impl Binary for Times {
    #[inline(always)]
    fn of<A: Arithmetic>(a: A, b: A) -> A {
        a.times(b)
    }
}

impl Binary for Least {
    #[inline(always)]
    fn of<A: Arithmetic>(a: A, b: A) -> A {
        a.least(b)
    }
}

impl Binary for Greatest {
    #[inline(always)]
    fn of<A: Arithmetic>(a: A, b: A) -> A {
        a.greatest(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_equals_that_of_half() {
        let special = [f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX, 1.0];
        let spread = (0..1u32 << 16).map(|i| f32::from_bits(i.wrapping_mul(65_521)));
        for value in special.into_iter().chain(spread) {
            let mut ours = [bf16::ZERO];
            bf16_from_f32(&[value], &mut ours);
            assert_eq!(ours[0].to_bits(), bf16::from_f32(value).to_bits(), "{value}");
        }
    }
}
