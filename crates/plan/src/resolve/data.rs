//! Resolves `[data]`.

use super::checker::Checker;
use crate::config::nearest;
use crate::model::Shape;
use crate::plan::{Data, Source};

/// Sources that need no file.
const BUILTINS: [&str; 1] = ["grammar"];

pub(super) fn data(checker: &mut Checker, model: Option<&Shape>) -> Data {
    let typed = &checker.config.data;
    let source = Source::from(checker.config.source().to_string());
    let longest = model.map(|shape| shape.seq);
    let data = Data {
        seq: typed.seq.or(longest).unwrap_or(1),
        held_out: checker.config.held_out(),
        max_corrupt: typed.max_corrupt.unwrap_or(Data::MAX_CORRUPT),
        source,
    };
    source_exists(checker, &data.source);
    checker.at_least_one("data.seq", data.seq);
    if let Some(longest) = longest.filter(|longest| data.seq > *longest) {
        let message = format!("seq={} is longer than model.seq={longest}", data.seq);
        checker.add(&["data.seq", "model.seq"], message, format!("use at most {longest}"));
    }
    let held = data.held_out;
    checker.require(
        (0.0..1.0).contains(&held),
        "data.held_out",
        held,
        "be at least 0 and less than 1",
    );
    data
}

fn source_exists(checker: &mut Checker, source: &Source) {
    let (message, suggestion) = match source {
        Source::Builtin(name) if BUILTINS.contains(&name.as_str()) => return,
        Source::Builtin(name) => {
            let meant = nearest(name, BUILTINS.into_iter()).unwrap_or(BUILTINS[0]);
            (
                format!("unknown built-in source \"{name}\""),
                format!("did you mean \"builtin:{meant}\"?"),
            )
        }
        Source::File(path) if path.as_os_str().is_empty() => (
            "source is empty".to_string(),
            "use \"builtin:grammar\" or the path of a token file".to_string(),
        ),
        Source::File(_) => return,
    };
    checker.add(&["data.source"], message, suggestion);
}
