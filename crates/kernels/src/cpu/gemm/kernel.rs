//! The inner loops by level: how each wants its panels, and who packs them.

use super::{Operand, pack, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, lanes, pairs, parts, thirds};
use crate::cpu::Level;
use std::ops::Range;

/// One inner loop. Panels are bytes here, as their elements are the kernel's own affair.
pub struct Kernel {
    pub level: Level,
    /// A panel of `a` has this many rows, or a few less where that wastes less.
    pub rows: Range<usize>,
    /// Columns of a panel of `b`.
    pub cols: usize,
    /// Panels are a whole number of so many k; what is missing is zero.
    pub deep: usize,
    /// How long panels are along k where sums are made in the output.
    pub direct: Pieces,
    /// The same where they would have to wait in memory for the next piece: of a k that is no longer than these, there
    /// is but one.
    pub whole: Pieces,
    /// And where they must wait.
    pub cut: Pieces,
    /// Of an element in a panel.
    pub bytes: usize,
    /// Runs work on this thread with the kernel's registers set up.
    pub prepared: unsafe fn(&mut dyn FnMut()),
    pub multiply: Multiply,
    pub pack_a: Pack,
    pub pack_b: Pack,
    /// Rows that can be read as they lie, without packing.
    pub in_place: fn(&Operand<'_>, Lying) -> Option<Rows>,
}

/// How k is cut.
#[derive(Clone, Copy)]
pub struct Pieces {
    /// The longest panel along k.
    pub long: usize,
    /// Bytes of the packed chunk of `b`, which stays in L2 while all of `a` passes by.
    pub chunk: usize,
}

/// Which rows of `a` shall be read: where they are, how long pieces of k are, how many rows a panel has, and how many
/// columns of `b` they meet.
pub struct Lying {
    pub lanes: Range<usize>,
    pub ks: Range<usize>,
    pub long: usize,
    pub rows: usize,
    pub cols: usize,
}

/// Adds the product of panels `a` (rows, k) and `b` (k, cols) to the sums.
pub type Multiply =
    unsafe fn(rows: usize, k: usize, a: Rows, ahead: Ahead, b: *const u8, sums: Sums);

/// Packs a strip into panels, one after the other.
pub type Pack = unsafe fn(strip: &Strip<'_>, panels: *mut u8);

/// A panel of `a`.
#[derive(Clone, Copy)]
pub struct Rows {
    pub start: *const u8,
    /// Bytes from row to row, and along k, for rows that are read in place; 0 for a packed panel.
    pub stride: usize,
    pub step: usize,
}

/// The panel of `a` that comes next, which lies as this one does, to be asked for on the way, so that it has come
/// when its turn does. This is the share of tile `tile` of `tiles` that the panel has.
#[derive(Clone, Copy)]
pub struct Ahead {
    pub next: *const u8,
    pub tile: usize,
    pub tiles: usize,
}

/// A tile of the output, or what becomes one.
#[derive(Clone, Copy)]
pub struct Sums {
    pub start: *mut f32,
    /// Elements from row to row.
    pub stride: usize,
    /// Go on from what is there; otherwise from zero.
    pub resume: bool,
    /// Where the finished tile's rows will be written, and bytes from one to the next: to be asked for on the way.
    pub place: *const u8,
    pub place_stride: usize,
    /// The sums that the next tile goes on from, or our own: to be asked for, too.
    pub next: *const f32,
}

/// What to pack: panels of `width` lanes each, the last one filled up with zeros.
pub struct Strip<'a> {
    pub from: Operand<'a>,
    pub lanes: Range<usize>,
    pub ks: Range<usize>,
    pub width: usize,
    /// Elements from one panel to the next.
    pub apart: usize,
}

impl Kernel {
    pub fn of(level: Level, rounded: bool) -> Kernel {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx if rounded => Kernel {
                level,
                rows: 32..33,
                cols: 32,
                deep: 32,
                direct: Pieces { long: 1024, chunk: 1 << 20 },
                whole: Pieces { long: 1024, chunk: 1 << 20 },
                // A panel of `a` has room in L1.
                cut: Pieces { long: 512, chunk: 512 << 10 },
                bytes: 2,
                prepared: amx::with_tiles,
                multiply: amx::multiply,
                pack_a: pairs::pack_a,
                pack_b: pairs::pack_b,
                in_place: amx::in_place,
            },
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Kernel {
                level,
                rows: 32..33,
                cols: 32,
                deep: 32,
                direct: Pieces { long: 512, chunk: 1 << 20 },
                whole: Pieces { long: 1024, chunk: 1 << 20 },
                cut: Pieces { long: 1024, chunk: 1 << 20 },
                bytes: 2 * parts::PARTS,
                prepared: amx::with_tiles,
                multiply: thirds::multiply,
                pack_a: parts::pack_a,
                pack_b: parts::pack_b,
                in_place: |_, _| None,
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Kernel {
                in_place: avx512::in_place,
                ..Kernel::of_f32(level, 11..14, 32, avx512::multiply, lanes::pack)
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Kernel::of_f32(level, 5..7, 16, avx2::multiply, pack::avx2),
            _ => Kernel::of_f32(level, 4..5, 8, portable::multiply, pack::plain),
        }
    }

    fn of_f32(
        level: Level,
        rows: Range<usize>,
        cols: usize,
        multiply: Multiply,
        pack: Pack,
    ) -> Kernel {
        let (pack_a, pack_b) = (pack, pack);
        let pieces = Pieces { long: 512, chunk: 768 << 10 };
        let in_place = |_: &Operand<'_>, _: Lying| None;
        Kernel {
            level,
            rows,
            cols,
            deep: 1,
            direct: pieces,
            whole: pieces,
            cut: pieces,
            bytes: 4,
            prepared: |work| work(),
            multiply,
            pack_a,
            pack_b,
            in_place,
        }
    }

    /// How a `k` is cut.
    pub fn pieces(&self, direct: bool, k: usize) -> Pieces {
        match direct {
            true => self.direct,
            false if k <= self.whole.long => self.whole,
            false => self.cut,
        }
    }

    /// The height of panels that fills `m` rows with the least waste, rather tall than low.
    pub fn height(&self, m: usize) -> usize {
        let waste = |rows: &usize| m.next_multiple_of(*rows);
        self.rows.clone().rev().min_by_key(waste).expect("a kernel has a height")
    }
}
