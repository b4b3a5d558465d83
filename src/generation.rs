//! The numbers of a run's generations, in its folder: each start of its ranks has a higher one than any before, also
//! when the launcher itself was started anew.

use std::fs;
use std::path::Path;

use anyhow::Context;

/// The number of the next generation, which is begun by asking for it.
pub fn next(run: &Path) -> anyhow::Result<u32> {
    let path = run.join("generation");
    let next = match fs::read_to_string(&path) {
        Ok(text) => {
            let last: u32 = text.trim().parse().with_context(|| {
                format!("{} holds {text:?}, which is no number", path.display())
            })?;
            last + 1
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let aside = run.join(".generation.partial");
    fs::write(&aside, format!("{next}\n"))
        .and_then(|()| fs::rename(&aside, &path))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(next)
}
