//! Builds the plans of attention without a GPU, for a device that is only described. Needs cuDNN, and on machines
//! without a driver a `libcuda.so.1` that cuDNN can load.

use super::cudnn::{Group, is_causal};
use super::graphs::{Pass, Problem};
use crate::AttentionShape;
use crate::cuda::dnn::{Offline, Plan};

/// cuDNN's description of an H200.
const H200: &str = include_str!("h200.json");

/// batch, heads, kv_heads, head_dim, q_len, k_len; causal if the lengths are equal
const SHAPES: [[usize; 6]; 10] = [
    [16, 12, 12, 64, 1024, 1024],
    [8, 25, 25, 64, 1024, 1024],
    [1, 32, 8, 64, 4096, 4096],
    [1, 32, 8, 64, 8192, 8192],
    [2, 4, 1, 80, 512, 512],
    [2, 4, 4, 96, 200, 200],
    [1, 8, 2, 128, 1000, 1000],
    // All keys of another rank.
    [1, 12, 12, 64, 512, 1024],
    [2, 8, 2, 128, 300, 200],
    [1, 4, 1, 80, 129, 1000],
];

#[test]
#[ignore = "needs cuDNN, and takes about a second per plan"]
fn plans_can_be_built_for_an_h200() {
    let cudnn = match Offline::load(H200) {
        Ok(cudnn) => cudnn,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    println!("cuDNN {}", cudnn.version);
    for [batch, heads, kv_heads, head_dim, q_len, k_len] in SHAPES {
        let square = AttentionShape::square(batch, q_len, heads, kv_heads, head_dim);
        let shape = AttentionShape { k_len, ..square };
        let strides = [((heads + 2 * kv_heads) * head_dim) as i64; 3];
        let backward = |deterministic| Pass::Backward { strides, deterministic };
        for pass in [Pass::Forward, backward(true), backward(false)] {
            let problem = Problem::new(&shape, q_len == k_len, strides, pass);
            let mut graph = cudnn.graph();
            let plan = problem
                .write(&mut graph)
                .and_then(|()| Plan::build(graph, cudnn.target(), problem.deterministic()));
            let plan = plan.unwrap_or_else(|error| panic!("{error}: {problem:?}"));
            println!("{} MiB of workspace: {problem:?}", plan.workspace >> 20);
        }
    }
}

#[test]
fn whole_sequences_are_causal_and_past_keys_unmasked() {
    let shape = |q_start, k_start, q_len, k_len| AttentionShape {
        q_start,
        k_start,
        q_len,
        k_len,
        ..AttentionShape::square(1, 1, 1, 1, 64)
    };
    assert_eq!(is_causal(&shape(0, 0, 200, 200)), Some(true));
    assert_eq!(is_causal(&shape(512, 512, 200, 200)), Some(true));
    assert_eq!(is_causal(&shape(200, 0, 200, 200)), Some(false));
    assert_eq!(is_causal(&shape(199, 0, 200, 200)), Some(false));
    assert_eq!(is_causal(&shape(198, 0, 200, 200)), None);
    assert_eq!(is_causal(&shape(0, 0, 200, 300)), None);
    assert_eq!(is_causal(&shape(0, 200, 200, 200)), None);
}

#[test]
fn deterministic_backward_passes_are_split_to_bound_their_memory() {
    let group = |batch, seq, heads, kv_heads| {
        Group::new(&AttentionShape::square(batch, seq, heads, kv_heads, 64), true)
    };
    let of = |batch, kv_heads| Some(Group { batch, kv_heads });
    assert_eq!(group(16, 1024, 12, 12), of(16, 12));
    assert_eq!(group(64, 1024, 12, 12), of(16, 12));
    assert_eq!(group(3, 4096, 32, 8), of(1, 4));
    assert_eq!(group(1, 8192, 32, 8), of(1, 1));
    assert_eq!(group(1, 65536, 32, 8), None);
    assert_eq!(group(1, 8191, 32, 8), None);
    assert_eq!(group(16, 1023, 12, 12), of(16, 12));
    let shape = AttentionShape::square(64, 65536, 32, 8, 64);
    assert_eq!(Group::new(&shape, false), of(64, 8));
}

/// Compiled kernels are kept by the names of their sources.
#[test]
fn sources_have_different_names() {
    let names: Vec<_> = super::SOURCES.iter().map(|source| source.name).collect();
    for (i, name) in names.iter().enumerate() {
        assert!(!names[..i].contains(name), "{name}");
    }
}
