//! Text files shared by ranks and threads: each reads a range of whole lines. Does not know what a line contains.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A mapped text file.
pub(crate) struct TextFile {
    pub path: PathBuf,
    map: Option<Arc<Mmap>>,
}

/// Returns the group of a line.
pub(crate) type GroupOf<'a> = &'a dyn Fn(&[u8]) -> Option<Vec<u8>>;

/// A problem at a byte of a file. The column counts fields from 0.
#[derive(Debug)]
pub(crate) struct Problem {
    pub offset: usize,
    pub column: usize,
    pub what: String,
}

impl TextFile {
    pub fn open(path: &Path) -> Result<TextFile> {
        Ok(TextFile { path: path.to_path_buf(), map: map(path)? })
    }

    pub fn bytes(&self) -> &[u8] {
        self.map.as_ref().map_or(&[], |map| map)
    }

    /// The error with its line number, which is counted only now.
    pub fn error(&self, problem: Problem) -> Error {
        let Problem { offset, column, what } = problem;
        let before = &self.bytes()[..offset.min(self.bytes().len())];
        let line = before.iter().filter(|byte| **byte == b'\n').count() as u64 + 1;
        Error::Data { path: self.path.clone(), line, column: column as u64 + 1, what }
    }
}

/// Maps a file; `None` if it is empty.
pub(crate) fn map(path: &Path) -> Result<Option<Arc<Mmap>>> {
    let file = File::open(path).map_err(Error::system("open", path))?;
    let meta = file.metadata().map_err(Error::system("open", path))?;
    if !meta.is_file() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(Error::System { doing: "read", path: path.to_path_buf(), source });
    }
    if meta.len() == 0 {
        return Ok(None);
    }
    // SAFETY: the map is only read. A file that changes meanwhile gives wrong values, but every access is checked.
    let map = unsafe { Mmap::map(&file) }.map_err(Error::system("map", path))?;
    Ok(Some(Arc::new(map)))
}

/// Start of the line after the one that contains `at`; `at` itself if a line starts there.
pub(crate) fn line_start(bytes: &[u8], at: usize, first: usize) -> usize {
    if at <= first {
        return first;
    }
    match memchr(&bytes[at - 1..]) {
        Some(end) => at + end,
        None => bytes.len(),
    }
}

/// Offset of the first line end.
pub(crate) fn memchr(bytes: &[u8]) -> Option<usize> {
    // Eight bytes at a time: a byte of `word` is zero exactly where the lowest flag is set.
    const LOW: u64 = 0x0101_0101_0101_0101;
    let mut at = 0;
    while let Some(eight) = bytes.get(at..at + 8) {
        let word = u64::from_le_bytes(eight.try_into().expect("eight bytes")) ^ (LOW * 0x0a);
        let zero = word.wrapping_sub(LOW) & !word & (LOW << 7);
        if zero != 0 {
            return Some(at + zero.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    bytes[at..].iter().position(|byte| *byte == b'\n').map(|found| at + found)
}

/// Whole lines of `range`, as (offset, line without its end).
pub(crate) fn lines(bytes: &[u8], range: Range<usize>) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let len = memchr(&bytes[at..range.end]).unwrap_or(range.end - at);
        let (start, line) = (at, &bytes[at..at + len]);
        at += len + 1;
        Some((start, line.strip_suffix(b"\r").unwrap_or(line)))
    })
}

/// The range of lines of part `part` of `parts`. With `group`, which returns the group of a line, a group that starts in a
/// part belongs to it completely.
pub(crate) fn part_of(
    bytes: &[u8],
    body: Range<usize>,
    part: (usize, usize),
    group: Option<GroupOf<'_>>,
) -> Range<usize> {
    let len = (body.end - body.start) as u128;
    let cut = |part: usize, parts: usize| {
        let at = body.start + (len * part as u128 / parts as u128) as usize;
        let start = line_start(bytes, at, body.start).min(body.end);
        match group {
            Some(group) if part > 0 && part < parts => group_start(bytes, &body, start, group),
            _ => start,
        }
    };
    cut(part.0, part.1)..cut(part.0 + 1, part.1)
}

/// The first line from `start` on whose group differs from that of the line before.
fn group_start(bytes: &[u8], body: &Range<usize>, start: usize, group: GroupOf<'_>) -> usize {
    if start <= body.start || start >= body.end {
        return start;
    }
    let before = &bytes[body.start..start - 1];
    let last = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let open = group(&before[last..]);
    lines(bytes, start..body.end)
        .find(|(_, line)| group(line) != open)
        .map_or(body.end, |(offset, _)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_lines_and_cover_the_file() {
        let text = b"head\na\nbb\n\nccc\r\ndddd\ne";
        for parts in 1..12 {
            let mut all = Vec::new();
            let mut end = 5;
            for part in 0..parts {
                let range = part_of(text, 5..text.len(), (part, parts), None);
                assert_eq!(range.start, end);
                end = range.end;
                all.extend(lines(text, range).map(|(_, line)| line.to_vec()));
            }
            assert_eq!(end, text.len());
            let expected: [&[u8]; 6] = [b"a", b"bb", b"", b"ccc", b"dddd", b"e"];
            assert_eq!(all, expected, "{parts}");
        }
    }

    #[test]
    fn a_group_is_in_one_part() {
        let text = b"1 a\n1 b\n1 c\n2 a\n3 a\n3 b\n3 c\n3 d\n";
        let group = |line: &[u8]| line.first().map(|byte| vec![*byte]);
        for parts in 1..9 {
            let mut seen = Vec::new();
            for part in 0..parts {
                let range = part_of(text, 0..text.len(), (part, parts), Some(&group));
                let mut mine: Vec<u8> = lines(text, range).map(|(_, line)| line[0]).collect();
                mine.dedup();
                seen.extend(mine);
            }
            assert_eq!(seen, b"123", "{parts}");
        }
    }

    #[test]
    fn line_ends_are_found_everywhere() {
        for len in 0..40 {
            for at in 0..len {
                let mut text = vec![b'x'; len];
                text[at] = b'\n';
                assert_eq!(memchr(&text), Some(at));
            }
            assert_eq!(memchr(&vec![0x0bu8; len]), None);
        }
    }
}
