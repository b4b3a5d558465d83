//! Finds the input files and their formats. Opens nothing.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Format of an input file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    Jsonl,
    Parquet,
}

#[derive(Clone, Debug)]
pub struct Input {
    /// `-` is standard input.
    pub path: PathBuf,
    pub format: Format,
    /// `None` if the size is unknown.
    pub bytes: Option<u64>,
}

impl Input {
    pub fn is_stdin(&self) -> bool {
        self.path == Path::new("-")
    }

    /// The name without its extension.
    pub fn stem(&self) -> String {
        match self.is_stdin() {
            true => "stdin".to_string(),
            false => self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        }
    }
}

/// Lists the given files and the files in the given folders, sorted by name.
pub fn find(named: &[PathBuf], format: Option<Format>) -> Result<Vec<Input>> {
    let mut found = Vec::new();
    for path in named {
        if path.is_dir() {
            let before = found.len();
            in_folder(path, format, &mut found)?;
            if found.len() == before {
                return Err(Error::file(
                    path,
                    "no .txt, .md, .jsonl, .json or .parquet file in this folder",
                ));
            }
        } else {
            found.push(one(path, format)?);
        }
    }
    Ok(found)
}

fn one(path: &Path, format: Option<Format>) -> Result<Input> {
    // A missing file has no format to complain about.
    let meta = match path == Path::new("-") {
        true => None,
        false => Some(std::fs::metadata(path).map_err(Error::system("reading", path))?),
    };
    let Some(format) = format.or_else(|| by_name(path)) else {
        return Err(Error::file(
            path,
            "unknown file extension; add --format text, jsonl or parquet \
             (decompress through a pipe: zstd -dc x.jsonl.zst | … - --format jsonl)",
        ));
    };
    // Standard input and pipes have no length.
    let bytes = meta.filter(|meta| meta.is_file()).map(|meta| meta.len());
    Ok(Input { path: path.to_path_buf(), format, bytes })
}

/// Adds the files of a folder with a known extension, recursively.
fn in_folder(folder: &Path, format: Option<Format>, found: &mut Vec<Input>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(Error::system("reading", folder))?;
    let entries: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut entries = entries.map_err(Error::system("reading", folder))?;
    entries.sort();
    for path in entries {
        if path.is_dir() {
            in_folder(&path, format, found)?;
        } else if by_name(&path).is_some_and(|f| format.is_none_or(|wanted| f == wanted)) {
            found.push(one(&path, format)?);
        }
    }
    Ok(())
}

fn by_name(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "txt" | "text" | "md" => Some(Format::Text),
        "jsonl" | "ndjson" | "json" => Some(Format::Jsonl),
        "parquet" => Some(Format::Parquet),
        _ => None,
    }
}
