//! The merged file: the JSON format of chrome://tracing, compressed, which Perfetto opens as well. A process per rank, a
//! track per thread, arrows between the members of a call, and memory counters by tag.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::Timeline;
use super::rank_file::{FileSpan, RankTrace};

/// Writes the merged file, completely or not at all.
pub fn write_chrome(timeline: &Timeline, path: &Path) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let file = GzEncoder::new(BufWriter::new(File::create(&partial)?), Compression::default());
    let mut events = Events { out: file, first: true };
    events.out.write_all(b"{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
    let error = timeline.alignment_error();
    let run = timeline.ranks.first().map_or("", |rank| rank.run.as_str());
    let other = json!({
        "run": run, "ranks": timeline.ranks.len(), "clock_error_us": 1e6 * error,
        "dropped_spans": timeline.ranks.iter().map(|rank| rank.dropped).sum::<u64>(),
    });
    serde_json::to_writer(&mut events.out, &other)?;
    events.out.write_all(b",\"traceEvents\":[\n")?;
    for (index, rank) in timeline.ranks.iter().enumerate() {
        names(rank, &mut events)?;
        for (number, span) in rank.spans.iter().enumerate() {
            let split = timeline.splits[index][number];
            events.add(&slice(rank, span))?;
            if let Some(split) = split.filter(|_| span.duration > 0) {
                let at = (rank.rank, span.thread);
                let arrived = span.start + split.waiting;
                events.add(&part(at, "waiting for peers", span.start, split.waiting))?;
                events.add(&part(at, "moving data", arrived, span.duration - split.waiting))?;
            }
        }
        for sample in &rank.memory {
            let bytes = rank.tags.iter().zip(&sample.bytes);
            let values: serde_json::Map<String, Value> =
                bytes.map(|(tag, bytes)| (tag.clone(), (*bytes).into())).collect();
            events.add(&json!({
                "ph": "C", "name": "memory", "pid": rank.rank, "ts": micros(sample.at), "args": values,
            }))?;
        }
    }
    arrows(timeline, &mut events)?;
    events.out.write_all(b"\n]}\n")?;
    events.out.finish()?.flush()?;
    std::fs::rename(&partial, path)
}

struct Events<W: Write> {
    out: W,
    first: bool,
}

impl<W: Write> Events<W> {
    fn add(&mut self, event: &Value) -> io::Result<()> {
        if !std::mem::replace(&mut self.first, false) {
            self.out.write_all(b",\n")?;
        }
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }
}

/// Names of the process and its threads.
fn names(rank: &RankTrace, events: &mut Events<impl Write>) -> io::Result<()> {
    let main = rank.main_thread();
    let name = format!("rank {} ({}) on {}", rank.rank, rank.coord, rank.host);
    let about = |what: &str, thread: u32, args: Value| json!({ "ph": "M", "name": what, "pid": rank.rank, "tid": thread, "args": args });
    events.add(&about("process_name", 0, json!({ "name": name })))?;
    events.add(&about("process_sort_index", 0, json!({ "sort_index": rank.rank })))?;
    for thread in &rank.threads {
        let is_main = main == Some(thread.id);
        let name = if is_main { "training" } else { &thread.name };
        events.add(&about("thread_name", thread.id, json!({ "name": name })))?;
        let order = if is_main { 0 } else { thread.id };
        events.add(&about("thread_sort_index", thread.id, json!({ "sort_index": order })))?;
    }
    Ok(())
}

/// A span as a slice.
fn slice(rank: &RankTrace, span: &FileSpan) -> Value {
    let mut args = serde_json::Map::new();
    let mut arg = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            args.insert(key.into(), value);
        }
    };
    arg("step", span.step.map(Value::from));
    arg("stage", span.stage.map(Value::from));
    arg("micro_batch", span.micro.map(Value::from));
    arg("bytes", span.bytes.map(Value::from));
    if let Some(call) = &span.call {
        arg("op", Some(call.op.name().into()));
        arg("group", Some(call.group.as_str().into()));
        arg("algorithm", Some(call.algo.as_str().into()));
        arg("sequence", Some(call.seq.into()));
        arg("members", Some(call.members.into()));
        arg("from", call.message.map(|(from, _)| from.into()));
        arg("to", call.message.map(|(_, to)| to.into()));
    }
    let block = span.block.and_then(|block| rank.blocks.get(block as usize));
    let name = match (block, span.step, span.kind) {
        (Some(block), ..) => format!("{} {block}", span.name),
        (_, Some(step), _) => format!("step {step}"),
        (.., lockstep_types::trace::SpanKind::Exposed) => format!("exposed: {}", span.name),
        _ => span.name.clone(),
    };
    json!({
        "ph": "X", "name": name, "cat": span.kind.name(), "pid": rank.rank, "tid": span.thread,
        "ts": micros(span.start), "dur": micros(span.duration), "args": args,
    })
}

fn part((rank, thread): (usize, u32), name: &str, start: u64, duration: u64) -> Value {
    json!({
        "ph": "X", "name": name, "cat": "call_part", "pid": rank, "tid": thread,
        "ts": micros(start), "dur": micros(duration),
    })
}

/// Arrows from the sender of a message to its receiver, and from the last member of a collective to the others.
fn arrows(timeline: &Timeline, events: &mut Events<impl Write>) -> io::Result<()> {
    let mut id = 0u64;
    for members in timeline.calls() {
        let (rank, index) = members[0];
        let Some(split) = timeline.splits[rank][index] else { continue };
        let call = timeline.ranks[rank].spans[index].call.as_ref();
        let message = call.and_then(|call| call.message);
        let is_sender = |(rank, _): &&(usize, usize)| {
            message.is_some_and(|(from, _)| from as usize == timeline.ranks[*rank].rank)
        };
        let source = members.iter().find(is_sender).copied().unwrap_or(split.last);
        let name = if message.is_some() { "message" } else { "collective" };
        for target in members.iter().copied().filter(|member| *member != source) {
            id += 1;
            let from = &timeline.ranks[source.0].spans[source.1];
            let to = &timeline.ranks[target.0].spans[target.1];
            // An arrow must not point back in time, even if clocks are aligned imperfectly.
            let leaves = from.start.min(to.end());
            let arrives = if message.is_some() { to.end() } else { leaves.max(to.start) };
            let end = |phase: &str, rank: usize, thread: u32, at: u64| {
                json!({
                    "ph": phase, "name": name, "cat": "flow", "id": id, "bp": "e",
                    "pid": timeline.ranks[rank].rank, "tid": thread, "ts": micros(at),
                })
            };
            events.add(&end("s", source.0, from.thread, leaves))?;
            events.add(&end("f", target.0, to.thread, arrives))?;
        }
    }
    Ok(())
}

/// Nanoseconds as microseconds.
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}
