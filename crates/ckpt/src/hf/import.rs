//! Imports a Hugging Face folder. The files stay mapped; a tensor is converted when it is read.

use super::names::{Place, is_buffer, places, prefix};
use super::{CONFIG, INDEX, ONE_FILE, config};
use crate::error::{Error, Result, reject};
use crate::regular;
use crate::safetensors::{File, Tensor};
use crate::tensors::{Named, Tensors, params_of};
use lockstep_plan::model::Shape;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A valid folder: every parameter exists with the right shape and a supported type.
pub struct Source {
    shape: Shape,
    list: Vec<Named>,
    files: Files,
    /// Locations by our parameter name.
    places: HashMap<String, Place>,
}

impl Source {
    /// Opens and validates the folder, so that reading cannot fail.
    pub fn open(dir: &Path) -> Result<Source> {
        let shape = shape_of(dir)?;
        Source::new(dir, shape, Files::open(&weight_files(dir)?, "")?)
    }

    /// Reads the tensors of another file instead, whose names are those of the folder's weights with a prefix. Used for
    /// gradients that are stored next to a model.
    pub fn open_with_prefix(dir: &Path, file: &Path, before: &str) -> Result<Source> {
        let shape = shape_of(dir)?;
        Source::new(file, shape, Files::open(&[file.to_path_buf()], before)?)
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    fn new(path: &Path, shape: Shape, files: Files) -> Result<Source> {
        let list = params_of(&shape);
        let (mut found, mut problems) = (HashMap::new(), Vec::new());
        for param in &list {
            match find(&shape, &files, param) {
                Ok(place) => drop(found.insert(param.name.clone(), place)),
                Err(problem) => problems.push(problem),
            }
        }
        // The parts of one tensor give the same problem.
        let mut said = HashSet::new();
        problems.retain(|problem| said.insert(problem.clone()));
        problems.extend(unknown(&shape, &files, &list));
        reject(path, problems)?;
        Ok(Source { shape, list, files, places: found })
    }
}

impl Tensors for Source {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let place =
            self.places.get(name).unwrap_or_else(|| panic!("the model has no parameter {name}"));
        let tensor = self.files.get(&place.name).expect("validated when the folder was opened");
        copy(place, tensor, out);
        Ok(())
    }
}

/// Copies our rows of a Hugging Face tensor.
fn copy(place: &Place, tensor: Tensor<'_>, out: &mut [f32]) {
    let columns = place.dims.last().copied().unwrap_or(1);
    if !place.transposed {
        // A vector is a matrix with one column.
        let width = if place.dims.len() == 1 { 1 } else { columns };
        return tensor.read(place.row * width, out);
    }
    // Row i of theirs is column i of ours.
    let (width, rows) = (place.dims[0], out.len() / place.dims[0]);
    let mut theirs = vec![0.0; rows];
    for column in 0..width {
        tensor.read(column * columns + place.row, &mut theirs);
        for (row, value) in theirs.iter().enumerate() {
            out[row * width + column] = *value;
        }
    }
}

/// Location of a parameter in these files.
fn find(shape: &Shape, files: &Files, param: &Named) -> std::result::Result<Place, String> {
    let candidates = places(shape, param);
    let prefix = prefix(shape.family);
    for place in &candidates {
        let bare = place.name.strip_prefix(prefix).unwrap_or(&place.name);
        for name in [place.name.as_str(), bare] {
            if let Some(tensor) = files.get(name) {
                fits(name, place, &tensor)?;
                return Ok(Place { name: name.into(), ..place.clone() });
            }
        }
    }
    let hint = match param.name.as_str() {
        "head.output" => {
            "; if the output projection is tied to the embedding, set \"tie_word_embeddings\": true in config.json"
        }
        _ => "",
    };
    Err(format!("{} {:?} is missing{hint}", candidates[0].name, candidates[0].dims))
}

/// Tensors that belong to no parameter; ignoring them would change the model.
fn unknown(shape: &Shape, files: &Files, list: &[Named]) -> Vec<String> {
    let prefix = prefix(shape.family);
    let mut known = HashSet::new();
    for place in list.iter().flat_map(|param| places(shape, param)) {
        known.extend(place.name.strip_prefix(prefix).map(String::from));
        known.insert(place.name);
    }
    let mut names: Vec<&str> =
        files.names().filter(|name| !known.contains(*name) && !is_buffer(shape, name)).collect();
    names.sort();
    names.iter().map(|name| format!("{name} is not part of the model in config.json")).collect()
}

fn fits(name: &str, place: &Place, tensor: &Tensor<'_>) -> std::result::Result<(), String> {
    if tensor.dims != place.dims {
        return Err(format!(
            "{name} has shape {:?}, config.json requires {:?}",
            tensor.dims, place.dims
        ));
    }
    if !tensor.dtype.fits_f32() {
        return Err(format!(
            "{name} has type {}; only F32, F16 and BF16 are supported",
            tensor.dtype.name()
        ));
    }
    Ok(())
}

fn shape_of(dir: &Path) -> Result<Shape> {
    let path = dir.join(CONFIG);
    let config = json(&path)?;
    config::read(&config).map_err(|problems| Error::Invalid { path, problems })
}

/// Largest config.json or index.
const MAX_JSON: u64 = 64 << 20;

fn json(path: &Path) -> Result<Value> {
    let bytes = regular::read(path, MAX_JSON)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::malformed(path, format!("invalid JSON: {error}")))
}

/// The single weight file, or the files named by the index.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let (one, index) = (dir.join(ONE_FILE), dir.join(INDEX));
    if one.exists() {
        return Ok(vec![one]);
    }
    if !index.exists() {
        let what =
            format!("found neither {ONE_FILE} nor {INDEX}; only safetensors files are supported");
        return Err(Error::malformed(dir, what));
    }
    let json = json(&index)?;
    let map = json["weight_map"].as_object();
    let map = map.ok_or_else(|| Error::malformed(&index, "no weight_map"))?;
    // Plain names only: an index must not refer to files outside its folder.
    let plain = |file: &Value| {
        let name =
            file.as_str().filter(|name| Path::new(name).file_name() == Some((*name).as_ref()));
        name.map(String::from)
            .ok_or_else(|| Error::malformed(&index, format!("{file} is not a file name")))
    };
    let names: BTreeMap<String, ()> =
        map.values().map(|file| Ok((plain(file)?, ()))).collect::<Result<_>>()?;
    Ok(names.into_keys().map(|name| dir.join(name)).collect())
}

/// Several mapped files, with tensor names stripped of their prefix.
struct Files {
    files: Vec<File>,
    before: String,
    of: HashMap<String, usize>,
}

impl Files {
    fn open(paths: &[PathBuf], before: &str) -> Result<Files> {
        let files = paths.iter().map(|path| File::open(path)).collect::<Result<Vec<_>>>()?;
        let mut of = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            for name in file.names().filter_map(|name| name.strip_prefix(before)) {
                if let Some(other) = of.insert(name.to_string(), number) {
                    let what = format!("{name} is also in {}", files[other].path().display());
                    return Err(Error::malformed(file.path(), what));
                }
            }
        }
        Ok(Files { files, before: before.into(), of })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.of.keys().map(String::as_str)
    }

    fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.of.get(name)?].get(&format!("{}{name}", self.before))
    }
}
