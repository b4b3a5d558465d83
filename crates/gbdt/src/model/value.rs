//! A JSON-like document with typed arrays. The same value is written as JSON and as UBJ.

use crate::error::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Value>),
    F32(Vec<f32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
    Object(Vec<(String, Value)>),
}

pub(crate) fn text(text: impl ToString) -> Value {
    Value::Text(text.to_string())
}

pub(crate) fn object(fields: Vec<(&str, Value)>) -> Value {
    Value::Object(fields.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
}

impl Value {
    pub fn get(&self, key: &str) -> Option<&Value> {
        match self {
            Value::Object(fields) => {
                fields.iter().find(|(name, _)| name == key).map(|(_, value)| value)
            }
            _ => None,
        }
    }

    /// The value at a path of keys.
    pub fn at(&self, path: &str) -> Result<&Value> {
        let found = path.split('.').try_fold(self, |value, key| value.get(key));
        found.ok_or_else(|| Error::Model(format!("the model has no {path}")))
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A number, also as text.
    pub fn as_number(&self) -> Option<f64> {
        match self {
            Value::Int(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    pub fn items(&self) -> Option<&[Value]> {
        match self {
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// A list of numbers.
    pub fn numbers(&self) -> Option<Vec<f64>> {
        match self {
            Value::List(items) => items.iter().map(Value::as_number).collect(),
            Value::F32(values) => Some(values.iter().map(|value| f64::from(*value)).collect()),
            Value::I32(values) => Some(values.iter().map(|value| f64::from(*value)).collect()),
            Value::I64(values) => Some(values.iter().map(|value| *value as f64).collect()),
            Value::U8(values) => Some(values.iter().map(|value| f64::from(*value)).collect()),
            _ => None,
        }
    }
}

pub(crate) fn to_json(value: &Value) -> Vec<u8> {
    let mut out = String::new();
    write(value, &mut out);
    out.into_bytes()
}

fn write(value: &Value, out: &mut String) {
    fn list<T>(items: &[T], out: &mut String, mut each: impl FnMut(&T, &mut String)) {
        out.push('[');
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            each(item, out);
        }
        out.push(']');
    }
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Int(number) => out.push_str(&number.to_string()),
        Value::Float(number) => out.push_str(&format!("{number:?}")),
        Value::Text(text) => out.push_str(&serde_json::to_string(text).expect("text is JSON")),
        Value::List(items) => list(items, out, write),
        // Arrays of floats need float literals: `{:?}` writes 1.0 and 1e-7.
        Value::F32(values) => list(values, out, |value, out| {
            out.push_str(&format!("{:?}", value.clamp(f32::MIN, f32::MAX)))
        }),
        Value::I32(values) => list(values, out, |value, out| out.push_str(&value.to_string())),
        Value::I64(values) => list(values, out, |value, out| out.push_str(&value.to_string())),
        Value::U8(values) => list(values, out, |value, out| out.push_str(&value.to_string())),
        Value::Object(fields) => {
            out.push('{');
            for (index, (key, value)) in fields.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&serde_json::to_string(key).expect("text is JSON"));
                out.push(':');
                write(value, out);
            }
            out.push('}');
        }
    }
}

pub(crate) fn from_json(bytes: &[u8]) -> Result<Value> {
    let parsed: serde_json::Value = serde_json::from_slice(bytes)
        .map_err(|error| Error::Model(format!("the model is not valid JSON: {error}")))?;
    Ok(convert(parsed))
}

fn convert(value: serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::Null,
        serde_json::Value::Bool(flag) => Value::Bool(flag),
        serde_json::Value::Number(number) => match number.as_i64() {
            Some(number) => Value::Int(number),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::Text(text),
        serde_json::Value::Array(items) => Value::List(items.into_iter().map(convert).collect()),
        serde_json::Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(key, value)| (key, convert(value))).collect())
        }
    }
}
