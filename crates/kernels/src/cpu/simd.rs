//! Function multiversioning: kernels are plain loops in generic functions, which LLVM vectorizes for each instruction
//! set. Contains no arithmetic of its own.

/// Partial sums of a reduction, at every level, so that the order of additions is fixed by the program and not by the
/// compiler: four registers of AVX-512, enough to hide the latency of an addition.
pub(crate) const LANES: usize = 64;

/// Operations that depend on the instruction set.
pub(crate) trait Isa {
    /// `a * b + c`, fused if the instruction set has fused multiply-add. (Otherwise `mul_add` would be a library call.)
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// Sum of all lanes: of the four quarters, then by repeated halving.
    fn sum_lanes(lanes: &[f32; LANES]) -> f32;
}

pub(crate) struct Avx512;
pub(crate) struct Avx2;
pub(crate) struct Portable;

#[cfg(target_arch = "x86_64")]
impl Isa for Avx512 {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    /// Written with intrinsics: LLVM would extract two lanes at a time.
    #[inline(always)]
    fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
        use std::arch::x86_64::*;
        // SAFETY: the four loads are within the array, and `multiversion!` uses this only on processors with
        // AVX-512 F and DQ.
        unsafe {
            let [a, b, c, d] = [0, 16, 32, 48].map(|l| _mm512_loadu_ps(lanes.as_ptr().add(l)));
            let one = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
            halves(_mm256_add_ps(_mm512_castps512_ps256(one), _mm512_extractf32x8_ps::<1>(one)))
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Isa for Avx2 {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
        use std::arch::x86_64::*;
        // SAFETY: the eight loads are within the array, and `multiversion!` uses this only on processors with AVX2.
        unsafe {
            let [a, b, c, d] = [0, 16, 32, 48].map(|l| _mm256_loadu_ps(lanes.as_ptr().add(l)));
            let [e, f, g, h] = [8, 24, 40, 56].map(|l| _mm256_loadu_ps(lanes.as_ptr().add(l)));
            let low = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
            halves(_mm256_add_ps(low, _mm256_add_ps(_mm256_add_ps(e, f), _mm256_add_ps(g, h))))
        }
    }
}

/// Sum of eight lanes.
///
/// # Safety
/// The processor must have AVX.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn halves(eight: std::arch::x86_64::__m256) -> f32 {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

impl Isa for Portable {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
        let mut sums = [0f32; 16];
        for l in 0..16 {
            sums[l] = (lanes[l] + lanes[l + 16]) + (lanes[l + 32] + lanes[l + 48]);
        }
        let mut width = 8;
        while width > 0 {
            for l in 0..width {
                sums[l] += sums[l + width];
            }
            width /= 2;
        }
        sums[0]
    }
}

/// Compiles a function for each level and selects one by its first argument. The first type parameter is the
/// instruction set:
///
/// ```text
/// multiversion! {
///     fn add<I, E: Float>(a: &mut [E], b: &[E]) { … }
/// }
/// add(cpu.level, a, b);
/// ```
///
/// Everything that the body calls must be `#[inline(always)]`, and it must not use closures: a function that is not
/// inlined is compiled without the level's instructions. Slices are cut to one length before a loop over their indices
/// (`let x = &x[..n]`): a remaining bounds check makes the tail of the loop scalar.
macro_rules! multiversion {
    ($($(#[$doc:meta])* $vis:vis fn $name:ident<$isa:ident $(, $g:ident: $bound:path)*>
        ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$doc])*
        $vis fn $name<$($g: $bound),*>(level: $crate::cpu::Level, $($arg: $ty),*) $(-> $ret)? {
            #[allow(clippy::extra_unused_type_parameters, reason = "not every body depends on the instruction set")]
            #[inline(always)]
            fn body<$isa: $crate::cpu::simd::Isa, $($g: $bound),*>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,avx2")]
            fn avx512<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::simd::Avx512, $($g),*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma,avx2")]
            fn avx2<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::simd::Avx2, $($g),*>($($arg),*)
            }

            use $crate::cpu::Level;
            match level {
                // SAFETY: a `Cpu` is only created with a level that the processor supports.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Amx => unsafe { avx512::<$($g),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2::<$($g),*>($($arg),*) },
                _ => body::<$crate::cpu::simd::Portable, $($g),*>($($arg),*),
            }
        }
    )*};
}

/// Sums over slices of equal length, with `LANES` partial sums. In the expressions, a slice's name is its element as
/// f32, and a sum's name is its current value:
///
/// ```text
/// let (dot, norm) = lane_sums!(I, (x in xs, y in ys) dot = I::fma(x, y, dot), norm = I::fma(x, x, norm));
/// ```
macro_rules! lane_sums {
    ($isa:ident, ($($v:ident in $slice:expr),+) $($sum:ident = $next:expr),+) => {{
        use $crate::cpu::simd::LANES;
        $(let mut $sum = [0f32; LANES];)+
        let slices = ($(&$slice[..],)+);
        let ($($v,)+) = slices;
        lane_sums!(@same $($v)+);
        let len = { let lens = [$($v.len()),+]; lens[0] };
        let mut at = 0;
        while at + LANES <= len {
            $(let $v = &$v[at..][..LANES];)+
            for l in 0..LANES {
                $(let $v = $crate::Float::as_f32($v[l]);)+
                $($sum[l] = { let $sum = $sum[l]; $next };)+
            }
            at += LANES;
        }
        // The rest, sixteen at a time and then one by one; always in the same lanes, so that the sums stay in registers.
        while at + 16 <= len {
            $(let $v = &$v[at..][..16];)+
            for l in 0..16 {
                $(let $v = $crate::Float::as_f32($v[l]);)+
                $($sum[l] = { let $sum = $sum[l]; $next };)+
            }
            at += 16;
        }
        $(let mut $sum = $isa::sum_lanes(&$sum);)+
        while at < len {
            $(let $v = $crate::Float::as_f32($v[at]);)+
            $($sum = $next;)+
            at += 1;
        }
        ($($sum),+)
    }};
    (@same $first:ident $($other:ident)*) => {
        $(assert_eq!($first.len(), $other.len(), "slices of a sum must have equal length");)*
    };
}

pub(crate) use {lane_sums, multiversion};
