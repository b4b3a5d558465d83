//! Whether all ranks run the same: looked at before the first step, because ranks that differ would train something
//! that nobody described. Never guesses which of two is right: it names both.

use lockstep_comm::Group;
use lockstep_plan::Plan;
use serde_json::Value;

use crate::Error;

/// What a rank has in common with all others: what it is, and its value.
pub type Setting = (String, String);

/// What a plan says, a line for each key. How many threads a rank has is its own affair: it changes no result.
pub fn settings(plan: &Plan) -> Vec<Setting> {
    let mut all = Vec::new();
    let value = serde_json::to_value(plan).unwrap_or(Value::Null);
    flatten("", &value, &mut all);
    all.retain(|(key, _)| key != "train.threads");
    all
}

/// Ends with the first difference between any rank and rank 0, and the same words on every rank. All ranks call it.
///
/// One all-gather of 32 bytes; texts only where there is a difference to tell.
pub fn check_consistency(group: &Group, host: &str, mine: &[Setting]) -> Result<(), Error> {
    let digest = digest(mine);
    let mut digests = vec![0u8; 32 * group.size()];
    group.all_gather(&digest, &mut digests)?;
    let other = digests.chunks_exact(32).position(|theirs| theirs != &digests[..32]);
    let Some(other) = other else { return Ok(()) };

    let text = text(host, mine);
    let first = broadcast_text(group, 0, &text)?;
    let theirs = broadcast_text(group, other, &text)?;
    Err(Error::Mistake(difference(&first, other, &theirs)))
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

/// The host, and then a line for each trait.
fn text(host: &str, traits: &[Setting]) -> String {
    let line = |text: &str| text.replace('\n', " ");
    let lines = traits.iter().map(|(key, value)| format!("\n{}\t{}", line(key), line(value)));
    std::iter::once(line(host)).chain(lines).collect()
}

fn digest(traits: &[Setting]) -> [u8; 32] {
    blake3::hash(text("", traits).as_bytes()).into()
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
    let value = |of: &[Setting], key: &str| {
        of.iter().find(|(name, _)| name == key).map_or("not there", |(_, value)| value).to_string()
    };
    let keys = ours.iter().chain(&theirs).map(|(key, _)| key);
    let key = keys.into_iter().find(|key| value(&ours, key) != value(&theirs, key));
    let Some(key) = key else { return format!("rank {other} and rank 0 do not run the same") };
    let (at, there) = (value(&ours, key), value(&theirs, key));
    let (what, way_out) = match key.as_str() {
        "program" => ("another program".to_string(), "run the same build on every host"),
        "data" => ("other data".to_string(), "give every host the same files"),
        key => (format!("with another {key}"), "give every rank the same run file and --set"),
    };
    format!(
        "rank {other} (on {other_host}) runs {what} than rank 0 (on {host}): {there} / {at}; {way_out}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::on_threads;

    /// What each of three ranks is told, where one of them differs.
    fn told(odd: usize, key: &str, value: &str) -> Vec<Result<(), String>> {
        on_threads(3, |world| {
            let own = |name: &str, usual: &str| {
                let odd = world.rank() == odd && name == key;
                (name.to_string(), if odd { value } else { usual }.to_string())
            };
            let mine = [own("program", "blake3 12ab"), own("train.lr", "0.001"), own("name", "x")];
            let host = format!("host{}", world.rank());
            check_consistency(&world, &host, &mine).map_err(|error| error.to_string())
        })
    }

    #[test]
    fn a_difference_is_named_by_all_ranks_alike() {
        assert_eq!(told(9, "", ""), [Ok(()), Ok(()), Ok(())]);
        for (odd, key, value, words) in [
            (
                1,
                "program",
                "blake3 34cd",
                "rank 1 (on host1) runs another program than rank 0 (on host0): blake3 34cd / blake3 12ab",
            ),
            (2, "train.lr", "0.002", "rank 2 (on host2) runs with another train.lr than rank 0"),
            // When rank 0 is the odd one, it is compared with the first of the others.
            (
                0,
                "name",
                "two\nlines",
                "rank 1 (on host1) runs with another name than rank 0 (on host0): x / two lines",
            ),
        ] {
            let all = told(odd, key, value);
            let first = all[0].clone().unwrap_err();
            assert!(first.contains(words), "{first}");
            assert!(all.iter().all(|one| one.as_ref() == Err(&first)), "{all:?}");
        }
    }
}
