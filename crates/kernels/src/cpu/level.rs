//! Instruction set levels of the processor; each level includes the ones below.

/// Instruction set level, by which kernels select their version once per call.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Plain Rust, on any target.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 BF16 and AMX BF16 in addition, with the operating system's permission.
    Amx,
}

impl Level {
    /// The highest level of this processor, limited by `LOCKSTEP_LEVEL`. On Linux, AMX tile state must be requested from
    /// the kernel; that happens here, once for the whole process.
    ///
    /// # Panics
    /// If `LOCKSTEP_LEVEL` is invalid (see `Level::from_env`).
    pub fn of_this_machine() -> Level {
        static DETECTED: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
        *DETECTED.get_or_init(|| match Level::from_env() {
            Ok(limit) => limit.unwrap_or(Level::Amx).min(detect()),
            Err(error) => panic!("{error}"),
        })
    }

    /// The level in `LOCKSTEP_LEVEL`, if it is set, which limits the instructions used.
    pub fn from_env() -> Result<Option<Level>, String> {
        let Some(name) = std::env::var_os("LOCKSTEP_LEVEL") else { return Ok(None) };
        let level = name.to_string_lossy().parse();
        level.map(Some).map_err(|error| format!("LOCKSTEP_LEVEL={}: {error}", name.display()))
    }

    /// All levels up to and including this one.
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
        Level::Amx.and_below().find(named).ok_or("unknown level; use portable, avx2, avx512 or amx")
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    match (avx2, avx512, bf16 && has_amx_bf16() && request_tile_state()) {
        (_, _, true) => Level::Amx,
        (_, true, _) => Level::Avx512,
        (true, _, _) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// CPUID leaf 7: EDX bit 24 is AMX-TILE, bit 22 AMX-BF16.
#[cfg(target_arch = "x86_64")]
fn has_amx_bf16() -> bool {
    let edx = std::arch::x86_64::__cpuid_count(7, 0).edx;
    edx >> 24 & 1 == 1 && edx >> 22 & 1 == 1
}

/// Requests permission to use tile state (XFEATURE_XTILEDATA, number 18) from Linux.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_tile_state() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and accesses no memory; an old kernel returns EINVAL.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_tile_state() -> bool {
    false
}
