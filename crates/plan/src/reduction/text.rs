//! A policy as text, one line per call.

use std::fmt;

use super::{Gather, PassKind, Point, Reduce, ReducePoint, ReductionPolicy, StateCall, StateOp};
use lockstep_types::Collective;

/// `parameters gathered every pass; gradients reduce-scattered every micro-batch; overlapped`
impl fmt::Display for ReductionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.gather {
            Gather::Never => "parameters replicated",
            Gather::AfterOptimizer => "parameters gathered after the optimizer",
            Gather::EveryPass => "parameters gathered every pass",
            Gather::EveryStep => "parameters gathered every step",
        })?;
        match self.reduce {
            None => f.write_str("; gradients not reduced")?,
            Some(reduce) => write!(f, "; gradients {reduce}")?,
        }
        f.write_str(if self.overlap { "; overlapped" } else { "" })
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.collective {
            Collective::ReduceScatter => "reduce-scattered",
            _ => "all-reduced",
        };
        let when = match self.point {
            ReducePoint::EveryMicroBatch => "every micro-batch",
            ReducePoint::LastMicroBatch => "in the last micro-batch",
            ReducePoint::EndOfPasses => "after all passes",
        };
        write!(f, "{how} {when}")
    }
}

/// `after backward of block 2, micro-batch 0: reduce bucket 1, overlapped`
impl fmt::Display for StateCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let overlapped = if self.overlapped { ", overlapped" } else { "" };
        write!(f, "{}: {}{overlapped}", self.point, self.op)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Point::Before { pass, block, micro } => {
                write!(f, "before {pass} of block {block}, micro-batch {micro}")
            }
            Point::After { pass, block, micro } => {
                write!(f, "after {pass} of block {block}, micro-batch {micro}")
            }
            Point::EndOfPasses => f.write_str("after all passes"),
            Point::AfterOptimizer => f.write_str("after the optimizer"),
        }
    }
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PassKind::Forward => "forward",
            PassKind::Loss => "loss and backward",
            PassKind::Backward => "backward",
            PassKind::Weights => "weight gradients",
            PassKind::Inference => "inference",
        })
    }
}

impl fmt::Display for StateOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateOp::Gather { block } => write!(f, "gather block {block}"),
            StateOp::Release { block } => write!(f, "release block {block}"),
            StateOp::Reduce { bucket, .. } => write!(f, "reduce bucket {bucket}"),
            StateOp::Sum(sum) => write!(f, "sum {sum:?} over {}", sum.group().name()),
        }
    }
}
