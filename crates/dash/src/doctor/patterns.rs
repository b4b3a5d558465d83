//! Recognizes failures by the texts that the ranks print.

use super::failure::FailureKind;
use super::failure_class::FailureClass;

/// Cause of a failure, recognized in the text of a log.
pub(super) struct Pattern {
    /// Any of these parts of a line.
    texts: &'static [&'static str],
    pub kind: FailureKind,
    pub class: FailureClass,
    pub action: &'static str,
}

/// In order of precedence: a rank that runs out of memory also breaks the connections of others.
const PATTERNS: &[Pattern] = &[
    Pattern {
        texts: &["is not finite"],
        kind: FailureKind::NotFinite,
        class: FailureClass::Deterministic,
        action: "run the printed command with --replay-step: the same bits again mean the data or the arithmetic, other \
                 bits mean a machine. Then try a lower train.lr, a longer train.warmup or a smaller train.clip",
    },
    Pattern {
        texts: &["corrupt samples, but data.max_corrupt", "no intact sample"],
        kind: FailureKind::CorruptData,
        class: FailureClass::DataDependent,
        action: "run `lockstep data inspect --check` on the token file and prepare it again",
    },
    Pattern {
        texts: &["memory allocation of", "Cannot allocate memory", "out of memory", "bytes failed"],
        kind: FailureKind::OutOfMemory,
        class: FailureClass::Deterministic,
        action: "use less memory, see below",
    },
    Pattern {
        texts: &["No space left on device", "Disk quota exceeded", "the disk is full"],
        kind: FailureKind::FullDisk,
        class: FailureClass::Infrastructure,
        action: "free disk space, or keep fewer checkpoints (--set checkpoint.keep=1), then --resume",
    },
    Pattern {
        texts: &["is corrupt at byte", "not a Lockstep checkpoint", "manifest.json:"],
        kind: FailureKind::CheckpointCorruption,
        class: FailureClass::Infrastructure,
        action: "run `lockstep ckpt check`; --resume uses the newest checkpoint that is intact. Test the storage",
    },
    Pattern {
        texts: &[
            "use the same run file and --set on every rank",
            "contradicts the launcher",
            "of the started ranks",
            "ranks were started",
            "rank was started",
            "the layout uses",
            "ranks; start",
            "runs another program",
            "different programs",
        ],
        kind: FailureKind::LaunchMismatch,
        class: FailureClass::Deterministic,
        action: "start every host with the same program, run file, --set and number of ranks",
    },
    Pattern {
        texts: &["ranks disagree in group", "a later call"],
        kind: FailureKind::Disagreement,
        class: FailureClass::Deterministic,
        action: "ranks made different calls: compare their program and configuration",
    },
    Pattern {
        texts: &["a CPU, its memory or the network changed bits"],
        kind: FailureKind::ChangedBits,
        class: FailureClass::Infrastructure,
        action: "test the memory and CPU of the named rank's host; the run continues from the newest checkpoint",
    },
    Pattern {
        texts: &[
            "could not join",
            "cannot connect to rank",
            "Connection refused",
            "check the network and the firewalls",
        ],
        kind: FailureKind::BlockedPort,
        class: FailureClass::Infrastructure,
        action: "check --master-addr, --master-port and the firewalls between the hosts",
    },
    Pattern {
        texts: &["no heartbeat from"],
        kind: FailureKind::SilentRank,
        class: FailureClass::Infrastructure,
        action: "the rank was stopped, its host is overloaded, or the network is cut; --resume continues",
    },
    Pattern {
        texts: &["panicked at"],
        kind: FailureKind::Panic,
        class: FailureClass::Deterministic,
        action: "this is a bug: report the lines below with the plan.json of the run",
    },
    Pattern {
        texts: &["lost its connection to rank", "has left the world", "aborted:"],
        kind: FailureKind::LostRank,
        class: FailureClass::Infrastructure,
        action: "look at the log of the rank that is blamed; --resume continues from the newest checkpoint",
    },
];

/// The first pattern that matches any of the lines, and the last line that matches it.
pub(super) fn find<'a>(lines: &[&'a str]) -> Option<(&'static Pattern, &'a str)> {
    PATTERNS.iter().find_map(|pattern| {
        let matches = |line: &&&str| pattern.texts.iter().any(|text| line.contains(text));
        lines.iter().rev().find(matches).map(|line| (pattern, *line))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_ranks_are_recognized() {
        let cases = [
            (
                "error: step 2: rank 0: layers.3 (its gradient) is not finite; the step",
                FailureKind::NotFinite,
            ),
            ("memory allocation of 123 bytes failed", FailureKind::OutOfMemory),
            ("rank 1: /x: No space left on device (os error 28)", FailureKind::FullDisk),
            (
                "rank-0.safetensors is corrupt at byte 12: checksum",
                FailureKind::CheckpointCorruption,
            ),
            (
                "rank 1 has train.lr.min = 0.002, rank 0 has 0.001; use the same run file and --set on every rank",
                FailureKind::LaunchMismatch,
            ),
            (
                "error: layout.data (line 16): data=2 needs 2 ranks, but 3 ranks were started; use --ranks 2",
                FailureKind::LaunchMismatch,
            ),
            ("rank 0 cannot connect to rank 1; check the network", FailureKind::BlockedPort),
            ("no heartbeat from rank 2 for 10.0 s: it is stopped", FailureKind::SilentRank),
            ("thread 'main' panicked at src/x.rs:1:2:", FailureKind::Panic),
            ("step 9: 101 corrupt samples, but data.max_corrupt = 100", FailureKind::CorruptData),
        ];
        for (line, kind) in cases {
            let found = find(&["step 1/9 | loss 3", line, "end"]);
            assert_eq!(found.map(|(pattern, line)| (pattern.kind, line)), Some((kind, line)));
        }
        assert!(find(&["step 1/9 | loss 3"]).is_none());
    }

    #[test]
    fn the_cause_wins_over_its_consequences() {
        let lines = ["rank 0 lost its connection to rank 1", "memory allocation of 8 bytes failed"];
        assert_eq!(find(&lines).unwrap().0.kind, FailureKind::OutOfMemory);
    }
}
