//! Universal Binary JSON as XGBoost writes it: big-endian, lengths as 64-bit integers, typed arrays.

use crate::error::{Error, Result};
use crate::model::value::Value;

pub(crate) fn write(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put(value, &mut out);
    out
}

fn put_len(len: usize, out: &mut Vec<u8>) {
    out.push(b'L');
    out.extend((len as i64).to_be_bytes());
}

fn put_array<const N: usize, T: Copy>(
    marker: u8,
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
    out: &mut Vec<u8>,
) {
    out.extend([b'[', b'$', marker, b'#']);
    put_len(values.len(), out);
    values.iter().for_each(|value| out.extend(bytes(*value)));
}

fn put(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'Z'),
        Value::Bool(flag) => out.push(if *flag { b'T' } else { b'F' }),
        Value::Int(number) => match i8::try_from(*number) {
            Ok(small) => out.extend([b'i', small as u8]),
            Err(_) => {
                out.push(b'L');
                out.extend(number.to_be_bytes());
            }
        },
        Value::Float(number) => {
            out.push(b'd');
            out.extend((*number as f32).to_be_bytes());
        }
        Value::Text(text) => {
            out.push(b'S');
            put_len(text.len(), out);
            out.extend(text.as_bytes());
        }
        Value::List(items) => {
            out.extend(b"[#");
            put_len(items.len(), out);
            items.iter().for_each(|item| put(item, out));
        }
        Value::F32(values) => put_array(b'd', values, f32::to_be_bytes, out),
        Value::I32(values) => put_array(b'l', values, i32::to_be_bytes, out),
        Value::I64(values) => put_array(b'L', values, i64::to_be_bytes, out),
        Value::U8(values) => put_array(b'U', values, u8::to_be_bytes, out),
        Value::Object(fields) => {
            out.push(b'{');
            for (key, value) in fields {
                put_len(key.len(), out);
                out.extend(key.as_bytes());
                put(value, out);
            }
            out.push(b'}');
        }
    }
}

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

pub(crate) fn read(bytes: &[u8]) -> Result<Value> {
    let mut reader = Reader { bytes, at: 0 };
    let marker = reader.byte()?;
    reader.value(marker, 0)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn wrong(&self, what: &str) -> Error {
        Error::Model(format!("the model is neither JSON nor valid UBJ: {what} at byte {}", self.at))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| self.wrong("unexpected end"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    fn number(&mut self, marker: u8) -> Result<Value> {
        Ok(match marker {
            b'i' => Value::Int(i64::from(i8::from_be_bytes(self.array()?))),
            b'U' => Value::Int(i64::from(self.byte()?)),
            b'I' => Value::Int(i64::from(i16::from_be_bytes(self.array()?))),
            b'l' => Value::Int(i64::from(i32::from_be_bytes(self.array()?))),
            b'L' => Value::Int(i64::from_be_bytes(self.array()?)),
            b'd' => Value::Float(f64::from(f32::from_be_bytes(self.array()?))),
            b'D' => Value::Float(f64::from_be_bytes(self.array()?)),
            _ => return Err(self.wrong("unknown marker")),
        })
    }

    fn len(&mut self) -> Result<usize> {
        let marker = self.byte()?;
        match self.number(marker)? {
            Value::Int(len) if len >= 0 => Ok(len as usize),
            _ => Err(self.wrong("invalid length")),
        }
    }

    fn text(&mut self) -> Result<String> {
        let len = self.len()?;
        let bytes = self.take(len)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.wrong("invalid text"))
    }

    fn value(&mut self, marker: u8, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("too deep nesting"));
        }
        match marker {
            b'Z' | b'N' => Ok(Value::Null),
            b'T' => Ok(Value::Bool(true)),
            b'F' => Ok(Value::Bool(false)),
            b'S' => Ok(Value::Text(self.text()?)),
            b'C' => Ok(Value::Text((self.byte()? as char).to_string())),
            b'{' => self.object(depth),
            b'[' => self.list(depth),
            marker => self.number(marker),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value> {
        let mut fields = Vec::new();
        loop {
            if self.bytes.get(self.at) == Some(&b'}') {
                self.at += 1;
                return Ok(Value::Object(fields));
            }
            let key = self.text()?;
            let marker = self.byte()?;
            fields.push((key, self.value(marker, depth + 1)?));
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value> {
        match self.bytes.get(self.at) {
            Some(b'$') => {
                self.at += 1;
                let marker = self.byte()?;
                if self.byte()? != b'#' {
                    return Err(self.wrong("a typed array without a length"));
                }
                let len = self.len()?;
                self.typed(marker, len)
            }
            Some(b'#') => {
                self.at += 1;
                let len = self.len()?;
                let mut items = Vec::new();
                for _ in 0..len {
                    let marker = self.byte()?;
                    items.push(self.value(marker, depth + 1)?);
                }
                Ok(Value::List(items))
            }
            _ => {
                let mut items = Vec::new();
                loop {
                    match self.byte()? {
                        b']' => return Ok(Value::List(items)),
                        marker => items.push(self.value(marker, depth + 1)?),
                    }
                }
            }
        }
    }

    fn typed(&mut self, marker: u8, len: usize) -> Result<Value> {
        fn all<const N: usize, T>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.chunks_exact(N).map(|chunk| from(chunk.try_into().expect("N bytes"))).collect()
        }
        let width = match marker {
            b'i' | b'U' => 1,
            b'I' => 2,
            b'l' | b'd' => 4,
            b'L' | b'D' => 8,
            _ => return Err(self.wrong("unknown type of an array")),
        };
        let bytes = len.checked_mul(width).ok_or_else(|| self.wrong("invalid length"))?;
        let bytes = self.take(bytes)?;
        Ok(match marker {
            b'd' => Value::F32(all(bytes, f32::from_be_bytes)),
            b'D' => Value::F32(all(bytes, |b| f64::from_be_bytes(b) as f32)),
            b'l' => Value::I32(all(bytes, i32::from_be_bytes)),
            b'I' => Value::I32(all(bytes, |b| i32::from(i16::from_be_bytes(b)))),
            b'i' => Value::I32(all(bytes, |b| i32::from(i8::from_be_bytes(b)))),
            b'L' => Value::I64(all(bytes, i64::from_be_bytes)),
            _ => Value::U8(bytes.to_vec()),
        })
    }
}
