//! The file that `bench machine` writes: tables of cluster descriptions, by number of ranks on CPUs and by GPU.

use std::path::Path;

use anyhow::Context;

/// Descriptions of the cores by number of ranks.
pub const SHARED: &str = "shared";
/// Descriptions of GPUs by their name.
pub const GPU: &str = "gpu";

/// New descriptions: (section, key, cluster).
#[derive(Default)]
pub struct Tables(Vec<(&'static str, String, toml::Value)>);

impl Tables {
    pub fn one(section: &'static str, key: &str, table: toml::Value) -> Tables {
        let mut tables = Tables::default();
        tables.add(section, key, table);
        tables
    }

    pub fn add(&mut self, section: &'static str, key: &str, table: toml::Value) {
        self.0.push((section, key.to_string(), table));
    }
}

/// Writes descriptions to a file. A section that has no new ones is kept, and so are other GPUs. The numbers of ranks
/// are measured together, so new ones replace all of them.
pub fn update(path: &Path, tables: Tables) -> anyhow::Result<()> {
    let before = std::fs::read_to_string(path).unwrap_or_default();
    let mut file: toml::Table = before.parse().unwrap_or_default();
    file.retain(|section, _| section == SHARED || section == GPU);
    if tables.0.iter().any(|(section, ..)| *section == SHARED) {
        file.remove(SHARED);
    }
    for (section, key, table) in tables.0 {
        let section = file.entry(section).or_insert_with(|| toml::Table::new().into());
        if !section.is_table() {
            *section = toml::Table::new().into();
        }
        if let Some(section) = section.as_table_mut() {
            section.insert(key, table);
        }
    }
    write_atomically(path, &toml::to_string(&file)?)
}

/// Replaces a file atomically.
pub fn write_atomically(path: &Path, text: &str) -> anyhow::Result<()> {
    let partial = path.with_extension("toml.part");
    std::fs::write(&partial, text)
        .with_context(|| format!("cannot write {}", partial.display()))?;
    std::fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewriting_a_file_leaves_no_partial_file() {
        let folder = std::env::temp_dir().join(format!("lockstep-write-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("machine.toml");
        for text in ["a longer one", "short"] {
            write_atomically(&path, text).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        assert!(write_atomically(&folder.join("no/such/machine.toml"), "text").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_gpu_is_added_to_the_descriptions_of_the_cores() {
        let folder = std::env::temp_dir().join(format!("lockstep-tables-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("machine.toml");
        let mut cores = Tables::one(SHARED, "1", 1.into());
        cores.add(SHARED, "2", 2.into());
        update(&path, cores).unwrap();
        update(&path, Tables::one(GPU, "NVIDIA H200", 3.into())).unwrap();
        update(&path, Tables::one(GPU, "NVIDIA A100", 4.into())).unwrap();
        update(&path, Tables::one(SHARED, "4", 5.into())).unwrap();
        let file: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        let keys = |section: &str| file[section].as_table().unwrap().keys().cloned().collect();
        let (shared, gpus): (Vec<String>, Vec<String>) = (keys(SHARED), keys(GPU));
        assert_eq!((shared, gpus.len()), (vec!["4".to_string()], 2));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
