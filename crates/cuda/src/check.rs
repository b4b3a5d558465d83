//! Checks kernels on a machine without a GPU: all of them compile for every architecture, and none spills registers.

use crate::{CudaError, Nvrtc, Result, Source};

/// The architectures that kernels are checked for.
pub const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

/// Compiles `sources` for all architectures, which share the cores. Fails on register spills in kernels that are not in
/// `may_spill`.
pub fn check_compiles(sources: &[&Source], may_spill: &[&str]) -> Result<()> {
    let nvrtc = Nvrtc::load()?;
    let check_all = |architecture| {
        sources.iter().try_for_each(|source| check(&nvrtc, source, architecture, may_spill))
    };
    std::thread::scope(|scope| {
        let threads =
            ARCHITECTURES.map(|architecture| scope.spawn(move || check_all(architecture)));
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("the compiler does not panic"))
    })
}

fn check(nvrtc: &Nvrtc, source: &Source, architecture: &str, may_spill: &[&str]) -> Result<()> {
    let options = ["--ptxas-options=-v"];
    let log = nvrtc.compile(source.name, &source.text(), architecture, &options)?.log;
    let fail =
        |what: String| Err(CudaError::new(format!("{}.cu on {architecture} {what}", source.name)));
    let spills = spilling(&log, may_spill);
    if !spills.is_empty() {
        return fail(format!("spills registers: {spills:?}"));
    }
    if !log.contains("registers") {
        return fail("has no register counts in the compiler's log".to_string());
    }
    Ok(())
}

/// Kernels of a compiler log that store registers to memory.
fn spilling(log: &str, may_spill: &[&str]) -> Vec<String> {
    let (mut kernel, mut spilling) = (String::new(), Vec::new());
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            kernel = name.trim().to_string();
        }
        let spills = line.contains("spill stores") && !line.contains(" 0 bytes spill stores");
        if spills && !may_spill.contains(&kernel.as_str()) {
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
        let log = "ptxas info    : Function properties for a\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Function properties for b\n    8 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n";
        let spills = spilling(log, &[]);
        assert_eq!(spills.len(), 1);
        assert!(spills[0].starts_with("b: 8 bytes"));
        assert!(spilling(log, &["b"]).is_empty());
    }
}
