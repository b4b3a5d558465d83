//! Consistency check before the first step: all ranks must use the same settings. Reports both values of a difference
//! and does not guess which one is right.

use lockstep_comm::Group;
use lockstep_plan::Plan;
use serde_json::Value;

use crate::Error;

/// Name and value of a setting that all ranks must share.
pub type Setting = (String, String);

/// All keys of a plan except `train.threads`, which may differ between ranks: it does not change the result.
pub fn settings(plan: &Plan) -> Vec<Setting> {
    let mut all = Vec::new();
    let value = serde_json::to_value(plan).unwrap_or(Value::Null);
    flatten("", &value, &mut all);
    all.retain(|(key, _)| key != "train.threads");
    all
}

/// Fails with the first difference between rank 0 and any other rank, with the same message on every rank. Collective.
///
/// One all-gather of 32 bytes per rank; the settings are broadcast only if they differ.
pub fn check_consistency(group: &Group, host: &str, mine: &[Setting]) -> Result<(), Error> {
    let digest = digest(mine);
    let mut digests = vec![0u8; 32 * group.size()];
    group.all_gather(&digest, &mut digests)?;
    let other = digests.chunks_exact(32).position(|theirs| theirs != &digests[..32]);
    let Some(other) = other else { return Ok(()) };

    let text = text(host, mine);
    let first = broadcast_text(group, 0, &text)?;
    let theirs = broadcast_text(group, other, &text)?;
    Err(Error::Invalid(difference(&first, other, &theirs)))
}

fn flatten(prefix: &str, value: &Value, out: &mut Vec<Setting>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, out);
            }
        }
        value => out.push((prefix.to_string(), value.to_string())),
    }
}

/// The host, then one line per setting.
fn text(host: &str, settings: &[Setting]) -> String {
    let line = |text: &str| text.replace('\n', " ");
    let lines = settings.iter().map(|(key, value)| format!("\n{}\t{}", line(key), line(value)));
    std::iter::once(line(host)).chain(lines).collect()
}

fn digest(settings: &[Setting]) -> [u8; 32] {
    blake3::hash(text("", settings).as_bytes()).into()
}

fn broadcast_text(group: &Group, rank: usize, mine: &str) -> Result<String, Error> {
    let mut len = [mine.len() as i64];
    group.broadcast(&mut len, rank)?;
    let mut bytes = mine.as_bytes().to_vec();
    bytes.resize(len[0] as usize, 0);
    group.broadcast(&mut bytes, rank)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn difference(first: &str, other: usize, theirs: &str) -> String {
    let parts = |text: &str| -> (String, Vec<Setting>) {
        let mut lines = text.lines();
        let host = lines.next().unwrap_or_default().to_string();
        let split = |line: &str| line.split_once('\t').map(|(k, v)| (k.into(), v.into()));
        (host, lines.filter_map(split).collect())
    };
    let ((host, ours), (other_host, theirs)) = (parts(first), parts(theirs));
    let value = |settings: &[Setting], key: &str| {
        let setting = settings.iter().find(|(name, _)| name == key);
        setting.map_or("no value", |(_, value)| value).to_string()
    };
    let keys = ours.iter().chain(&theirs).map(|(key, _)| key);
    let key = keys.into_iter().find(|key| value(&ours, key) != value(&theirs, key));
    let Some(key) = key else {
        return format!("rank {other} and rank 0 have different settings");
    };
    let fix = match key.as_str() {
        "program" => "run the same build on every host",
        "data" => "use the same data files on every host",
        _ => "use the same run file and --set on every rank",
    };
    format!(
        "rank {other} (on host {other_host}) has {key} = {}, rank 0 (on host {host}) has {}; {fix}",
        value(&theirs, key),
        value(&ours, key)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::on_threads;

    /// Results on three ranks if one of them has another value.
    fn checked(odd: usize, key: &str, value: &str) -> Vec<Result<(), String>> {
        on_threads(3, |world| {
            let setting = |name: &str, usual: &str| {
                let odd = world.rank() == odd && name == key;
                (name.to_string(), if odd { value } else { usual }.to_string())
            };
            let mine = [
                setting("program", "blake3 12ab"),
                setting("train.lr", "0.001"),
                setting("name", "x"),
            ];
            let host = format!("node{}", world.rank());
            check_consistency(&world, &host, &mine).map_err(|error| error.to_string())
        })
    }

    #[test]
    fn all_ranks_report_the_same_difference() {
        assert_eq!(checked(9, "", ""), [Ok(()), Ok(()), Ok(())]);
        for (odd, key, value, message) in [
            (
                1,
                "program",
                "blake3 34cd",
                "rank 1 (on host node1) has program = blake3 34cd, rank 0 (on host node0) has blake3 12ab; run the same build",
            ),
            (2, "train.lr", "0.002", "rank 2 (on host node2) has train.lr = 0.002, rank 0"),
            // If rank 0 is the odd one, it is compared with rank 1.
            (
                0,
                "name",
                "two\nlines",
                "rank 1 (on host node1) has name = x, rank 0 (on host node0) has two lines",
            ),
        ] {
            let all = checked(odd, key, value);
            let first = all[0].clone().unwrap_err();
            assert!(first.contains(message), "{first}");
            assert!(all.iter().all(|one| one.as_ref() == Err(&first)), "{all:?}");
        }
    }
}
