//! Encrypted records of one direction of a connection: ChaCha20-Poly1305 with a key that only this direction of
//! this connection uses, and the number of the record as nonce. A record that was changed, repeated, left out or
//! reordered fails; the end of the stream between two records is not detected here.
//!
//! Record: length of the text (4, little-endian, authenticated), encrypted text, tag (16).

use std::fmt;
use std::io::{self, IoSlice, Read, Write};

use chacha20poly1305::aead::AeadInPlace;
use chacha20poly1305::{ChaCha20Poly1305, KeyInit, Nonce, Tag};

/// Longest text of a record. Small enough to be decrypted in the cache.
const TEXT: usize = 64 << 10;
const LENGTH: usize = 4;
const TAG: usize = 16;

/// A key and the number of records that it has encrypted or decrypted.
struct Records {
    cipher: ChaCha20Poly1305,
    number: u64,
}

impl Records {
    fn new(key: &[u8; 32]) -> Records {
        Records { cipher: ChaCha20Poly1305::new(key.into()), number: 0 }
    }

    /// The nonce of the next record. At a terabyte per second the numbers last for ten thousand years.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_le_bytes());
        self.number = self.number.checked_add(1).expect("fewer than 2^64 records");
        nonce.into()
    }
}

/// Encrypts. Keeps a record until the socket has accepted all of it.
pub(super) struct Sealer {
    records: Records,
    /// The encrypted record in progress, and how much of it was sent.
    record: Vec<u8>,
    sent: usize,
}

impl Sealer {
    pub fn new(key: &[u8; 32]) -> Sealer {
        Sealer { records: Records::new(key), record: Vec::new(), sent: 0 }
    }

    pub fn is_flushed(&self) -> bool {
        self.sent == self.record.len()
    }

    /// Encrypts one record of text from the start of `parts` and sends as much of it as possible. Returns the length
    /// of the text; the rest of the record is sent by the next call.
    pub fn write(&mut self, to: &mut impl Write, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush(to)?;
        self.record.clear();
        self.record.extend([0; LENGTH]);
        for part in parts {
            let room = LENGTH + TEXT - self.record.len();
            self.record.extend(&part[..part.len().min(room)]);
        }
        let len = self.record.len() - LENGTH;
        self.sent = 0;
        if len == 0 {
            self.record.clear();
            return Ok(0);
        }
        let nonce = self.records.next_nonce();
        let (length, text) = self.record.split_at_mut(LENGTH);
        length.copy_from_slice(&(len as u32).to_le_bytes());
        let tag = self.records.cipher.encrypt_in_place_detached(&nonce, length, text);
        self.record.extend(tag.expect("a record is not too long"));
        match self.flush(to) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(len),
        }
    }

    /// Sends the rest of the record.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_flushed() {
            match to.write(&self.record[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Decrypts. Keeps text that the caller has not read yet.
pub(super) struct Opener {
    records: Records,
    /// The record in progress: as far as it has arrived, or its text after decryption.
    record: Vec<u8>,
    have: usize,
    /// Range of `record` with text to read.
    text: std::ops::Range<usize>,
}

impl Opener {
    pub fn new(key: &[u8; 32]) -> Opener {
        let record = vec![0; LENGTH + TEXT + TAG];
        Opener { records: Records::new(key), record, have: 0, text: 0..0 }
    }

    /// Reads text; 0 at the end of the stream between two records.
    pub fn read(&mut self, from: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        while self.text.is_empty() {
            let end = self.expected()?;
            if self.have < end {
                match from.read(&mut self.record[self.have..end])? {
                    0 if self.have == 0 => return Ok(0),
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    n => self.have += n,
                }
                continue;
            }
            self.open()?;
        }
        let n = bytes.len().min(self.text.len());
        bytes[..n].copy_from_slice(&self.record[self.text.start..self.text.start + n]);
        self.text.start += n;
        Ok(n)
    }

    /// Length of the record in progress, as far as it is known.
    fn expected(&self) -> io::Result<usize> {
        if self.have < LENGTH {
            return Ok(LENGTH);
        }
        match u32::from_le_bytes(std::array::from_fn(|i| self.record[i])) as usize {
            len @ 1..=TEXT => Ok(LENGTH + len + TAG),
            _ => Err(changed()),
        }
    }

    fn open(&mut self) -> io::Result<()> {
        let nonce = self.records.next_nonce();
        let (length, rest) = self.record[..self.have].split_at_mut(LENGTH);
        let (text, tag) = rest.split_at_mut(rest.len() - TAG);
        let cipher = &self.records.cipher;
        cipher
            .decrypt_in_place_detached(&nonce, length, text, Tag::from_slice(tag))
            .map_err(|_| changed())?;
        self.text = LENGTH..LENGTH + text.len();
        self.have = 0;
        Ok(())
    }
}

fn changed() -> io::Error {
    let text = "encrypted data was changed on the way; check who has access to the network";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(..)")
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// A socket that accepts a few bytes at a time and blocks in between.
    #[derive(Default)]
    struct Slow(Vec<u8>, bool);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let n = bytes.len().min(5000);
            self.0.extend(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn seal(text: &[u8]) -> Vec<u8> {
        let (mut sealer, mut to, mut at) = (Sealer::new(&[7; 32]), Slow::default(), 0);
        while at < text.len() || !sealer.is_flushed() {
            let parts = [IoSlice::new(&text[at..]), IoSlice::new(&[])];
            let done = match at < text.len() {
                true => sealer.write(&mut to, &parts),
                false => sealer.flush(&mut to).map(|()| 0),
            };
            match done {
                Ok(n) => at += n,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        to.0
    }

    fn open(sealed: &[u8]) -> io::Result<Vec<u8>> {
        let (mut opener, mut from) = (Opener::new(&[7; 32]), Cursor::new(sealed));
        let (mut text, mut piece) = (Vec::new(), [0; 999]);
        loop {
            match opener.read(&mut from, &mut piece)? {
                0 => return Ok(text),
                n => text.extend(&piece[..n]),
            }
        }
    }

    #[test]
    fn text_of_any_length_round_trips() {
        for len in [1, 15, 64, TEXT - 1, TEXT, TEXT + 1, 3 * TEXT + 7] {
            let text: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let sealed = seal(&text);
            assert_eq!(sealed.len(), len + len.div_ceil(TEXT) * (LENGTH + TAG));
            assert!(len < 15 || sealed.windows(15).all(|part| part != &text[..15]), "readable");
            assert_eq!(open(&sealed).unwrap(), text);
        }
    }

    #[test]
    fn changed_repeated_reordered_and_truncated_records_fail() {
        let text: Vec<u8> = (0..2 * TEXT).map(|i| (i % 251) as u8).collect();
        let sealed = seal(&text);
        for bit in (0..8 * LENGTH).chain([8 * LENGTH, 8 * 1000, 8 * sealed.len() - 1]) {
            let mut changed = sealed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&changed).is_err(), "bit {bit}");
        }
        let (first, second) = sealed.split_at(sealed.len() / 2);
        assert!(open(&[first, first].concat()).is_err(), "repeated");
        assert!(open(&[second, first].concat()).is_err(), "reordered");
        assert!(open(second).is_err(), "left out");
        assert!(open(&sealed[..sealed.len() - 1]).is_err(), "truncated");
    }
}
