//! One body, compiled for every level: kernels are written as plain loops in generic functions, and LLVM
//! turns them into the vectors of each instruction set. Holds no arithmetic of its own.

/// What a body may ask of the instruction set it is compiled for.
pub(crate) trait Isa {
    /// `a * b + c`: rounded once where the processor does so in one instruction, else twice. (A processor
    /// without it would call a function for each element.)
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Instruction sets with fused multiply-add.
pub(crate) struct Fused;

/// Those without it.
pub(crate) struct Plain;

impl Isa for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Isa for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Sums are kept in this many lanes, in every level's version, so that the order of additions is written in
/// the program and not chosen by the compiler: four registers of AVX-512, enough to hide an addition's
/// latency.
pub(crate) const LANES: usize = 64;

/// Adds up the lanes of a sum, pairwise.
#[inline(always)]
pub(crate) fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Compiles a function for each level and picks one by its first argument. The first type parameter stands
/// for the instruction set:
///
/// ```ignore
/// leveled! {
///     fn add<I, E: Float>(a: &mut [E], b: &[E]) { … }
/// }
/// add(cpu.level, a, b);
/// ```
///
/// What the body calls must be `#[inline(always)]`, and closures have no place in it: a function that is
/// not inlined is compiled without the level's instructions.
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
                body::<$crate::cpu::simd::Fused, $($g),*>($($arg),*)
            }

            #[allow(clippy::too_many_arguments, reason = "as above")]
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma,avx2")]
            fn avx2<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::simd::Fused, $($g),*>($($arg),*)
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
/// ```ignore
/// let (dot, norm) = lane_sums!((x in xs, y in ys) dot = I::fma(x, y, dot), norm = I::fma(x, x, norm));
/// ```
macro_rules! lane_sums {
    (($($v:ident in $slice:expr),+) $($sum:ident = $next:expr),+) => {{
        use $crate::cpu::simd::{LANES, total};
        $(let mut $sum = [0f32; LANES];)+
        let slices = ($(&$slice[..],)+);
        let ($($v,)+) = slices;
        lane_sums!(@same $($v)+);
        let whole = { let lens = [$($v.len()),+]; lens[0] / LANES };
        for chunk in 0..whole {
            $(let $v = &$v[chunk * LANES..][..LANES];)+
            for l in 0..LANES {
                $(let $v = $crate::Float::wide($v[l]);)+
                $($sum[l] = { let $sum = $sum[l]; $next };)+
            }
        }
        $(let $v = &$v[whole * LANES..];)+
        let rest = { let lens = [$($v.len()),+]; lens[0] };
        for l in 0..rest {
            $(let $v = $crate::Float::wide($v[l]);)+
            $($sum[l] = { let $sum = $sum[l]; $next };)+
        }
        ($(total($sum)),+)
    }};
    (@same $first:ident $($other:ident)*) => {
        $(assert_eq!($first.len(), $other.len(), "a sum runs over slices of one length");)*
    };
}

pub(crate) use {lane_sums, leveled};
