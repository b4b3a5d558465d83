//! Transpose of 16×16 32-bit elements in registers.

use std::arch::x86_64::*;

/// 64 shuffles: two rounds within 128-bit quarters, then two rounds of whole quarters.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // quads[4g + c] holds, in quarter q, column 4q + c of rows 4g .. 4g + 4.
    let mut quads = pairs;
    for g in 0..4 {
        quads[4 * g] = _mm512_unpacklo_epi64(pairs[4 * g], pairs[4 * g + 2]);
        quads[4 * g + 1] = _mm512_unpackhi_epi64(pairs[4 * g], pairs[4 * g + 2]);
        quads[4 * g + 2] = _mm512_unpacklo_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
        quads[4 * g + 3] = _mm512_unpackhi_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
    }
    let mut columns = quads;
    for c in 0..4 {
        let even_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(quads[c], quads[4 + c]);
        let odd_low = _mm512_shuffle_i32x4::<0b11_01_11_01>(quads[c], quads[4 + c]);
        let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(quads[8 + c], quads[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(quads[8 + c], quads[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high);
        columns[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high);
        columns[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high);
        columns[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Level;

    #[test]
    fn rows_become_columns() {
        if Level::of_this_machine() < Level::Avx512 {
            return;
        }
        let rows: [[i32; 16]; 16] =
            std::array::from_fn(|r| std::array::from_fn(|c| (100 * r + c) as i32));
        // SAFETY: the processor has AVX-512, and a vector is sixteen i32.
        let columns = unsafe {
            let rows = std::mem::transmute::<[[i32; 16]; 16], [__m512i; 16]>(rows);
            std::mem::transmute::<[__m512i; 16], [[i32; 16]; 16]>(transpose(rows))
        };
        for r in 0..16 {
            (0..16).for_each(|c| assert_eq!(columns[c][r], rows[r][c]));
        }
    }
}
