//! What is learned from.

use super::findings::Findings;
use crate::config::nearest;
use crate::model::Shape;
use crate::plan::{Data, Source};

/// The sources that need no file.
const BUILTINS: [&str; 1] = ["grammar"];

pub(super) fn data(findings: &mut Findings, model: Option<&Shape>) -> Data {
    let typed = &findings.config.data;
    let source = Source::from(findings.config.source().to_string());
    let longest = model.map(|shape| shape.seq);
    let data = Data {
        seq: typed.seq.or(longest).unwrap_or(1),
        held_out: findings.config.held_out(),
        max_corrupt: typed.max_corrupt.unwrap_or(Data::MAX_CORRUPT),
        source,
    };
    source_exists(findings, &data.source);
    findings.at_least_one("data.seq", data.seq);
    if let Some(longest) = longest.filter(|longest| data.seq > *longest) {
        let what = format!("seq={} is longer than model.seq={longest}", data.seq);
        findings.add(&["data.seq", "model.seq"], what, format!("say at most {longest}"));
    }
    let held = data.held_out;
    findings.require(
        (0.0..1.0).contains(&held),
        "data.held_out",
        held,
        "it must be from 0 to below 1",
    );
    data
}

fn source_exists(findings: &mut Findings, source: &Source) {
    let (what, way_out) = match source {
        Source::Builtin(name) if BUILTINS.contains(&name.as_str()) => return,
        Source::Builtin(name) => {
            let meant = nearest(name, BUILTINS.into_iter()).unwrap_or(BUILTINS[0]);
            (
                format!("no built-in source is called \"{name}\""),
                format!("did you mean \"builtin:{meant}\"?"),
            )
        }
        Source::File(path) if path.as_os_str().is_empty() => (
            "source is empty".to_string(),
            "say \"builtin:grammar\" or the path of a token file".to_string(),
        ),
        Source::File(_) => return,
    };
    findings.add(&["data.source"], what, way_out);
}
