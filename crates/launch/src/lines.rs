//! Splits a byte stream into lines. Buffers at most one line.

/// Longer lines are split, so that a program that never ends its line does not fill the memory.
const MAX_LINE: usize = 64 * 1024;

#[derive(Default)]
pub(super) struct Lines {
    unfinished: Vec<u8>,
}

impl Lines {
    /// Calls `each` with every line that `bytes` completes, without its line feed.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.unfinished.extend_from_slice(&rest[..end]);
            each(&self.unfinished);
            self.unfinished.clear();
            rest = &rest[end + 1..];
        }
        self.unfinished.extend_from_slice(rest);
        if self.unfinished.len() >= MAX_LINE {
            self.finish(each);
        }
    }

    /// Calls `each` with an unfinished last line when the stream ends.
    pub fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.unfinished.is_empty() {
            each(&self.unfinished);
            self.unfinished.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_do_not_depend_on_chunk_sizes() {
        for text in ["", "a", "a\n", "\n\n", "one\ntwo\nthree", "é\n\u{1f600}\nx\n"] {
            let expected: Vec<Vec<u8>> = text.lines().map(|line| line.into()).collect();
            for size in 1..=text.len().max(1) {
                let (mut lines, mut got) = (Lines::default(), Vec::new());
                for chunk in text.as_bytes().chunks(size) {
                    lines.push(chunk, |line| got.push(line.to_vec()));
                }
                lines.finish(|line| got.push(line.to_vec()));
                assert_eq!(got, expected, "{text:?} in chunks of {size}");
            }
        }
    }

    #[test]
    fn an_endless_line_is_split() {
        let (mut lines, mut pieces) = (Lines::default(), 0);
        for _ in 0..10 {
            lines.push(&[b'x'; MAX_LINE], |_| pieces += 1);
        }
        assert_eq!(pieces, 10);
    }
}
