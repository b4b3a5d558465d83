//! Reads jsonl: one row per line. The tokenizer threads parse the rows.

use super::batch::{Batch, MAX_ROW_BYTES};
use super::input::Input;
use super::lines::Lines;
use super::pipeline::Sink;
use crate::error::Result;

pub fn read<'a>(input: &'a Input, sink: &mut Sink<'a>) -> Result<()> {
    let mut lines = Lines::open(input)?;
    let mut batch = Batch::new(input);
    let mut row = Vec::new();
    loop {
        let mut read = lines.next(&mut row, MAX_ROW_BYTES)?;
        if read == 0 {
            return sink.give(batch);
        }
        if read == MAX_ROW_BYTES && !lines.ended {
            batch.add_bad(lines.line, format!("longer than {} MiB", MAX_ROW_BYTES >> 20));
            read += lines.skip(&mut row)?;
        } else if !row.trim_ascii().is_empty() {
            batch.add(lines.line, row.trim_ascii());
        }
        sink.taken(read as u64);
        if batch.is_full() {
            sink.give(std::mem::replace(&mut batch, Batch::new(input)))?;
        }
    }
}
