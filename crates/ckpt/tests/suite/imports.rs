//! Folders written by transformers, by other programs, and invalid ones.

use crate::support::{FIXTURES, Weights, fixture, folder, fresh, read, same, weights};
use lockstep_ckpt::Tensors;
use lockstep_ckpt::hf::Source;
use lockstep_ckpt::safetensors::Dtype;
use lockstep_plan::model::Family;
use serde_json::json;
use std::fs;

#[test]
fn config_determines_the_shape() {
    let shape = |name| Source::open(&fixture(name)).unwrap().shape().clone();
    let gpt2 = shape("gpt2");
    assert_eq!((gpt2.family, gpt2.layers, gpt2.ffn, gpt2.tied), (Family::Gpt2, 3, 128, true));
    let llama = shape("llama");
    assert_eq!(
        (llama.family, llama.kv_heads, llama.ffn, llama.tied),
        (Family::Llama, 2, 88, false)
    );
    let moe = shape("mixtral").moe.unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.aux_loss), (4, 2, 0.05));
    let scaled = shape("llama-sharded");
    let rope = scaled.rope_scaling.unwrap();
    assert_eq!((scaled.head_dim, scaled.tied, scaled.rope_theta), (16, true, 10000.0));
    assert_eq!((rope.factor, rope.high_freq_factor, rope.original_seq), (4.0, 4.0, 64));
}

#[test]
fn parameters_map_to_the_right_parts() {
    let source = Source::open(&fixture("gpt2")).unwrap();
    let theirs = weights(&fixture("gpt2"));
    // GPT-2 stores W as (in, out) for y = x W + b; ours is its transpose (out, in).
    let (dims, c_attn) = &theirs["transformer.h.1.attn.c_attn.weight"];
    let (_, bias) = &theirs["transformer.h.1.attn.c_attn.bias"];
    assert_eq!(dims, &[32, 96]);
    for (part, name) in ["q", "k", "v"].into_iter().enumerate() {
        let ours = read(&source, &format!("layers.1.attention.{name}.weight"));
        for (row, column) in [(0, 0), (1, 0), (0, 1), (7, 30), (31, 31)] {
            assert_eq!(ours[row * 32 + column], c_attn[column * 96 + part * 32 + row], "{name}");
        }
        let ours = read(&source, &format!("layers.1.attention.{name}.bias"));
        assert_eq!(ours, bias[part * 32..][..32]);
    }
    let (_, up) = &theirs["transformer.h.0.mlp.c_fc.weight"];
    assert_eq!(read(&source, "layers.0.mlp.up.weight")[5 * 32 + 3], up[3 * 128 + 5]);

    let source = Source::open(&fixture("mixtral")).unwrap();
    let theirs = weights(&fixture("mixtral"));
    for (ours, short) in [("gate", "w1"), ("down", "w2"), ("up", "w3")] {
        let (_, wanted) =
            &theirs[&format!("model.layers.1.block_sparse_moe.experts.2.{short}.weight")];
        assert_eq!(&read(&source, &format!("layers.1.experts.2.{ours}.weight")), wanted);
    }
}

#[test]
fn gradients_are_read_by_parameter_name() {
    for name in ["gpt2", "llama", "mixtral"] {
        let expected = fixture(name).join("expected.safetensors");
        let gradients = Source::open_with_prefix(&fixture(name), &expected, "grad.").unwrap();
        for named in gradients.list() {
            assert!(
                read(&gradients, &named.name).iter().any(|g| *g != 0.0),
                "{name}: {}",
                named.name
            );
        }
    }
}

/// Other tensor names or types give the same model.
#[track_caller]
fn the_same_model(name: &str, like: &str, weights: &Weights, dtype: Dtype) {
    let changed = folder(name, like, weights, dtype, json!({}));
    same(&Source::open(&changed).unwrap(), &Source::open(&fixture(like)).unwrap());
}

