//! One body, compiled for every level: kernels are written as plain loops in generic functions, and LLVM
//! turns them into the vectors of each instruction set. Holds no arithmetic of its own.

/// Sums are kept in this many lanes, in every level's version, so that the order of additions is written in
/// the program and not chosen by the compiler: four registers of AVX-512, enough to hide an addition's
/// latency.
pub(crate) const LANES: usize = 64;

/// What a body may ask of the instruction set it is compiled for.
pub(crate) trait Isa {
    /// `a * b + c`: rounded once where the processor does so in one instruction, else twice. (A processor
    /// without it would call a function for each element.)
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// Adds up the lanes of a sum: quarters, then halves of what is left.
    fn total(lanes: &[f32; LANES]) -> f32;
}

pub(crate) struct Avx512;
pub(crate) struct Avx2;
pub(crate) struct Plain;

#[cfg(target_arch = "x86_64")]
impl Isa for Avx512 {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    /// By hand: left to itself LLVM takes the registers apart two lanes at a time.
    #[inline(always)]
    fn total(lanes: &[f32; LANES]) -> f32 {
        use std::arch::x86_64::*;
        // SAFETY: the four loads lie inside the array, and `leveled!` compiles this for processors with
        // AVX-512 F and DQ only.
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
    fn total(lanes: &[f32; LANES]) -> f32 {
        use std::arch::x86_64::*;
        // SAFETY: the eight loads lie inside the array, and `leveled!` compiles this for processors with AVX2
        // only.
        unsafe {
            let [a, b, c, d] = [0, 16, 32, 48].map(|l| _mm256_loadu_ps(lanes.as_ptr().add(l)));
            let [e, f, g, h] = [8, 24, 40, 56].map(|l| _mm256_loadu_ps(lanes.as_ptr().add(l)));
            let low = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
            halves(_mm256_add_ps(low, _mm256_add_ps(_mm256_add_ps(e, f), _mm256_add_ps(g, h))))
        }
    }
}

/// Adds up eight lanes.
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

impl Isa for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    fn total(lanes: &[f32; LANES]) -> f32 {
        let mut one = [0f32; 16];
        for l in 0..16 {
            one[l] = (lanes[l] + lanes[l + 16]) + (lanes[l + 32] + lanes[l + 48]);
        }
        let mut width = 8;
        while width > 0 {
            for l in 0..width {
                one[l] += one[l + width];
            }
            width /= 2;
        }
        one[0]
    }
}

/// Compiles a function for each level and picks one by its first argument. The first type parameter stands
/// for the instruction set:
///
/// ```text
/// leveled! {
///     fn add<I, E: Float>(a: &mut [E], b: &[E]) { … }
/// }
/// add(cpu.level, a, b);
/// ```
///
/// What the body calls must be `#[inline(always)]`, and closures have no place in it: a function that is
/// not inlined is compiled without the level's instructions. Slices are cut to one length before a loop over
/// their indices (`let x = &x[..n]`): a check that is left in it makes the last elements go one by one.
macro_rules! leveled {
    ($($(#[$doc:meta])* $vis:vis fn $name:ident<$isa:ident $(, $g:ident: $bound:path)*>
        ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "a kernel's body; its public face takes structs")]
        $vis fn $name<$($g: $bound),*>(level: $crate::cpu::Level, $($arg: $ty),*) $(-> $ret)? {
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters, reason = "as above")]
            #[inline(always)]
            fn body<$isa: $crate::cpu::simd::Isa, $($g: $bound),*>($($arg: $ty),*) $(-> $ret)? $body

            #[allow(clippy::too_many_arguments, reason = "as above")]
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,avx2")]
            fn avx512<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::simd::Avx512, $($g),*>($($arg),*)
            }

            #[allow(clippy::too_many_arguments, reason = "as above")]
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma,avx2")]
            fn avx2<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::simd::Avx2, $($g),*>($($arg),*)
            }

            use $crate::cpu::Level;
            match level {
                // SAFETY: a `Cpu` is only made of a level that its processor reaches.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Amx => unsafe { avx512::<$($g),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2::<$($g),*>($($arg),*) },
                _ => body::<$crate::cpu::simd::Plain, $($g),*>($($arg),*),
            }
        }
    )*};
}

/// Sums over slices of one length, in `LANES` lanes. Inside, each slice's name stands for its element, in
/// f32, and each sum's name for its value so far:
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
        // What is left, sixteen at a time and then one by one; always the same lanes, so that the sums stay
        // in registers.
        while at + 16 <= len {
            $(let $v = &$v[at..][..16];)+
            for l in 0..16 {
                $(let $v = $crate::Float::as_f32($v[l]);)+
                $($sum[l] = { let $sum = $sum[l]; $next };)+
            }
            at += 16;
        }
        $(let mut $sum = $isa::total(&$sum);)+
        while at < len {
            $(let $v = $crate::Float::as_f32($v[at]);)+
            $($sum = $next;)+
            at += 1;
        }
        ($($sum),+)
    }};
    (@same $first:ident $($other:ident)*) => {
        $(assert_eq!($first.len(), $other.len(), "a sum runs over slices of one length");)*
    };
}

pub(crate) use {lane_sums, leveled};
