//! Checks kernels on a machine without a GPU: all of them compile for every architecture, and none spills many registers.

use crate::{CudaError, Nvrtc, Result, Source};

/// The architectures that kernels are checked for.
pub const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

/// Bytes that a kernel may spill. Versions of the compiler differ in a few.
const FEW_BYTES: u32 = 32;

/// Compiles `sources` for all architectures, which share the cores. Fails on kernels that spill more than a few bytes of
/// registers.
pub fn check_compiles(sources: &[&Source]) -> Result<()> {
    let nvrtc = Nvrtc::load()?;
    let check_all =
        |architecture| sources.iter().try_for_each(|source| check(&nvrtc, source, architecture));
    std::thread::scope(|scope| {
        let threads =
            ARCHITECTURES.map(|architecture| scope.spawn(move || check_all(architecture)));
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("the compiler does not panic"))
    })
}

fn check(nvrtc: &Nvrtc, source: &Source, architecture: &str) -> Result<()> {
    let options = ["--ptxas-options=-v"];
    let log = nvrtc.compile(source.name, &source.text(), architecture, &options)?.log;
    let fail =
        |what: String| Err(CudaError::new(format!("{}.cu on {architecture} {what}", source.name)));
    let spills = spilling(&log);
    if !spills.is_empty() {
        return fail(format!("spills registers: {spills:?}"));
    }
    if !log.contains("registers") {
        return fail("has no register counts in the compiler's log".to_string());
    }
    Ok(())
}

/// Kernels of a compiler log that store more than a few bytes of registers to memory.
fn spilling(log: &str) -> Vec<String> {
    let (mut kernel, mut spilling) = (String::new(), Vec::new());
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            kernel = name.trim().to_string();
        }
        let stores = line.split_once(" bytes spill stores").map(|(before, _)| before);
        let bytes = stores.and_then(|before| before.rsplit(' ').next()?.parse::<u32>().ok());
        if bytes.is_some_and(|bytes| bytes > FEW_BYTES) {
            spilling.push(format!("{kernel}: {}", line.trim()));
        }
    }
    spilling
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_found_in_a_log() {
        let line = |name, bytes| {
            format!(
                "ptxas info    : Function properties for {name}\n    \
                 8 bytes stack frame, {bytes} bytes spill stores, 8 bytes spill loads\n"
            )
        };
        let log = [line("none", 0), line("few", 12), line("many", 96)].concat();
        let spills = spilling(&log);
        assert_eq!(spills.len(), 1);
        assert!(spills[0].starts_with("many: 8 bytes"), "{spills:?}");
    }
}