#[test]
fn prefix_is_optional_and_buffers_are_ignored() {
    let mut bare = Weights::new();
    for (name, tensor) in weights(&fixture("gpt2")) {
        bare.insert(name.replace("transformer.", ""), tensor);
    }
    bare.insert("h.0.attn.bias".into(), (vec![1, 1, 24, 24], vec![1.0; 576]));
    bare.insert("h.0.attn.masked_bias".into(), (vec![], vec![-1e4]));
    the_same_model("bare-gpt2", "gpt2", &bare, Dtype::F32);

    let mut with_buffers = weights(&fixture("llama-sharded"));
    let tied = with_buffers["model.embed_tokens.weight"].clone();
    with_buffers.insert("lm_head.weight".into(), tied);
    with_buffers
        .insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (vec![8], vec![1.0; 8]));
    the_same_model("buffers-llama", "llama-sharded", &with_buffers, Dtype::Bf16);
}

#[test]
fn fused_experts_are_read() {
    let apart = weights(&fixture("mixtral"));
    let mut fused: Weights = apart
        .iter()
        .filter(|(n, _)| !n.contains("moe"))
        .map(|(n, t)| (n.clone(), t.clone()))
        .collect();
    for layer in 0..2 {
        let get =
            |rest: String| apart[&format!("model.layers.{layer}.block_sparse_moe.{rest}")].clone();
        let expert = |number: usize, short: &str| get(format!("experts.{number}.{short}.weight")).1;
        let gate_up = (0..4).flat_map(|e| [expert(e, "w1"), expert(e, "w3")].concat()).collect();
        let down = (0..4).flat_map(|e| expert(e, "w2")).collect();
        let mut put =
            |rest: &str, tensor| fused.insert(format!("model.layers.{layer}.mlp.{rest}"), tensor);
        put("gate.weight", get("gate.weight".into()));
        put("experts.gate_up_proj", (vec![4, 96, 32], gate_up));
        put("experts.down_proj", (vec![4, 32, 48], down));
    }
    the_same_model("fused-mixtral", "mixtral", &fused, Dtype::F32);
}

#[test]
fn half_precision_is_converted() {
    let mut halves = weights(&fixture("llama"));
    for (_, values) in halves.values_mut() {
        values.iter_mut().for_each(|v| *v = (*v * 256.0).round() / 256.0);
    }
    let whole = folder("halves-f32", "llama", &halves, Dtype::F32, json!({}));
    let half = folder("halves-f16", "llama", &halves, Dtype::F16, json!({}));
    same(&Source::open(&half).unwrap(), &Source::open(&whole).unwrap());
}

#[test]
fn all_tensor_problems_are_reported_together() {
    let mut broken = weights(&fixture("gpt2"));
    broken.remove("transformer.h.1.attn.c_attn.weight");
    broken.remove("transformer.ln_f.bias");
    broken.insert("transformer.wpe.weight".into(), (vec![12, 32], vec![0.0; 384]));
    broken.insert("transformer.h.0.attn.sinks".into(), (vec![4], vec![0.0; 4]));
    let dir = folder("broken-gpt2", "gpt2", &broken, Dtype::F32, json!({}));
    let error = Source::open(&dir).err().expect("refused").to_string();
    for says in [
        "h.1.attn.c_attn.weight [32, 96] is missing",
        "ln_f.bias [32] is missing",
        "wpe.weight has shape [12, 32], config.json requires [24, 32]",
        "h.0.attn.sinks is not part of the model",
    ] {
        assert_eq!(error.matches(says).count(), 1, "{says}: {error}");
    }
}

#[test]
fn a_missing_output_projection_says_how_to_tie_it() {
    let mut tied = weights(&fixture("llama"));
    tied.remove("lm_head.weight");
    let dir = folder("untied", "llama", &tied, Dtype::F32, json!({}));
    let error = Source::open(&dir).err().expect("refused").to_string();
    assert!(error.contains("\"tie_word_embeddings\": true"), "{error}");
    let dir = folder("tied", "llama", &tied, Dtype::F32, json!({"tie_word_embeddings": true}));
    assert!(Source::open(&dir).is_ok());
}

