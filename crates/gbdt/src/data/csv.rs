//! CSV: a line of names, quoted fields, empty fields as missing values. A quoted field must end on its line, so that a
//! file can be split at any line end.

use std::collections::HashMap;
use std::ops::Range;

use crate::data::number;
use crate::data::piece::{Piece, group_id, label, weight};
use crate::data::schema::{Role, Roles, Schema};
use crate::data::table::{Store, Values};
use crate::data::text::{Problem, lines};

/// Fields of one line, without quotes. `None` at a quote that is not closed.
struct Fields<'a> {
    line: &'a [u8],
    separator: u8,
    at: usize,
    done: bool,
}

/// A field: its offset in the line, its text, and whether it contains doubled quotes.
struct Field<'a> {
    offset: usize,
    text: &'a [u8],
    escaped: bool,
}

impl<'a> Fields<'a> {
    fn of(line: &'a [u8], separator: u8) -> Fields<'a> {
        Fields { line, separator, at: 0, done: false }
    }

    /// The next field, or an error with its offset. Nothing follows an error.
    fn next(&mut self) -> Option<Result<Field<'a>, (usize, &'static str)>> {
        if self.done {
            return None;
        }
        let (start, line) = (self.at, self.line);
        if line.get(start) != Some(&b'"') {
            let len = line[start..].iter().position(|byte| *byte == self.separator);
            let end = len.map_or(line.len(), |len| start + len);
            self.step(end);
            return Some(Ok(Field {
                offset: start,
                text: trim(&line[start..end]),
                escaped: false,
            }));
        }
        let (mut at, mut escaped) = (start + 1, false);
        let end = loop {
            match (line.get(at), line.get(at + 1)) {
                (None, _) => {
                    self.done = true;
                    return Some(Err((start, "a quoted field is not closed on its line")));
                }
                (Some(b'"'), Some(b'"')) => {
                    escaped = true;
                    at += 2;
                }
                (Some(b'"'), _) => break at,
                _ => at += 1,
            }
        };
        if line.get(end + 1).is_some_and(|byte| *byte != self.separator) {
            self.done = true;
            return Some(Err((end + 1, "expected a separator after a quoted field")));
        }
        self.step(end + 1);
        Some(Ok(Field { offset: start, text: &line[start + 1..end], escaped }))
    }

    fn step(&mut self, end: usize) {
        self.done = end >= self.line.len();
        self.at = end + 1;
    }
}

fn trim(text: &[u8]) -> &[u8] {
    text.trim_ascii()
}

fn unescaped(field: &Field<'_>) -> Vec<u8> {
    match field.escaped {
        false => field.text.to_vec(),
        true => String::from_utf8_lossy(field.text).replace("\"\"", "\"").into_bytes(),
    }
}

/// A CSV file's separator, columns and first data byte.
pub(crate) struct Layout {
    pub separator: u8,
    pub roles: Roles,
    pub body: usize,
}

/// Reads the names of the columns and assigns their roles.
pub(crate) fn layout(
    bytes: &[u8],
    schema: &Schema,
    tabs: bool,
    labeled: bool,
) -> Result<Layout, Problem> {
    let separator = match schema.separator {
        None => b",\t"[usize::from(tabs)],
        Some(separator) if separator.is_ascii() => separator as u8,
        Some(separator) => {
            let what = format!("data.separator must be an ASCII character (got {separator:?})");
            return Err(Problem { offset: 0, column: 0, what });
        }
    };
    // A byte order mark is not part of the first name.
    let mark = if bytes.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let Some((_, line)) = lines(bytes, mark..bytes.len()).next() else {
        return Err(Problem { offset: 0, column: 0, what: "the file is empty".into() });
    };
    let (mut names, mut fields) = (Vec::new(), Fields::of(line, separator));
    while let Some(field) = fields.next() {
        let field = field.map_err(|(at, what)| Problem {
            offset: mark + at,
            column: names.len(),
            what: what.into(),
        })?;
        names.push(String::from_utf8_lossy(&unescaped(&field)).into_owned());
    }
    let header = schema.header.unwrap_or(true);
    if !header {
        names = (0..names.len()).map(|column| format!("f{column}")).collect();
    }
    let roles = schema.assign(&names, labeled);
    let roles = roles.map_err(|(column, what)| Problem { offset: 0, column, what })?;
    let end = (mark + line.len()).min(bytes.len());
    let next =
        bytes[end..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |n| end + n + 1);
    Ok(Layout { separator, roles, body: if header { next } else { mark } })
}

/// The text of the group column of a line.
pub(crate) fn group_of(layout: &Layout, line: &[u8]) -> Option<Vec<u8>> {
    let column = layout.roles.roles.iter().position(|role| *role == Role::Group)?;
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut fields = Fields::of(line, layout.separator);
    for _ in 0..column {
        fields.next()?.ok()?;
    }
    Some(unescaped(&fields.next()?.ok()?))
}

