//! Writes the first inputs of every fuzz target to `FOLDER/TARGET/`.

use lockstep_ckpt::{Named, Tensors, load, params_of, save};
use lockstep_data::{Recipe, prepare};
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

    let temporary = lockstep_fuzz::folder("seeds");
    let (manifest, file) = checkpoint(&temporary.join("run"));
    seed("manifest", "small", &manifest);
    seed("safetensors", "small", &file);
    seed("token_file", "bytes", &tokens(&temporary));
    fs::remove_dir_all(&temporary).expect("removed");
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
