//! Parsed values in a temporary file, for tables that do not fit in memory. The kernel writes and drops its pages as
//! needed; the file has no name and disappears with the process.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A file that pieces are appended to.
pub(crate) struct Spill {
    file: Mutex<(File, usize)>,
}

impl Spill {
    /// Creates a file in `folder` and removes its name.
    pub fn create(folder: &Path) -> Result<Spill> {
        std::fs::create_dir_all(folder).map_err(Error::system("create the folder", folder))?;
        let path = folder.join(format!("spill-{}-{:x}", std::process::id(), unique()));
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = open.map_err(Error::system("create", &path))?;
        std::fs::remove_file(&path).map_err(Error::system("unlink", &path))?;
        Ok(Spill { file: Mutex::new((file, 0)) })
    }

    /// Appends values and returns their byte offset.
    pub fn append(&self, values: &[f32]) -> std::io::Result<usize> {
        let mut guard = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (file, end) = &mut *guard;
        file.write_all(lockstep_comm::bytes_of(values))?;
        let start = *end;
        *end += size_of_val(values);
        Ok(start)
    }

    /// Maps all values that have been appended; `None` if there are none.
    pub fn map(self) -> std::io::Result<Option<Arc<Mmap>>> {
        let (file, end) = self.file.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        if end == 0 {
            return Ok(None);
        }
        // SAFETY: the file has no name, so nobody else writes it.
        Ok(Some(Arc::new(unsafe { Mmap::map(&file) }?)))
    }
}

/// A number that differs between the files of this process.
fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
