//! Exports a model as a Hugging Face folder.

use super::names::{Place, places};
use super::{CONFIG, INDEX, ONE_FILE, config};
use crate::error::{Error, Result, reject};
use crate::partial::Partial;
use crate::safetensors::{Dtype, Entry, write};
use crate::tensors::{Named, Tensors, differences, params_of};
use lockstep_plan::model::Shape;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Export options.
#[derive(Clone, PartialEq, Debug)]
pub struct Export {
    /// F32, F16 or Bf16.
    pub dtype: Dtype,
    /// Maximum bytes of tensors per file, unless a single tensor is larger.
    pub shard_bytes: usize,
    /// Files to copy into the folder, such as those of the tokenizer.
    pub files: Vec<PathBuf>,
    /// The end-of-document token, if it is known.
    pub end: Option<u32>,
}

impl Default for Export {
    fn default() -> Export {
        Export { dtype: Dtype::F32, shard_bytes: 5_000_000_000, files: Vec::new(), end: None }
    }
}

/// Writes a new folder. Fails for shapes that transformers has no model for.
pub fn export(shape: &Shape, tensors: &dyn Tensors, to: &Path, how: &Export) -> Result<()> {
    let mut config = config::write(shape, dtype_name(how.dtype))
        .map_err(|problems| Error::Invalid { path: to.to_path_buf(), problems })?;
    config["eos_token_id"] = json!(how.end);
    reject(to, differences(tensors.list(), &params_of(shape)))?;
    let (entries, parts) = hf_tensors(shape, how.dtype);

    let partial = Partial::begin(to)?;
    let shards = split(&entries, how.shard_bytes);
    for (number, shard) in shards.iter().enumerate() {
        let path = partial.path().join(shard_name(number, shards.len()));
        write(&path, shard, |named, out| fill(&parts[&named.name], tensors, out))?;
    }
    if shards.len() > 1 {
        write_json(&partial.path().join(INDEX), &index(&shards))?;
    }
    write_json(&partial.path().join(CONFIG), &config)?;
    for file in &how.files {
        let name = file.file_name().ok_or_else(|| Error::malformed(file, "not a file name"))?;
        std::fs::copy(file, partial.path().join(name)).map_err(Error::system("copy", file))?;
    }
    partial.commit().map(drop)
}

/// Our parameters in each Hugging Face tensor.
type Parts = HashMap<String, Vec<(Named, Place)>>;

/// The Hugging Face tensors of a model in forward order, and their parts.
fn hf_tensors(shape: &Shape, dtype: Dtype) -> (Vec<Entry>, Parts) {
    let (mut entries, mut parts) = (Vec::new(), Parts::new());
    for param in params_of(shape) {
        let place = places(shape, &param).swap_remove(0);
        let named = Named { name: place.name.clone(), dims: place.dims.clone() };
        let of = parts.entry(place.name.clone()).or_insert_with(|| {
            entries.push(Entry { named, dtype });
            Vec::new()
        });
        of.push((param, place));
    }
    (entries, parts)
}

/// Assembles a Hugging Face tensor.
fn fill(parts: &[(Named, Place)], tensors: &dyn Tensors, out: &mut [f32]) -> Result<()> {
    for (param, place) in parts {
        if !place.transposed {
            let width = if place.dims.len() == 1 { 1 } else { param.dims[1] };
            let start = place.row * width;
            tensors.read(&param.name, &mut out[start..start + param.len()])?;
            continue;
        }
        // Column c of ours is row c of theirs, from `row` on.
        let (width, columns) = (place.dims[0], place.dims[1]);
        let mut ours = vec![0.0; param.len()];
        tensors.read(&param.name, &mut ours)?;
        for (row, values) in ours.chunks_exact(width).enumerate() {
            for (column, value) in values.iter().enumerate() {
                out[column * columns + place.row + row] = *value;
            }
        }
    }
    Ok(())
}

/// Groups consecutive tensors into files.
fn split(entries: &[Entry], most: usize) -> Vec<Vec<Entry>> {
    let mut shards = vec![Vec::new()];
    let mut bytes = 0;
    for entry in entries {
        if bytes > 0 && bytes + entry.bytes() > most {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += entry.bytes();
        shards.last_mut().expect("just pushed").push(entry.clone());
    }
    shards
}

fn index(shards: &[Vec<Entry>]) -> Value {
    let total: usize = shards.iter().flatten().map(Entry::bytes).sum();
    let of = |number: usize| {
        move |entry: &Entry| (entry.named.name.clone(), shard_name(number, shards.len()))
    };
    let map: BTreeMap<_, _> = shards
        .iter()
        .enumerate()
        .flat_map(|(number, shard)| shard.iter().map(of(number)))
        .collect();
    json!({"metadata": {"total_size": total}, "weight_map": map})
}

fn shard_name(number: usize, count: usize) -> String {
    match count {
        1 => ONE_FILE.into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    }
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
        _ => "float32",
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    let written = std::fs::File::create_new(path).and_then(|mut file| {
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(Error::system("write", path))
}
