//! LibSVM: `LABEL[:WEIGHT] [qid:GROUP] INDEX:VALUE …`. Indices are column numbers from 0 and increase within a line;
//! absent entries are missing. `#` starts a comment.

use std::ops::Range;

use crate::data::number;
use crate::data::piece::{Piece, group_id, label, weight};
use crate::data::table::Values;
use crate::data::text::{Problem, lines};

/// Features that a file may have without saying so in `data.features`: a wrong index must not use all memory.
const MAX_UNDECLARED: usize = 1 << 20;
/// Features that a file may have.
const MAX_FEATURES: usize = 1 << 26;

/// The group of a line.
pub(crate) fn group_of(line: &[u8]) -> Option<Vec<u8>> {
    let mut words = words(line);
    words.next()?;
    words.next().and_then(|(_, word)| word.strip_prefix(b"qid:").map(<[u8]>::to_vec))
}

/// Parses the lines of a range. `features` is their number if it is declared.
pub(crate) fn parse(
    bytes: &[u8],
    range: Range<usize>,
    features: Option<usize>,
) -> Result<Piece, Problem> {
    let limit = features.unwrap_or(0).clamp(MAX_UNDECLARED, MAX_FEATURES);
    let mut piece = Piece::default();
    // (feature, row, value) in row order.
    let mut entries: Vec<(u32, u32, f32)> = Vec::new();
    let mut columns = 0;
    for (offset, line) in lines(bytes, range) {
        let mut last = None;
        for (place, (at, word)) in words(line).enumerate() {
            let wrong = |what: String| Problem { offset: offset + at, column: place, what };
            let text = || String::from_utf8_lossy(word).into_owned();
            if place == 0 {
                let mut parts = word.splitn(2, |byte| *byte == b':');
                piece.label.push(label(parts.next().unwrap_or(word)).map_err(wrong)?);
                if let Some(text) = parts.next() {
                    piece.weight.push(weight(text).map_err(wrong)?);
                }
                continue;
            }
            let Some(colon) = word.iter().position(|byte| *byte == b':') else {
                return Err(wrong(format!("expected INDEX:VALUE, found {:?}", text())));
            };
            let (key, value) = (&word[..colon], &word[colon + 1..]);
            if key == b"qid" {
                if place != 1 {
                    return Err(wrong("qid must follow the label".into()));
                }
                piece.group.push(group_id(value));
                continue;
            }
            let index = std::str::from_utf8(key).ok().and_then(|key| key.parse::<usize>().ok());
            let Some(index) = index.filter(|index| *index < limit) else {
                return Err(wrong(format!(
                    "the index in {:?} must be an integer below {limit}; set data.features if there are more features",
                    text()
                )));
            };
            if last.is_some_and(|last| index <= last) {
                return Err(wrong(format!("index {index} does not increase; sort the line")));
            }
            last = Some(index);
            let Some(value) = number::parse(value).map(|value| value as f32) else {
                return Err(wrong(format!("the value in {:?} is not a number", text())));
            };
            if value.is_infinite() {
                return Err(wrong(format!("the value in {:?} is not finite", text())));
            }
            if !value.is_nan() {
                entries.push((index as u32, piece.rows as u32, value));
                columns = columns.max(index + 1);
            }
        }
        if piece.label.len() > piece.rows {
            piece.rows += 1;
        }
        for (name, count) in [("weight", piece.weight.len()), ("qid", piece.group.len())] {
            if count != 0 && count != piece.rows {
                let what = format!("some lines have a {name} and some do not");
                return Err(Problem { offset, column: 0, what });
            }
        }
    }
    piece.values = transpose(&entries, columns);
    Ok(piece)
}

/// Orders entries by column.
fn transpose(entries: &[(u32, u32, f32)], columns: usize) -> Values {
    let mut starts = vec![0u32; columns + 1];
    entries.iter().for_each(|(column, ..)| starts[*column as usize + 1] += 1);
    for column in 0..columns {
        starts[column + 1] += starts[column];
    }
    let mut next = starts.clone();
    let (mut rows, mut values) = (vec![0; entries.len()], vec![0.0; entries.len()]);
    for (column, row, value) in entries {
        let at = &mut next[*column as usize];
        rows[*at as usize] = *row;
        values[*at as usize] = *value;
        *at += 1;
    }
    Values::Sparse { starts, rows, values }
}

/// Words of a line, with their offsets.
fn words(line: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let line = &line[..line.iter().position(|byte| *byte == b'#').unwrap_or(line.len())];
    let mut at = 0;
    std::iter::from_fn(move || {
        at += line[at..].iter().position(|byte| !byte.is_ascii_whitespace())?;
        let len = line[at..].iter().position(|byte| byte.is_ascii_whitespace());
        let (start, end) = (at, len.map_or(line.len(), |len| at + len));
        at = end;
        Some((start, &line[start..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_by_column() {
        let text = b"1:0.5 qid:7 0:1 3:2.5 # comment\n\n0:2 qid:8 3:-1\n";
        let piece = parse(text, 0..text.len(), None).unwrap();
        assert_eq!(
            (piece.rows, &piece.label[..], &piece.weight[..]),
            (2, &[1., 0.][..], &[0.5, 2.][..])
        );
        assert_ne!(piece.group[0], piece.group[1]);
        let Values::Sparse { starts, rows, values } = &piece.values else { panic!("sparse") };
        assert_eq!(
            (&starts[..], &rows[..], &values[..]),
            (&[0, 1, 1, 1, 3][..], &[0, 0, 1][..], &[1., 2.5, -1.][..])
        );
        assert_eq!(group_of(b"1 qid:7 0:1"), Some(b"7".to_vec()));
        assert_eq!(group_of(b"1 0:1"), None);
    }

    #[test]
    fn errors_have_a_place() {
        let cases = [
            ("x 0:1\n", 0, "label"),
            ("1 5\n", 1, "expected INDEX:VALUE"),
            ("1 0:1 0:2\n", 2, "does not increase"),
            ("1 0:x\n", 1, "is not a number"),
            ("1 -1:1\n", 1, "must be an integer"),
            ("1 0:1 qid:3\n", 2, "qid must follow the label"),
            ("1:1 0:1\n1 0:2\n", 0, "some lines have a weight"),
            ("1:-1 0:1\n", 0, "the weight"),
        ];
        for (text, column, what) in cases {
            let problem = parse(text.as_bytes(), 0..text.len(), None)
                .err()
                .unwrap_or_else(|| panic!("{text:?}"));
            assert!(
                problem.column == column && problem.what.contains(what),
                "{text:?}: {problem:?}"
            );
        }
    }
}
