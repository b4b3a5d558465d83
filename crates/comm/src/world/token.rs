//! The token shared by the processes of a job: 32 random bytes as 64 hex digits. Never printed, not even by `Debug`, and
//! never put on a command line.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const HEX_DIGITS: usize = 64;
/// Bytes of a token file that are read; a token needs 64.
const LONGEST_FILE: u64 = 1 << 10;

/// Instructions for error messages about a missing token.
pub const HOW_TO_MAKE: &str = "make one with `(umask 077; openssl rand -hex 32 > FILE)` (or `head -c 32 \
     /dev/urandom | xxd -p -c 64`), and give every node the same file, which only you may read";

/// Where a process reads its job's token.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum TokenSource {
    /// The hex digits themselves, from `LOCKSTEP_TOKEN`.
    Env(String),
    /// A file with the hex digits, from `LOCKSTEP_TOKEN_FILE`.
    File(PathBuf),
    #[default]
    None,
}

impl TokenSource {
    /// The hex digits in lower case; `None` without a token.
    pub fn load(&self) -> Result<Option<String>, TokenError> {
        match self {
            TokenSource::Env(hex) => checked(hex, "LOCKSTEP_TOKEN").map(Some),
            TokenSource::File(path) => read(path).map(Some),
            TokenSource::None => Ok(None),
        }
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenSource::Env(_) => f.write_str("Env(..)"),
            TokenSource::File(path) => f.debug_tuple("File").field(path).finish(),
            TokenSource::None => f.write_str("None"),
        }
    }
}

pub enum TokenError {
    /// Not 64 hex digits. The text itself is not reported.
    Malformed {
        place: String,
        characters: usize,
    },
    Unreadable {
        path: PathBuf,
        cause: io::Error,
    },
    /// Other users have permissions for the file.
    Exposed {
        path: PathBuf,
        mode: u32,
    },
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenError::Malformed { place, characters } => write!(
                f,
                "the token in {place} is not {HEX_DIGITS} hex digits (it has {characters} characters); {HOW_TO_MAKE}"
            ),
            TokenError::Unreadable { path, cause } => {
                write!(f, "cannot read the token file {}: {cause}", path.display())
            }
            TokenError::Exposed { path, mode } => write!(
                f,
                "other users can access the token file {} (its mode is {mode:o}); run `chmod 600` on it, and make a \
                 new token if someone may have read this one",
                path.display()
            ),
        }
    }
}

impl std::error::Error for TokenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            TokenError::Malformed { .. } | TokenError::Exposed { .. } => None,
            TokenError::Unreadable { cause, .. } => Some(cause),
        }
    }
}

/// A new random token.
pub fn random() -> io::Result<String> {
    let mut bytes = [0u8; HEX_DIGITS / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut hex = String::with_capacity(HEX_DIGITS);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    Ok(hex)
}

fn read(path: &Path) -> Result<String, TokenError> {
    let unreadable = |cause| TokenError::Unreadable { path: path.to_path_buf(), cause };
    let file = File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(TokenError::Exposed { path: path.to_path_buf(), mode });
    }
    let mut text = String::new();
    file.take(LONGEST_FILE).read_to_string(&mut text).map_err(unreadable)?;
    checked(&text, &path.display().to_string())
}

fn checked(text: &str, place: &str) -> Result<String, TokenError> {
    let hex = text.trim();
    if hex.len() == HEX_DIGITS && hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(hex.to_ascii_lowercase());
    }
    Err(TokenError::Malformed { place: place.to_string(), characters: hex.chars().count() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_tokens_are_valid_and_distinct() {
        let (first, second) = (random().unwrap(), random().unwrap());
        assert_eq!(checked(&first, "test").unwrap(), first);
        assert_ne!(first, second);
    }

    #[test]
    fn a_token_has_64_hex_digits() {
        let good = "0F".repeat(32);
        for (text, ok) in [
            (good.clone(), true),
            (format!("  {good}\n"), true),
            (good[1..].to_string(), false),
            (format!("{good}0"), false),
            ("zz".repeat(32), false),
            (String::new(), false),
        ] {
            assert_eq!(TokenSource::Env(text.clone()).load().is_ok(), ok, "{text}");
        }
    }

    #[test]
    fn a_token_file_that_others_can_read_is_refused() {
        let path = std::env::temp_dir().join(format!("lockstep-token-{}", std::process::id()));
        let token = random().unwrap();
        std::fs::write(&path, &token).unwrap();
        let load = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            TokenSource::File(path.clone()).load()
        };
        for mode in [0o644, 0o640, 0o604, 0o602] {
            let error = load(mode).unwrap_err().to_string();
            assert!(error.contains(&format!("{mode:o}")) && error.contains("chmod 600"), "{error}");
            assert!(!error.contains(&token), "{error}");
        }
        for mode in [0o600, 0o400] {
            assert_eq!(load(mode).unwrap(), Some(token.clone()));
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn neither_debug_nor_errors_show_a_token() {
        let secret = "ab".repeat(31);
        let source = TokenSource::Env(secret.clone());
        assert!(!format!("{source:?}").contains(&secret));
        let error = source.load().unwrap_err();
        assert!(!format!("{error} {error:?}").contains(&secret));
    }
}