#[test]
fn unsupported_configs_are_rejected() {
    for (like, keys, says) in [
        ("gpt2", json!({"model_type": "opt"}), "use gpt2, llama or mixtral"),
        ("gpt2", json!({"activation_function": "relu", "n_head": 5}), "use gelu_new"),
        (
            "gpt2",
            json!({"activation_function": "relu", "n_head": 5}),
            "n_head=5 does not divide n_embd=32",
        ),
        ("gpt2", json!({"embd_pdrop": 0.1}), "only one dropout rate is supported"),
        ("gpt2", json!({"scale_attn_by_inverse_layer_idx": true}), "only false"),
        ("gpt2", json!({"n_layer": null}), "n_layer must be a positive integer (got missing)"),
        ("gpt2", json!({"n_layer": 0}), "must be a positive integer"),
        ("gpt2", json!({"n_layer": 1e6 as u64}), "the model has about 1.6e7 tensors"),
        (
            "llama",
            json!({"num_hidden_layers": 1e11 as u64}),
            "num_hidden_layers must be a positive integer of at most 1000000000 (got 100000000000)",
        ),
        ("llama", json!({"num_hidden_layers": i64::MAX}), "(got 9223372036854775807)"),
        ("llama", json!({"head_dim": 3}), "head_dim=3 is odd"),
        ("llama", json!({"rms_norm_eps": -1.0}), "norm_eps must be greater than 0"),
        ("mixtral", json!({"num_local_experts": 1e9 as u64}), "about"),
        ("mixtral", json!({"num_experts_per_tok": 99}), "top_k=99 is more than experts="),
        ("llama", json!({"attention_bias": true}), "attention_bias=true"),
        ("llama", json!({"hidden_act": "gelu"}), "hidden_act=gelu"),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "yarn"}}),
            "rope_type yarn is not supported",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "llama3"}}),
            "without factor, low_freq_factor",
        ),
        ("llama", json!({"quantization_config": {"bits": 4}}), "use the original model"),
        ("mixtral", json!({"sliding_window": 8}), "sliding_window=8"),
        ("mixtral", json!({"n_shared_experts": 2}), "n_shared_experts=2"),
        ("mixtral", json!({"num_key_value_heads": 3}), "does not divide num_attention_heads=4"),
    ] {
        let dir = folder("cannot", like, &weights(&fixture(like)), Dtype::F32, keys.clone());
        let error =
            Source::open(&dir).err().unwrap_or_else(|| panic!("{keys} was accepted")).to_string();
        assert!(error.contains(says) && error.contains("config.json"), "{keys}: {error}");
    }
}

#[test]
fn older_config_keys_give_the_same_shape() {
    let keys = json!({
        "rope_parameters": null, "rope_theta": 10000.0, "dtype": null, "torch_dtype": "float32",
        "rope_scaling": {
            "type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    });
    let dir =
        folder("older", "llama-sharded", &weights(&fixture("llama-sharded")), Dtype::F32, keys);
    let (older, newer) =
        (Source::open(&dir).unwrap(), Source::open(&fixture("llama-sharded")).unwrap());
    assert_eq!(older.shape(), newer.shape());
}

#[test]
fn truncated_files_are_rejected() {
    for name in FIXTURES {
        let files = fs::read_dir(fixture(name)).unwrap().flatten().map(|entry| entry.path());
        for file in files.filter(|f| f.to_str().unwrap().contains("model")) {
            for keep in [0, 7, 100] {
                let dir = fresh("truncated");
                fs::create_dir_all(&dir).unwrap();
                for other in fs::read_dir(fixture(name)).unwrap().flatten() {
                    fs::copy(other.path(), dir.join(other.file_name())).unwrap();
                }
                let path = dir.join(file.file_name().unwrap());
                fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(keep).unwrap();
                let error =
                    Source::open(&dir).err().unwrap_or_else(|| panic!("{path:?} at {keep}"));
                assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            }
        }
    }
}

#[test]
fn index_cannot_refer_outside_its_folder() {
    let dir = fresh("index");
    fs::create_dir_all(&dir).unwrap();
    fs::copy(fixture("llama").join("config.json"), dir.join("config.json")).unwrap();
    let index = json!({"weight_map": {"lm_head.weight": "../llama/model.safetensors"}});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let error = Source::open(&dir).err().expect("refused").to_string();
    assert!(error.contains("is not a file name"), "{error}");
}
