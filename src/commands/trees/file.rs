//! Reads a run file of trees and applies overrides.

use std::path::Path;

use anyhow::{Context, bail};
use lockstep_gbdt::Config;

/// Reads a run file, applies the overrides (`section.key=value`) and checks it. Paths are relative to the current
/// directory.
pub fn read(path: &Path, overrides: &[String]) -> anyhow::Result<Config> {
    let text = crate::run_file::read_text(path)?;
    parse(&text, overrides, path).with_context(|| format!("{}", path.display()))
}

fn parse(text: &str, overrides: &[String], path: &Path) -> anyhow::Result<Config> {
    // Errors of the file itself have line numbers only here.
    let _: Config = toml::from_str(text)?;
    let mut table: toml::Table = toml::from_str(text)?;
    for text in overrides {
        set(&mut table, text)?;
    }
    let mut config: Config = table.try_into().context("after --set")?;
    if config.name.is_none() {
        config.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    }
    config.check()?;
    Ok(config)
}

/// Sets one key. A value that is not TOML is text.
fn set(table: &mut toml::Table, text: &str) -> anyhow::Result<()> {
    let Some((key, value)) = text.split_once('=') else {
        bail!("--set {text}: expected SECTION.KEY=VALUE");
    };
    let parsed = toml::from_str::<toml::Table>(&format!("value = {value}"));
    let value = match parsed.ok().and_then(|mut table| table.remove("value")) {
        Some(value) => value,
        None => toml::Value::String(value.to_string()),
    };
    let keys: Vec<&str> = key.trim().split('.').collect();
    let Some((last, sections)) = keys.split_last() else { bail!("--set {text}: the key is empty") };
    let mut at = table;
    for section in sections {
        let next = at.entry(section.to_string()).or_insert_with(|| toml::Table::new().into());
        let Some(next) = next.as_table_mut() else {
            bail!("--set {text}: {section} is not a section")
        };
        at = next;
    }
    at.insert(last.to_string(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::path::Path;

    const RUN: &str = "[data]\ntrain = \"a.csv\"\n[trees]\neta = 0.1\n";

    fn error(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|set| set.to_string()).collect();
        format!("{:#}", parse(text, &overrides, Path::new("x.toml")).unwrap_err())
    }

    #[test]
    fn overrides_and_names() {
        let sets = ["trees.eta=0.5", "name=other", "data.label=y"].map(str::to_string);
        let config = parse(RUN, &sets, Path::new("x.toml")).unwrap();
        assert_eq!((config.trees.eta, config.name.as_deref()), (0.5, Some("other")));
        assert_eq!(config.data.label.as_deref(), Some("y"));
        let config = parse(RUN, &[], Path::new("x.toml")).unwrap();
        assert_eq!(config.name.as_deref(), Some("x"));
    }

    #[test]
    fn errors_suggest_a_fix() {
        assert!(error("[trees]\nsteps = 3\n", &[]).contains("line 2"));
        assert!(error("", &[]).contains("set either data.train or data.generate"));
        let both = error(RUN, &["trees.eta=-1", "trees.max_bin=1"]);
        assert!(both.contains("2 errors") && both.contains("trees.eta must be positive"), "{both}");
        assert!(error(RUN, &["eta"]).contains("expected SECTION.KEY=VALUE"));
    }
}
