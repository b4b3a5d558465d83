//! Files that are kept between runs: machine code of kernels and selected algorithms.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// `LOCKSTEP_CACHE`, or `lockstep` in the user's cache folder. None if there is no such folder.
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    variable("LOCKSTEP_CACHE").map(PathBuf::from).or_else(|| {
        let caches = variable("XDG_CACHE_HOME").map(PathBuf::from);
        let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
        caches.or_else(home).map(|caches| caches.join("lockstep"))
    })
}

/// A 64-bit FNV-1a hash of texts and their lengths.
pub fn key(texts: &[&str]) -> u64 {
    let bytes = texts
        .iter()
        .flat_map(|text| (text.len() as u64).to_le_bytes().into_iter().chain(text.bytes()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Waits until no other process holds the lock of a file. It is released when the result is dropped.
pub fn lock(file: &Path) -> io::Result<File> {
    std::fs::create_dir_all(file.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
    let lock = File::options().create(true).append(true).open(file.with_extension("lock"))?;
    lock.lock()?;
    Ok(lock)
}

/// Writes a file whole or not at all, so that other processes never read a part of it.
pub fn store(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::create_dir_all(folder)?;
    let part = file.with_extension(format!("part-{}", std::process::id()));
    std::fs::write(&part, bytes)?;
    std::fs::rename(&part, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_every_text_and_on_where_they_end() {
        let keys = [key(&["ab", "c"]), key(&["a", "bc"]), key(&["ab", "d"]), key(&["abc"])];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b));
        }
    }

    #[test]
    fn stored_files_are_complete_and_leave_nothing_behind() {
        let folder = std::env::temp_dir().join(format!("lockstep-cache-{}", std::process::id()));
        let file = folder.join("a/b.cubin");
        store(&file, b"first").unwrap();
        store(&file, b"second").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.join("a")).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
