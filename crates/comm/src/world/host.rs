//! What a rank knows of the host it is on: whether another can share memory with it, and a secret
//! for jobs that never leave it.

use crate::wire::Secret;
use crate::world::identity::{Identity, Launcher};
use crate::world::token::HOW_TO_MAKE;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Equal for processes that run under one kernel and see each other's process numbers.
pub(crate) fn kernel_key() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_string();
    let boot = read("/proc/sys/kernel/random/boot_id");
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{boot}/{}", processes.display())
}

/// Equal for ranks that may share memory: those under one kernel, except that nodes which a launcher
/// tells apart stay apart, even if they are one machine.
pub(crate) fn host_key(identity: &Identity) -> String {
    let node = match identity.launcher {
        Launcher::Explicit => identity.node.to_string(),
        // Elsewhere the node's number is a guess.
        _ => String::new(),
    };
    format!("{}/{node}", kernel_key())
}

/// The host as people call it.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

/// The job's secret: as given; or, for a job on one host, derived from one that only this user's
/// processes on this host can read.
pub(crate) fn job_secret(identity: &Identity) -> Result<Secret, String> {
    if let Some(hex) = identity.token.load().map_err(|e| e.to_string())? {
        return Secret::from_hex(&hex).map_err(|e| format!("the job's token is unusable: {e}"));
    }
    if identity.local_size < identity.size {
        return Err(format!(
            "ranks on several hosts need a secret that all of them know: {HOW_TO_MAKE}"
        ));
    }
    // SAFETY: takes nothing and cannot fail.
    let user = unsafe { libc::getuid() };
    let folder = PathBuf::from(format!("/tmp/lockstep-{user}"));
    let secret = user_secret(&folder, user)
        .map_err(|e| format!("the secret in {} cannot be used: {e}", folder.display()))?;
    Ok(secret.derive(format!("{}:{}", identity.master_addr, identity.master_port).as_bytes()))
}

/// The secret in a folder that belongs to this user alone; made on first use.
fn user_secret(folder: &Path, user: u32) -> io::Result<Secret> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let about = std::fs::symlink_metadata(folder)?;
    if !about.is_dir() || about.uid() != user || about.mode() & 0o077 != 0 {
        let what = "the folder must belong to this user and be closed to all others (mode 700)";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    let path = folder.join("secret");
    if !path.exists() {
        // Written aside and linked into place: of several ranks that try at once, one succeeds, and
        // nobody reads half a secret.
        let aside = folder.join(format!("new-{}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(Secret::random()?.to_hex().as_bytes())?;
        match std::fs::hard_link(&aside, &path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        std::fs::remove_file(&aside)?;
    }
    Secret::from_hex(std::fs::read_to_string(&path)?.trim()).map_err(io::Error::other)
}
