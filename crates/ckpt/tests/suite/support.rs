//! Fixtures, empty folders, and Hugging Face folders with something changed.

use lockstep_ckpt::safetensors::{Dtype, Entry, File, write};
use lockstep_ckpt::{Named, Tensors};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::ThreadId;

pub const FIXTURES: [&str; 4] = ["gpt2", "llama", "mixtral", "llama-sharded"];

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/pytorch").join(name)
}

/// A path for a test's own folder, which does not exist yet. Tests run at the same time, so two of them must not use the
/// same name.
pub fn fresh(name: &str) -> PathBuf {
    static USERS: Mutex<BTreeMap<String, ThreadId>> = Mutex::new(BTreeMap::new());
    let test = std::thread::current().id();
    let user = *USERS.lock().unwrap().entry(name.into()).or_insert(test);
    assert_eq!(user, test, "another test uses the folder {name}");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    dir
}

pub fn read(tensors: &dyn Tensors, name: &str) -> Vec<f32> {
    let named = tensors.list().iter().find(|named| named.name == name);
    let mut out = vec![0.0; named.unwrap_or_else(|| panic!("no {name}")).len()];
    tensors.read(name, &mut out).expect("it can be read");
    out
}

/// Asserts that both have the same tensors with identical bits.
#[track_caller]
pub fn same(found: &dyn Tensors, wanted: &dyn Tensors) {
    assert_eq!(found.list(), wanted.list());
    for named in wanted.list() {
        let bits =
            |tensors| read(tensors, &named.name).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(found), bits(wanted), "{}", named.name);
    }
}

/// A folder's tensors by name, to be modified and written elsewhere.
pub type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub fn weights(dir: &Path) -> Weights {
    let mut all = Weights::new();
    for entry in fs::read_dir(dir).expect("the fixture").flatten() {
        let name = entry.file_name().into_string().expect("plain names");
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let file = File::open(&entry.path()).expect("a safetensors file");
            for name in file.names() {
                let tensor = file.get(name).expect("listed");
                let mut values = vec![0.0; tensor.len()];
                tensor.read(0, &mut values);
                all.insert(name.into(), (tensor.dims.to_vec(), values));
            }
        }
    }
    all
}

/// Writes `model.safetensors` and the fixture's `config.json` with some of its keys changed.
pub fn folder(
    name: &str,
    like: &str,
    weights: &Weights,
    dtype: Dtype,
    keys: serde_json::Value,
) -> PathBuf {
    let dir = fresh(name);
    fs::create_dir_all(&dir).expect("the target folder can be written");
    let entry = |(name, (dims, _)): (&String, &(Vec<usize>, Vec<f32>))| Entry {
        named: Named { name: name.clone(), dims: dims.clone() },
        dtype,
    };
    let entries: Vec<Entry> = weights.iter().map(entry).collect();
    let fill = |named: &Named, out: &mut [f32]| {
        out.copy_from_slice(&weights[&named.name].1);
        Ok(())
    };
    write(&dir.join("model.safetensors"), &entries, fill).expect("written");

    let text = fs::read(fixture(like).join("config.json")).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    for (key, value) in keys.as_object().expect("an object of keys") {
        config[key] = value.clone();
    }
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
    dir
}
