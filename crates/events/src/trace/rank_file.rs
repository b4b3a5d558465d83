//! The file of one rank: its spans as recorded, on its own clock.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use lockstep_types::Collective;
use lockstep_types::trace::{CallDetail, Recorded, Span, SpanDetail, SpanKind};
use serde::{Deserialize, Serialize};

use super::ClockFit;

/// Spans, memory and clock of one rank.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RankTrace {
    pub run: String,
    pub rank: usize,
    pub ranks: usize,
    pub host: String,
    /// Position in the mesh: `data=1 pipe=0`.
    pub coord: String,
    /// The traced steps, as the step report measured them.
    pub steps: Vec<StepTime>,
    pub clock: ClockFit,
    /// Names of the blocks of this rank.
    pub blocks: Vec<String>,
    pub threads: Vec<ThreadName>,
    pub spans: Vec<FileSpan>,
    /// Names of the memory tags.
    pub tags: Vec<String>,
    pub memory: Vec<MemoryCounter>,
    /// Spans that were not recorded because there were too many.
    pub dropped: u64,
}

/// Times of a step as the step report measured them, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepTime {
    pub step: u64,
    pub seconds: f64,
    pub exposed: f64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ThreadName {
    pub id: u32,
    pub name: String,
}

/// Bytes by tag at a time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryCounter {
    pub at: u64,
    pub bytes: Vec<u64>,
}

/// A span. Times are nanoseconds on the rank's clock, or on the common clock in a [`super::Timeline`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FileSpan {
    #[serde(rename = "k")]
    pub kind: SpanKind,
    #[serde(rename = "n")]
    pub name: String,
    #[serde(rename = "t")]
    pub thread: u32,
    #[serde(rename = "s")]
    pub start: u64,
    #[serde(rename = "d")]
    pub duration: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<FileCall>,
}

/// A collective, or one end of a message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileCall {
    pub op: Collective,
    pub algo: String,
    pub group: String,
    pub id: u64,
    pub members: u32,
    pub seq: u64,
    /// Sender and receiver of a message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<(u32, u32)>,
}

impl FileSpan {
    pub fn end(&self) -> u64 {
        self.start + self.duration
    }

    fn of(span: Span) -> FileSpan {
        let Span { kind, name, thread, start, duration, detail, place } = span;
        let mut file = FileSpan {
            kind,
            name: name.to_string(),
            thread,
            start: nanos(start),
            duration: nanos(duration),
            step: None,
            block: None,
            stage: None,
            micro: None,
            bytes: None,
            call: None,
        };
        match detail {
            SpanDetail::None => {}
            SpanDetail::Step(step) => file.step = Some(step),
            SpanDetail::Pass { stage, micro } => {
                (file.stage, file.micro) = (Some(stage), Some(micro));
            }
            SpanDetail::Block(block) => {
                file.block = Some(block);
                (file.stage, file.micro) = (Some(place.0), Some(place.1));
            }
            SpanDetail::Bytes(bytes) => file.bytes = Some(bytes),
            SpanDetail::Call(call) => {
                file.bytes = Some(call.bytes);
                file.call = Some(FileCall::of(call));
            }
        }
        file
    }
}

impl FileCall {
    fn of(call: CallDetail) -> FileCall {
        FileCall {
            op: call.collective,
            algo: call.algo.to_string(),
            group: call.group.to_string(),
            id: call.group_id,
            members: call.members,
            seq: call.sequence,
            message: call.message,
        }
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl RankTrace {
    /// Adds what a rank recorded.
    pub fn with(mut self, recorded: Recorded) -> RankTrace {
        let thread = |(id, name)| ThreadName { id, name };
        self.threads = recorded.threads.into_iter().map(thread).collect();
        self.spans = recorded.spans.into_iter().map(FileSpan::of).collect();
        let counter = |sample: lockstep_types::trace::MemorySample| MemoryCounter {
            at: nanos(sample.at),
            bytes: sample.bytes,
        };
        self.memory = recorded.memory.into_iter().map(counter).collect();
        self.dropped = recorded.dropped;
        self
    }

    /// Writes the file into `folder`, which is created.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let name = format!("rank-{}.json.gz", self.rank);
        let partial = folder.join(format!("{name}.partial"));
        let mut file = GzEncoder::new(BufWriter::new(File::create(&partial)?), Compression::fast());
        serde_json::to_writer(&mut file, self)?;
        file.finish()?.flush()?;
        std::fs::rename(&partial, folder.join(name))
    }

    pub fn read(path: &Path) -> io::Result<RankTrace> {
        let about = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display()))
        };
        let mut text = Vec::new();
        let file = File::open(path).map_err(about)?;
        GzDecoder::new(BufReader::new(file)).read_to_end(&mut text).map_err(about)?;
        serde_json::from_slice(&text).map_err(|error| about(error.into()))
    }
}
