//! The secret that all ranks of a job share. It is never printed, and its memory is erased on drop.

use std::fmt;
use std::io;
use std::sync::atomic::{Ordering, compiler_fence};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::entropy::random_bytes;

/// 32 secret bytes. Each clone is erased when it is dropped.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A random secret for a new job.
    pub fn random() -> io::Result<Secret> {
        random_bytes().map(Secret)
    }

    /// Parses the 64 hexadecimal digits of [`Secret::to_hex`].
    ///
    /// ```
    /// use lockstep_comm::wire::Secret;
    /// let secret = Secret::from_hex(&"0f".repeat(32)).unwrap();
    /// assert_eq!(secret.to_hex(), "0f".repeat(32));
    /// assert_eq!(format!("{secret:?}"), "Secret(..)");
    /// ```
    pub fn from_hex(text: &str) -> Result<Secret, SecretError> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(SecretError::Length { found: digits.len() });
        }
        let mut secret = Secret([0; 32]);
        for (index, &digit) in digits.iter().enumerate() {
            let value = (digit as char).to_digit(16).ok_or(SecretError::NotHex { index })?;
            secret.0[index / 2] = secret.0[index / 2] << 4 | value as u8;
        }
        Ok(secret)
    }

    /// The secret as 64 hexadecimal digits, for other hosts. Do not log it.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The key of one generation of the job. It reveals nothing about the keys of other generations.
    pub fn for_generation(&self, generation: u32) -> Secret {
        let generation = generation.to_le_bytes();
        finish(self.mac(&[b"lockstep key of generation ", &generation]))
    }

    /// A key for another purpose. It reveals nothing about this secret or keys with other labels.
    pub fn derive(&self, label: &[u8]) -> Secret {
        finish(self.mac(&[b"lockstep key labelled ", label]))
    }

    /// HMAC of the concatenated `parts`. To be unambiguous, only the last part may have a variable length.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts any key length");
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

fn finish(mac: Hmac<Sha256>) -> Secret {
    Secret(mac.finalize().into_bytes().into())
}

impl Drop for Secret {
    fn drop(&mut self) {
        for byte in &mut self.0 {
            // The compiler may remove plain stores to memory that is about to be freed.
            // SAFETY: `byte` is a valid, aligned, exclusive reference.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
        compiler_fence(Ordering::SeqCst);
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Error of [`Secret::from_hex`]. Contains positions only, because the text may be most of a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SecretError {
    Length { found: usize },
    NotHex { index: usize },
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretError::Length { found } => write!(
                f,
                "the job's secret must have 64 hexadecimal digits (got {found} bytes); \
                 copy the complete LOCKSTEP_TOKEN"
            ),
            SecretError::NotHex { index } => write!(
                f,
                "byte {index} of the job's secret is not a hexadecimal digit; \
                 copy LOCKSTEP_TOKEN without quotes or spaces"
            ),
        }
    }
}

impl std::error::Error for SecretError {}
