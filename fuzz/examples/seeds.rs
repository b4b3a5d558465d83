//! Writes the first inputs of every fuzz target to `FOLDER/TARGET/`.

use lockstep_ckpt::{Named, Tensors, load, params_of, save};
use lockstep_data::{Recipe, prepare};
use lockstep_gbdt::{Matrix, ModelFormat, Params, Table, Team, train};
use lockstep_sim::Cluster;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let root = PathBuf::from(std::env::args().nth(1).expect("usage: seeds FOLDER"));
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let seed = |target: &str, name: &str, bytes: &[u8]| {
        let folder = root.join(target);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(name), bytes).expect("written");
    };
    let read = |path: &str| {
        fs::read(project.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    };

    seed("run_file", "grammar", &read("examples/grammar.toml"));
    seed("run_file", "chaos", &read("scripts/chaos/run.toml"));
    seed("run_file", "mixture", MIXTURE.as_bytes());
    seed("run_file", "context", CONTEXT.as_bytes());
    seed("cluster_file", "h100-64", &read("examples/clusters/h100-64.toml"));
    for name in Cluster::names() {
        let cluster = Cluster::built_in(&name).expect("listed");
        let text = toml::to_string(&cluster).expect("a cluster is TOML");
        seed("cluster_file", &name, text.as_bytes());
    }
    for model in ["gpt2", "llama", "mixtral", "llama-sharded"] {
        seed("config_json", model, &read(&format!("fixtures/pytorch/{model}/config.json")));
    }
    let sharded = "fixtures/pytorch/llama-sharded/model-00001-of-00002.safetensors";
    seed("safetensors", "llama", &read(sharded));

    // The first byte selects the format: see the target.
    seed("trees_data", "csv", b"\x00label,\"a\"\"b\",c\n1,0.5,\"3\"\n0,,-1e3\n");
    seed("trees_data", "csv-columns", b"\x781,2,7,\"x, y\",4\n0,1,7,z,\n1,3,8,z,1e-3\n");
    seed("trees_data", "libsvm", b"\x011:2 qid:3 0:1 5:0.5\n0:1 qid:3 2:1e-3 # comment\n");
    seed("trees_data", "npy", &numpy());
    let (json, ubj) = trees();
    seed("trees_model", "json", &json);
    seed("trees_model", "ubj", &ubj);

    let temporary = lockstep_fuzz::folder("seeds");
    let (manifest, file) = checkpoint(&temporary.join("run"));
    seed("manifest", "small", &manifest);
    seed("safetensors", "small", &file);
    seed("token_file", "bytes", &tokens(&temporary));
    fs::remove_dir_all(&temporary).expect("removed");
}

/// An array of 4 × 3 values, after the byte that selects its format.
fn numpy() -> Vec<u8> {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }\n";
    let mut bytes = b"\x02\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    (0..12).for_each(|value| bytes.extend((value as f32).to_le_bytes()));
    bytes
}

/// A small model as JSON and as UBJ.
fn trees() -> (Vec<u8>, Vec<u8>) {
    let x: Vec<f32> = (0..40).map(|row| row as f32).collect();
    let label = x.iter().map(|x| f32::from(*x >= 10.0)).collect();
    let table = Table::dense(vec!["x".into(), "y".into()], [x.clone(), x].concat(), label);
    let group = lockstep_comm::single_rank();
    let matrix = Matrix::new(&group, &table, None, 16, &Team::new(1)).expect("binned");
    let params = Params { rounds: 2, max_depth: 2, ..Params::default() };
    let model = train(&group, &matrix, &params).expect("trained");
    (model.to_bytes(ModelFormat::Json), model.to_bytes(ModelFormat::Ubj))
}

/// Manifest and file of a small model. The manifest describes the file of the fuzz target, 64 KiB of zeros.
fn checkpoint(run: &Path) -> (Vec<u8>, Vec<u8>) {
    let mut shape = lockstep_plan::presets::shape("llama-test", Some(16)).expect("a preset");
    (shape.layers, shape.dim, shape.ffn, shape.seq) = (2, 8, 16, 8);
    (shape.heads, shape.kv_heads, shape.head_dim) = (2, 1, 4);
    let dir = save(run, &shape, &Zeros(params_of(&shape))).expect("saved");
    assert!(load(&dir).is_ok());
    let text = fs::read_to_string(dir.join("manifest.json")).expect("a manifest");
    let (_, body) = text.split_once(",\n").expect("the first line is the checksum");
    let file = fs::read(dir.join("rank-00000.safetensors")).expect("a file");
    let body = body
        .replace(&format!("\"bytes\":{}", file.len()), "\"bytes\":65536")
        .replace(blake3::hash(&file).to_hex().as_str(), &blake3::hash(&[0; 1 << 16]).to_hex());
    (body.into_bytes(), file)
}

struct Zeros(Vec<Named>);

impl Tensors for Zeros {
    fn list(&self) -> &[Named] {
        &self.0
    }

    fn read(&self, _: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        out.fill(0.0);
        Ok(())
    }
}

fn tokens(folder: &Path) -> Vec<u8> {
    let (input, out) = (folder.join("text.jsonl"), folder.join("text.tokens"));
    let rows = ["one and two", "three", "4"].map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    fs::write(&input, rows.concat()).expect("written");
    prepare(&Recipe::new(vec![input], &out), &|_| ()).expect("prepared");
    fs::read(out).expect("a token file")
}

const MIXTURE: &str = "name = \"all\"
[model]
family = \"moe\"
dim = 64
layers = 4
heads = 4
kv_heads = 2
ffn = 96
vocab = 258
seq = 64
experts = 4
top_k = 2
capacity = 1.25
aux_loss = 0.01
balance = \"batch\"
shared_experts = 1
rope_scaling = { factor = 8.0, original_seq = 32 }
[data]
seq = 64
held_out = 0.1
[train]
steps = 100
global_batch = 16
micro_batch = 2
schedule = \"wsd\"
decay = 0.1
betas = [0.9, 0.95]
[layout]
data = 2
zero = 2
shard = 2
tensor = 2
sequence = true
pipe = 2
schedule = \"zb-h1\"
expert = 2
recompute = \"selective\"
placement = \"pipe, data, context, tensor\"
[precision]
compute = \"bf16\"
[comm]
bucket_mb = 0.01
timeout_s = 5
[checkpoint]
every = 10
keep = 3
keep_every = 50
\0train.lr=1e-3
model.dim=128
";

const CONTEXT: &str = "[model]
kv_lora_rank = 16
family = \"llama\"
[layout]
context = 4
context_kind = \"both\"
pipe = 2
chunks = 2
schedule = \"interleaved\"
zero = 3
keep_gathered = true
[comm]
compression = \"topk:0.01\"
compression_warmup = 5
overlap = true
";
