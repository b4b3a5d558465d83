//! CRC-32C (Castagnoli), and the masked form that TFRecord stores.

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            // Polynomial 0x1EDC6F41, reflected.
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| TABLE[(crc as u8 ^ byte) as usize] ^ crc >> 8)
}

/// TFRecord masks stored checksums, because a CRC of data that contains CRCs is weak.
pub fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of RFC 3720, B.4, and the common check value.
    #[test]
    fn published_vectors() {
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        let cases: [(&[u8], u32); 6] = [
            (b"", 0),
            (b"123456789", 0xE306_9283),
            (&[0; 32], 0x8A91_36AA),
            (&[0xFF; 32], 0x62A8_AB43),
            (&rising, 0x46DD_794E),
            (&falling, 0x113F_DB5C),
        ];
        for (bytes, crc) in cases {
            assert_eq!(crc32c(bytes), crc, "{bytes:?}");
        }
    }
}
