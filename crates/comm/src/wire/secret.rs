//! The job's secret: what every rank of one job knows and nobody else does.
//! Never prints itself, and leaves no copy behind in the memory it held.

use std::fmt;
use std::io;
use std::sync::atomic::{Ordering, compiler_fence};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::entropy::random_bytes;

/// Thirty-two secret bytes. Each clone wipes itself when it is dropped.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A fresh secret for a new job.
    pub fn random() -> io::Result<Secret> {
        random_bytes().map(Secret)
    }

    /// Reads the 64 hexadecimal digits that [`Secret::to_hex`] wrote.
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

    /// The secret as 64 hexadecimal digits, to hand to the other hosts. Not for a log.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The key of one generation of the job. It says nothing about the key of another, so what
    /// was proven with an old one proves nothing now.
    pub fn for_generation(&self, generation: u32) -> Secret {
        let generation = generation.to_le_bytes();
        finish(self.mac(&[b"lockstep key of generation ", &generation]))
    }

    /// A key for another use, named by its label; keys of different labels tell nothing of
    /// each other, nor of this one.
    pub fn derive(&self, label: &[u8]) -> Secret {
        finish(self.mac(&[b"lockstep key labelled ", label]))
    }

    /// The keyed hash of `parts`, one after the other. The caller keeps them unambiguous: at
    /// most one of them has a length that is not fixed, and it stands last.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes any key length");
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
            // A plain store to memory that is about to be freed may be left out by the compiler.
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

/// Why a text is no secret. It carries positions only: the text may be most of a real one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretError {
    Length { found: usize },
    NotHex { index: usize },
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretError::Length { found } => write!(
                f,
                "a job's secret has 64 hexadecimal digits, this one is {found} bytes long; \
                 copy LOCKSTEP_TOKEN whole"
            ),
            SecretError::NotHex { index } => write!(
                f,
                "byte {index} of the job's secret is not a hexadecimal digit; \
                 copy LOCKSTEP_TOKEN whole, without quotes or spaces"
            ),
        }
    }
}

impl std::error::Error for SecretError {}
