//! The host of a rank: a key that tells which ranks can share memory, and a secret for jobs on one host.

use crate::wire::Secret;
use crate::world::identity::{Identity, Launcher};
use crate::world::token::HOW_TO_MAKE;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Equal for processes that run under one kernel and in one process namespace.
pub(crate) fn kernel_key() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_string();
    let boot = read("/proc/sys/kernel/random/boot_id");
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{boot}/{}", processes.display())
}

/// Equal for ranks that may share memory: those under one kernel, unless their launcher gave them
/// different node numbers.
pub(crate) fn host_key(identity: &Identity) -> String {
    let node = match identity.launcher {
        Launcher::Explicit => identity.node.to_string(),
        // Elsewhere the node's number is a guess.
        _ => String::new(),
    };
    format!("{}/{node}", kernel_key())
}

/// Host name, for messages.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

/// The job's secret: as configured or, for a job on one host, derived from a secret that only this user's
/// processes on this host can read.
pub(crate) fn job_secret(identity: &Identity) -> Result<Secret, String> {
    if let Some(hex) = identity.token.load().map_err(|e| e.to_string())? {
        return Secret::from_hex(&hex).map_err(|e| format!("invalid job token: {e}"));
    }
    if identity.local_size < identity.size {
        return Err(format!("ranks on several hosts need a shared secret: {HOW_TO_MAKE}"));
    }
    // SAFETY: has no arguments and cannot fail.
    let user = unsafe { libc::getuid() };
    let folder = PathBuf::from(format!("/tmp/lockstep-{user}"));
    let secret = user_secret(&folder, user)
        .map_err(|e| format!("cannot use the secret in {}: {e}", folder.display()))?;
    Ok(secret.derive(format!("{}:{}", identity.master_addr, identity.master_port).as_bytes()))
}

/// The secret in a private folder of this user; created on first use.
fn user_secret(folder: &Path, user: u32) -> io::Result<Secret> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let metadata = std::fs::symlink_metadata(folder)?;
    if !metadata.is_dir() || metadata.uid() != user || metadata.mode() & 0o077 != 0 {
        let what = "the folder must belong to this user and have mode 700";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    let path = folder.join("secret");
    if !path.exists() {
        // Written to a temporary file and linked into place: of several ranks that try at once, one
        // succeeds, and nobody reads an incomplete secret.
        let temporary = folder.join(format!("new-{}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(Secret::random()?.to_hex().as_bytes())?;
        match std::fs::hard_link(&temporary, &path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        std::fs::remove_file(&temporary)?;
    }
    Secret::from_hex(std::fs::read_to_string(&path)?.trim()).map_err(io::Error::other)
}