/// Parses the lines of a range.
pub(crate) fn parse(bytes: &[u8], range: Range<usize>, layout: &Layout) -> Result<Piece, Problem> {
    let (roles, separator) = (&layout.roles.roles, layout.separator);
    let features = layout.roles.features.len();
    let mut columns: Vec<Vec<f32>> = vec![Vec::new(); features];
    let mut words: HashMap<usize, HashMap<Vec<u8>, usize>> = HashMap::new();
    let mut piece = Piece::default();
    for (offset, line) in lines(bytes, range) {
        if line.is_empty() {
            continue;
        }
        let mut fields = Fields::of(line, separator);
        for (column, role) in roles.iter().enumerate() {
            let at = |offset_in_line: usize, what: String| Problem {
                offset: offset + offset_in_line,
                column,
                what,
            };
            let Some(field) = fields.next() else {
                let what = format!("the line has {column} fields, expected {}", roles.len());
                return Err(at(line.len(), what));
            };
            let field = field.map_err(|(inside, what)| at(inside, what.into()))?;
            let text = field.text;
            match role {
                Role::Ignored => {}
                Role::Feature(feature) => columns[*feature].push(match value(text) {
                    Ok(value) => value,
                    Err(what) => return Err(at(field.offset, what)),
                }),
                Role::Category(feature) => {
                    let known = words.entry(*feature).or_default();
                    let count = known.len();
                    let code = match text.is_empty() {
                        true => f32::NAN,
                        false => *known.entry(unescaped(&field)).or_insert(count) as f32,
                    };
                    columns[*feature].push(code);
                }
                Role::Label => {
                    piece.label.push(label(text).map_err(|what| at(field.offset, what))?)
                }
                Role::Weight => {
                    piece.weight.push(weight(text).map_err(|what| at(field.offset, what))?)
                }
                Role::Group => piece.group.push(group_id(&unescaped(&field))),
            }
        }
        if fields.next().is_some() {
            let mut count = roles.len() + 1;
            while fields.next().is_some() {
                count += 1;
            }
            let what = format!("the line has {count} fields, expected {}", roles.len());
            return Err(Problem { offset, column: roles.len(), what });
        }
        piece.rows += 1;
    }
    piece.values = Values::Columns { store: Store::Memory(columns.concat()), first: 0 };
    for (feature, known) in words {
        let mut list = vec![Vec::new(); known.len()];
        known.into_iter().for_each(|(word, code)| list[code] = word);
        piece.words.insert(feature, list);
    }
    Ok(piece)
}

/// The value of a numeric field; NaN if it is missing.
fn value(text: &[u8]) -> Result<f32, String> {
    if text.is_empty() {
        return Ok(f32::NAN);
    }
    let Some(value) = number::parse(text) else {
        if text.eq_ignore_ascii_case(b"na") || text == b"?" {
            return Ok(f32::NAN);
        }
        return Err(format!(
            "{:?} is not a number; list the column in data.categorical or data.ignore",
            String::from_utf8_lossy(text)
        ));
    };
    let value = value as f32;
    if value.is_infinite() {
        return Err(format!(
            "{} is not finite; leave the field empty if it is missing",
            String::from_utf8_lossy(text)
        ));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, schema: &Schema) -> Result<(Layout, Piece), Problem> {
        let layout = layout(text.as_bytes(), schema, false, true)?;
        let piece = parse(text.as_bytes(), layout.body..text.len(), &layout)?;
        Ok((layout, piece))
    }

    #[test]
    fn quotes_missing_values_and_categories() {
        let schema = Schema { categorical: vec!["c\"x".into()], ..Schema::default() };
        let text = "a,\"c\"\"x\",label,b\r\n1,\"u,v\",0,\r\n\n,w,1,-2.5e1\nNA,\"u,v\",0,3";
        let (layout, piece) = read(text, &schema).unwrap();
        assert_eq!(layout.roles.features, ["a", "c\"x", "b"]);
        assert_eq!((piece.rows, &piece.label[..]), (3, &[0.0, 1.0, 0.0][..]));
        assert_eq!(piece.words[&1], [b"u,v".to_vec(), b"w".to_vec()]);
        let Values::Columns { store, .. } = &piece.values else { panic!("dense") };
        let bits: Vec<u32> = store.values().iter().map(|value| value.to_bits()).collect();
        let expected = [1.0, f32::NAN, f32::NAN, 0.0, 1.0, 0.0, f32::NAN, -25.0, 3.0];
        assert_eq!(bits, expected.map(f32::to_bits));
    }

    #[test]
    fn errors_have_a_place() {
        let cases = [
            ("label,a\n1,2\n1\n", 13, 1, "the line has 1 fields, expected 2"),
            ("label,a\n1,2,3,4\n", 8, 2, "the line has 4 fields, expected 2"),
            ("label,a\n1,x\n", 10, 1, "\"x\" is not a number"),
            ("label,a\nnan,1\n", 8, 0, "label"),
            ("label,a\n1,\"2\n", 10, 1, "a quoted field is not closed"),
            ("label,a\n1,2,\"3\n", 8, 2, "the line has 3 fields"),
            ("label,a\n1,inf\n", 10, 1, "is not finite"),
            ("label,a,a\n", 0, 2, "is used by columns 2 and 3"),
            ("", 0, 0, "the file is empty"),
        ];
        for (text, offset, column, what) in cases {
            let problem =
                read(text, &Schema::default()).err().unwrap_or_else(|| panic!("{text:?}"));
            assert_eq!((problem.offset, problem.column), (offset, column), "{text:?}: {problem:?}");
            assert!(problem.what.contains(what), "{text:?}: {problem:?}");
        }
    }
}
