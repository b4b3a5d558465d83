//! The `Event` message of TensorBoard in protobuf's wire format, and the TFRecord frame around it.

use super::crc::masked;

/// Protobuf wire types.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// The first event of every file.
pub fn version(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    double(&mut event, 1, wall_time);
    bytes(&mut event, 3, b"brain.Event:2");
    event
}

/// Event { wall_time = 1, step = 2, summary = 5 }
pub fn scalars(wall_time: f64, step: i64, numbers: &[(&str, f64)]) -> Vec<u8> {
    let mut event = Vec::new();
    double(&mut event, 1, wall_time);
    tag(&mut event, 2, VARINT);
    varint(&mut event, step as u64);
    bytes(&mut event, 5, &summary(numbers));
    event
}

/// Event { wall_time = 1, step = 2, session_log = 7 { status = 1: START } }: readers discard this step and later ones.
pub fn session_start(wall_time: f64, step: i64) -> Vec<u8> {
    let mut event = Vec::new();
    double(&mut event, 1, wall_time);
    tag(&mut event, 2, VARINT);
    varint(&mut event, step as u64);
    bytes(&mut event, 7, &[1 << 3 | VARINT, 1]);
    event
}

/// TFRecord frame: length, its checksum, data, its checksum.
pub fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] =
        [&length, &masked(&length).to_le_bytes(), data, &masked(data).to_le_bytes()];
    parts.concat()
}

/// Summary { repeated value = 1 }, Value { tag = 1, simple_value = 2 }
fn summary(numbers: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (name, number) in numbers {
        let mut value = Vec::new();
        bytes(&mut value, 1, name.as_bytes());
        tag(&mut value, 2, FIXED32);
        value.extend((*number as f32).to_le_bytes());
        bytes(&mut summary, 1, &value);
    }
    summary
}

fn double(out: &mut Vec<u8>, field: u8, number: f64) {
    tag(out, field, FIXED64);
    out.extend(number.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u8, content: &[u8]) {
    tag(out, field, BYTES);
    varint(out, content.len() as u64);
    out.extend(content);
}

fn tag(out: &mut Vec<u8>, field: u8, wire: u8) {
    out.push(field << 3 | wire);
}

/// Base-128 varint, least significant group first.
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}
