//! Speed of the folder of runs on each host, and whether all hosts see the same folder.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use lockstep_comm::{Result, World};
use serde::{Deserialize, Serialize};

/// Results of a host's first rank. Other ranks have none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Storage {
    /// Bytes per second written and synchronized, and read.
    pub written: Option<f64>,
    pub read: Option<f64>,
    /// Whether this host sees a file that rank 0 wrote. None if there is only one host.
    pub shared: Option<bool>,
    pub error: Option<String>,
}

/// How long a file may take to appear on other hosts. NFS caches folders for longer, but looking a new name up asks the
/// server.
const APPEARS_WITHIN: Duration = Duration::from_secs(3);
const BLOCK: usize = 1 << 20;

/// Writes and reads a file per host. Collective.
pub(super) fn measure(
    world: &World,
    nodes: &[usize],
    folder: &Path,
    bytes: usize,
) -> Result<Storage> {
    let mine = nodes[world.rank()];
    let is_first = nodes.iter().position(|node| *node == mine) == Some(world.rank());
    let mut storage = Storage::default();
    // A name that no earlier test used.
    let mut tag = [std::process::id() as i64, epoch_nanos()];
    world.broadcast(&mut tag, 0)?;
    let marker = folder.join(format!("selftest-{}-{}", tag[0], tag[1]));
    let mut failed = None;
    if is_first {
        let own = marker.with_extension(format!("node{mine}"));
        match write_and_read(folder, &own, bytes) {
            Ok([written, read]) => (storage.written, storage.read) = (Some(written), Some(read)),
            Err(error) => failed = Some(error),
        }
        let _ = fs::remove_file(&own);
        if world.rank() == 0 && failed.is_none() {
            failed = fs::write(&marker, "rank 0 was here\n").err();
        }
    }
    world.barrier()?;
    if is_first && nodes.iter().any(|node| *node != nodes[0]) {
        storage.shared = Some(appears(&marker));
    }
    world.barrier()?;
    if world.rank() == 0 {
        let _ = fs::remove_file(&marker);
    }
    storage.error = failed.map(|error| format!("{}: {error}", folder.display()));
    Ok(storage)
}

fn epoch_nanos() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |time| time.as_nanos() as i64)
}

fn write_and_read(folder: &Path, path: &Path, bytes: usize) -> std::io::Result<[f64; 2]> {
    fs::create_dir_all(folder)?;
    let mut block: Vec<u8> = (0..BLOCK).map(|index| (index % 251) as u8).collect();
    let count = bytes.div_ceil(BLOCK).max(1);
    let start = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..count {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let written = start.elapsed().as_secs_f64();
    drop(file);
    let expected = block.clone();
    let start = Instant::now();
    let mut file = File::open(path)?;
    for _ in 0..count {
        file.read_exact(&mut block)?;
        if block != expected {
            return Err(std::io::Error::other("read other bytes than were written"));
        }
    }
    let read = start.elapsed().as_secs_f64();
    let total = (count * BLOCK) as f64;
    Ok([total / written.max(1e-9), total / read.max(1e-9)])
}

fn appears(path: &Path) -> bool {
    let start = Instant::now();
    while start.elapsed() < APPEARS_WITHIN {
        if path.exists() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}
