//! `[trace]`: steps whose timeline is recorded.

use super::Reader;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// `[trace]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    pub steps: Option<TraceSteps>,
}

/// The steps of a timeline, including both ends. Typed as `20..23`, or `20` for one step.
///
/// ```
/// use lockstep_plan::TraceSteps;
/// assert_eq!("20..23".parse(), Ok(TraceSteps { first: 20, last: 23 }));
/// assert_eq!("7".parse(), Ok(TraceSteps { first: 7, last: 7 }));
/// assert!("23..20".parse::<TraceSteps>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TraceSteps {
    pub first: usize,
    pub last: usize,
}

impl FromStr for TraceSteps {
    type Err = String;

    fn from_str(typed: &str) -> Result<TraceSteps, String> {
        let (first, last) = typed.split_once("..").unwrap_or((typed, typed));
        let last = last.strip_prefix('=').unwrap_or(last);
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(TraceSteps { first, last }),
            _ => Err(format!("\"{typed}\" is not a range of steps")),
        }
    }
}

impl Trace {
    pub(super) fn read(reader: &mut Reader) -> Trace {
        let parse = |typed: &str| {
            let suggestion = "write the first and the last step, e.g. \"20..23\"";
            typed.parse().map_err(|message| (message, suggestion.to_string()))
        };
        Trace { steps: reader.parsed("trace.steps", "be a range of steps, e.g. \"20..23\"", parse) }
    }
}
