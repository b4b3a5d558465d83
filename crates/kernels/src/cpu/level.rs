//! Which instructions the processor has, in steps that each contain the one before.

/// How far the processor goes. Kernels pick their version by it, once per call.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// What every target of the compiler has.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// The same with AVX-512's and AMX's instructions for bf16, and the kernel's permission to use them.
    Amx,
}

impl Level {
    /// The highest level of the processor that this runs on, or the one that `LOCKSTEP_LEVEL` names where that is
    /// lower. AMX needs a word with the kernel (Linux hands out tile state on request only); it is asked here, and
    /// holds for the whole process.
    ///
    /// # Panics
    /// When `LOCKSTEP_LEVEL` names none (see `Level::asked`).
    pub fn of_this_machine() -> Level {
        static FOUND: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
        *FOUND.get_or_init(|| match Level::asked() {
            Ok(asked) => asked.unwrap_or(Level::Amx).min(find()),
            Err(error) => panic!("{error}"),
        })
    }

    /// What `LOCKSTEP_LEVEL` names, if it is set: for those who want to know what the best instructions bring, or
    /// do without them.
    pub fn asked() -> Result<Option<Level>, String> {
        let Some(name) = std::env::var_os("LOCKSTEP_LEVEL") else { return Ok(None) };
        let level = name.to_string_lossy().parse();
        level.map(Some).map_err(|names| format!("LOCKSTEP_LEVEL={}: {names}", name.display()))
    }

    /// All levels up to this one.
    pub fn and_below(self) -> impl Iterator<Item = Level> {
        [Level::Portable, Level::Avx2, Level::Avx512, Level::Amx]
            .into_iter()
            .filter(move |level| *level <= self)
    }
}

impl std::str::FromStr for Level {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Level, &'static str> {
        let named = |level: &Level| format!("{level:?}").eq_ignore_ascii_case(name);
        Level::Amx.and_below().find(named).ok_or("one of portable, avx2, avx512, amx")
    }
}

#[cfg(target_arch = "x86_64")]
fn find() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    match (avx2, avx512, bf16 && has_amx_bf16() && may_use_tiles()) {
        (_, _, true) => Level::Amx,
        (_, true, _) => Level::Avx512,
        (true, _, _) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn find() -> Level {
    Level::Portable
}

/// CPUID leaf 7: EDX bit 24 is AMX-TILE, bit 22 AMX-BF16.
#[cfg(target_arch = "x86_64")]
fn has_amx_bf16() -> bool {
    let edx = std::arch::x86_64::__cpuid_count(7, 0).edx;
    edx >> 24 & 1 == 1 && edx >> 22 & 1 == 1
}

/// Asks Linux for the tile registers' state (XFEATURE_XTILEDATA, number 18).
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours; an old kernel answers EINVAL.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}
