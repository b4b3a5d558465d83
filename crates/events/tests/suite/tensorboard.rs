//! Event files, taken apart by a decoder of their own: it shares no line with what wrote them.

use crate::folder::Folder;
use lockstep_events::{StepReport, TensorBoard};
use std::fs;

#[derive(Debug, PartialEq)]
enum Field<'b> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'b [u8]),
    Fixed32(u32),
}

/// Takes `count` bytes off the front.
fn take<'b>(bytes: &mut &'b [u8], count: usize) -> &'b [u8] {
    let (front, rest) = bytes.split_at(count);
    *bytes = rest;
    front
}

fn take_varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)[0];
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return number;
        }
    }
    panic!("a varint without end")
}

/// (field number, value) of a protobuf message.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = take_varint(&mut bytes);
        let value = match key & 7 {
            0 => Field::Varint(take_varint(&mut bytes)),
            1 => Field::Fixed64(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = take_varint(&mut bytes) as usize;
                Field::Bytes(take(&mut bytes, length))
            }
            5 => Field::Fixed32(u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

/// CRC-32C by long division, highest bit first on reversed bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut remainder = u32::MAX;
    for byte in bytes {
        remainder ^= u32::from(byte.reverse_bits()) << 24;
        for _ in 0..8 {
            let carry = remainder >> 31 == 1;
            remainder <<= 1;
            if carry {
                remainder ^= 0x1EDC_6F41;
            }
        }
    }
    !remainder.reverse_bits()
}

fn unmasked(stored: &[u8]) -> u32 {
    u32::from_le_bytes(stored.try_into().unwrap()).wrapping_sub(0xA282_EAD8).rotate_left(15)
}

fn records(mut file: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while !file.is_empty() {
        let length = take(&mut file, 8);
        assert_eq!(unmasked(take(&mut file, 4)), crc32c(length), "checksum of the length");
        let data = take(&mut file, u64::from_le_bytes(length.try_into().unwrap()) as usize);
        assert_eq!(unmasked(take(&mut file, 4)), crc32c(data), "checksum of the data");
        records.push(data);
    }
    records
}

/// (tag, value) of an event's summary.
fn scalars(event: &[u8]) -> Vec<(String, f32)> {
    let summaries = fields(event).into_iter().filter_map(|(number, field)| match field {
        Field::Bytes(summary) if number == 5 => Some(summary),
        _ => None,
    });
    summaries
        .flat_map(fields)
        .map(|(number, field)| match (number, field) {
            (1, Field::Bytes(value)) => match &fields(value)[..] {
                [(1, Field::Bytes(tag)), (2, Field::Fixed32(bits))] => {
                    (String::from_utf8(tag.to_vec()).unwrap(), f32::from_bits(*bits))
                }
                other => panic!("a value of {other:?}"),
            },
            other => panic!("a summary with {other:?}"),
        })
        .collect()
}

fn only_file(folder: &Folder) -> (String, Vec<u8>) {
    let entries: Vec<_> = fs::read_dir(folder.path()).unwrap().map(Result::unwrap).collect();
    let [entry] = &entries[..] else { panic!("one file, not {entries:?}") };
    (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
}

#[test]
fn the_files_are_what_tensorboard_reads() {
    let folder = Folder::new("tensorboard");
    let mut board = TensorBoard::create(folder.path()).unwrap();
    let step = StepReport {
        loss: Some(2.5),
        lr: Some(3e-4),
        mem_bytes: Some(1 << 31),
        ..StepReport::of(300, 1000)
    };
    board.write(&step).unwrap();
    board.write(&StepReport::of(301, 1000)).unwrap();
    board
        .write(&StepReport { eval_loss: Some(f64::NAN), ..StepReport::of(u32::MAX as usize, 1000) })
        .unwrap();

    let (name, bytes) = only_file(&folder);
    assert!(name.starts_with("events.out.tfevents."), "{name}");
    let records = records(&bytes);
    // A step of which nothing is known makes no event.
    assert_eq!(records.len(), 3);

    let first = fields(records[0]);
    assert_eq!(first[1], (3, Field::Bytes(b"brain.Event:2")));
    for event in &records {
        let (1, Field::Fixed64(bits)) = fields(event)[0] else { panic!("no wall time") };
        // After the year 2020, in seconds: neither zero nor milliseconds.
        assert!((1.5e9..1e11).contains(&f64::from_bits(bits)));
    }
    assert_eq!(fields(records[1])[1], (2, Field::Varint(300)));
    let expected = [("train/loss", 2.5), ("train/lr", 3e-4), ("memory/bytes", 2147483648.0)];
    assert_eq!(scalars(records[1]), expected.map(|(tag, value)| (tag.to_string(), value)));
    assert_eq!(fields(records[2])[1], (2, Field::Varint(u64::from(u32::MAX))));
    let evaluated = scalars(records[2]);
    assert!(evaluated[0].0 == "eval/loss" && evaluated[0].1.is_nan(), "{evaluated:?}");
}

#[test]
fn a_run_that_goes_on_takes_another_file() {
    let folder = Folder::new("tensorboard-twice");
    let nested = folder.file("a/b");
    let _first = TensorBoard::create(&nested).unwrap();
    let _second = TensorBoard::create(&nested).unwrap();
    assert_eq!(fs::read_dir(&nested).unwrap().count(), 2);
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let folder = Folder::new("tensorboard-refused");
    fs::write(folder.file("taken"), "").unwrap();
    let error = TensorBoard::create(&folder.file("taken")).err().unwrap().to_string();
    assert!(
        error.starts_with("cannot write ") && error.contains("taken/events.out.tfevents."),
        "{error}"
    );
}

#[test]
fn a_run_that_goes_on_says_from_where() {
    let folder = Folder::new("tensorboard-after");
    TensorBoard::create_after(folder.path(), 40).unwrap();
    let (_, bytes) = only_file(&folder);
    let records = records(&bytes);
    // SessionLog START: what was said of this step and later ones is forgotten.
    let [_, step, session] = &fields(records[1])[..] else { panic!("{records:?}") };
    assert_eq!(*step, (2, Field::Varint(41)));
    let (7, Field::Bytes(session)) = session else { panic!("{session:?}") };
    assert_eq!(fields(session), [(1, Field::Varint(1))]);
}
