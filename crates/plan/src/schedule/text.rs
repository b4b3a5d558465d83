//! Text form of schedules: a header line and a line of actions per rank. JSON contains the same lines.

use super::action::{Act, Action};
use super::{Schedule, ScheduleKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// ```text
/// 1f1b ranks=2 chunks=1 micros=2
/// 0F0 0F1 0B0 0B1
/// 1F0 1B0 1F1 1B1
/// ```
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Schedule { kind, ranks, chunks, micros, .. } = self;
        writeln!(f, "{kind} ranks={ranks} chunks={chunks} micros={micros}")?;
        self.actions.iter().try_for_each(|list| writeln!(f, "{}", line(list)))
    }
}

/// Parses the output of `Display`. [`Schedule::check`] validates the lists.
impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Schedule, String> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let head = || {
            let words: Vec<&str> = first.split_whitespace().collect();
            let [kind, ranks, chunks, micros] = words[..] else { return None };
            let number = |word: &str, name: &str| word.strip_prefix(name)?.parse().ok();
            Some((
                kind,
                number(ranks, "ranks=")?,
                number(chunks, "chunks=")?,
                number(micros, "micros=")?,
            ))
        };
        let (kind, ranks, chunks, micros) = head().ok_or_else(|| {
            format!("line 1: `{first}` is not like `1f1b ranks=4 chunks=1 micros=8`")
        })?;
        let kind: ScheduleKind = kind.parse().map_err(|e| format!("line 1: {e}"))?;
        let actions = lines.map(str::to_string).collect();
        Written { kind, ranks, chunks, micros, actions }.try_into()
    }
}

/// A schedule in JSON: its actions as lines of text.
#[derive(Serialize, Deserialize)]
pub(super) struct Written {
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micros: usize,
    actions: Vec<String>,
}

impl From<Schedule> for Written {
    fn from(schedule: Schedule) -> Written {
        let Schedule { kind, ranks, chunks, micros, actions } = schedule;
        let actions = actions.iter().map(|list| line(list)).collect();
        Written { kind, ranks, chunks, micros, actions }
    }
}

impl TryFrom<Written> for Schedule {
    type Error = String;

    fn try_from(written: Written) -> Result<Schedule, String> {
        let Written { kind, ranks, chunks, micros, actions } = written;
        if ranks == 0 || actions.len() != ranks {
            return Err(format!(
                "{} lines of actions for ranks={ranks}; there must be one per rank",
                actions.len()
            ));
        }
        // Products of these, such as the number of stages, must not overflow.
        if ranks.checked_mul(chunks).and_then(|stages| stages.checked_mul(micros)).is_none() {
            return Err(format!("chunks={chunks}, micros={micros} are more than can be meant"));
        }
        let read = |(rank, line): (usize, &String)| -> Result<Vec<Action>, String> {
            let action = |word| action(word, kind).ok_or(word);
            line.split_whitespace().map(action).collect::<Result<_, _>>().map_err(|word| {
                format!(
                    "rank {rank}: `{word}` is not like 2F0: a stage, F, B or W, and a micro-batch"
                )
            })
        };
        let actions = actions.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        Ok(Schedule { kind, ranks, chunks, micros, actions })
    }
}

fn line(actions: &[Action]) -> String {
    actions.iter().map(Action::to_string).collect::<Vec<_>>().join(" ")
}

fn action(word: &str, kind: ScheduleKind) -> Option<Action> {
    let (stage, rest) = word.split_at(word.find(|c: char| !c.is_ascii_digit())?);
    let act = match rest.as_bytes()[0] {
        b'F' => Act::Forward,
        b'B' if kind.splits() => Act::Input,
        b'B' => Act::Backward,
        b'W' => Act::Weights,
        _ => return None,
    };
    // Digits only: `parse` would accept a sign too.
    let micro = &rest[1..];
    micro.bytes().all(|b| b.is_ascii_digit()).then_some(())?;
    Some(Action { stage: stage.parse().ok()?, act, micro: micro.parse().ok()? })
}
