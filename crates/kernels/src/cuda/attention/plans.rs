//! Builds the plans of attention without a GPU, for devices that are only described. `scripts/check-cuda.sh` installs
//! cuDNN and a `libcuda.so.1` without devices for it.

use std::sync::Mutex;
use std::time::Instant;

use super::cudnn::{Group, Installed, backward_problem, build, forward_problem, is_causal};
use super::graphs::Problem;
use crate::AttentionShape;
use crate::cuda::dnn::Offline;

/// A GPU and the shapes that plans are built for.
struct Described {
    name: &'static str,
    /// In the form in which cuDNN itself describes a device.
    json: &'static str,
    /// Major compute capability.
    capability: i32,
    /// Whether cuDNN also computes deterministic backward passes.
    deterministic: bool,
    shapes: &'static [[usize; 6]],
}

/// batch, heads, kv_heads, head_dim, q_len, k_len; causal if the lengths are equal, otherwise a block of earlier keys.
/// Every head size has both masks, grouped and ungrouped heads, odd and even lengths. Any two of these occur together.
const SHAPES: [[usize; 6]; 8] = [
    [16, 12, 12, 64, 1024, 1024],
    [2, 8, 2, 64, 333, 129],
    [2, 4, 1, 80, 333, 333],
    [1, 4, 4, 80, 512, 1024],
    [2, 4, 4, 96, 201, 201],
    [1, 8, 2, 96, 256, 384],
    // Too long for a deterministic backward pass of all heads at once.
    [1, 32, 8, 128, 8192, 8192],
    [2, 4, 4, 128, 129, 1001],
];

/// cuDNN's engines differ between architectures: two shapes show that a plan can be built at all.
const FEW_SHAPES: [[usize; 6]; 2] = [SHAPES[1], SHAPES[6]];

/// cuDNN wrote the description of the H200. The others are copies of it, edited by hand: architecture, multiprocessors,
/// memory and clocks are approximate and were not read from a device. Replace them with what cuDNN writes on one.
const DEVICES: [Described; 3] = [
    Described {
        name: "H200",
        json: include_str!("h200.json"),
        capability: 9,
        deterministic: true,
        shapes: &SHAPES,
    },
    Described {
        name: "A100",
        json: include_str!("a100.json"),
        capability: 8,
        deterministic: true,
        shapes: &FEW_SHAPES,
    },
    Described {
        name: "B200",
        json: include_str!("b200.json"),
        capability: 10,
        deterministic: false,
        shapes: &FEW_SHAPES,
    },
];

/// The kinds of plans that are built for a device.
#[derive(Clone, Copy, Debug)]
enum Pass {
    Forward,
    Backward,
    DeterministicBackward,
}

#[test]
#[ignore = "needs cuDNN, and takes about a second per plan; scripts/check-cuda.sh runs it"]
fn plans_can_be_built_for_described_devices() {
    let passes = [Pass::Forward, Pass::Backward, Pass::DeterministicBackward];
    let work = Mutex::new(DEVICES.iter().flat_map(|device| passes.map(|pass| (device, pass))));
    let next = || work.lock().expect("no thread panics with the lock").next();
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                std::iter::from_fn(next).for_each(|(device, pass)| build_all(device, pass))
            });
        }
    });
}

/// Builds the plans of one kind for a device.
fn build_all(device: &Described, pass: Pass) {
    let cudnn = Offline::load(device.json).unwrap_or_else(|error| panic!("{error}"));
    let installed = Installed { capability: device.capability, version: cudnn.version };
    let backward = |Case { shape, strides, gradient_strides }, deterministic| {
        let problem = backward_problem(&shape, strides, gradient_strides, deterministic, installed);
        problem.map(|(_, problem)| problem)
    };
    let problem = |case: Case| match pass {
        Pass::Forward => forward_problem(&case.shape, case.strides),
        Pass::Backward => backward(case, false),
        Pass::DeterministicBackward => backward(case, true),
    };
    let problems: Vec<Problem> =
        device.shapes.iter().filter_map(|sizes| problem(Case::new(*sizes))).collect();
    let expected = !matches!(pass, Pass::DeterministicBackward) || device.deterministic;
    let count = if expected { device.shapes.len() } else { 0 };
    assert_eq!(problems.len(), count, "{pass:?} plans that use cuDNN on {}", device.name);
    let start = Instant::now();
    for problem in &problems {
        if let Err(error) = build(problem, cudnn.graph(), cudnn.target()) {
            panic!("no plan for {}: {error}: {problem:?}", device.name);
        }
    }
    println!(
        "cuDNN {} on {}: {count} plans, {pass:?}, in {:.1} s",
        cudnn.version,
        device.name,
        start.elapsed().as_secs_f64()
    );
}

/// An attention with the strides that it has in training.
struct Case {
    shape: AttentionShape,
    strides: [i64; 3],
    /// None if the gradients are summed in f32.
    gradient_strides: Option<[i64; 3]>,
}

impl Case {
    fn new([batch, heads, kv_heads, head_dim, q_len, k_len]: [usize; 6]) -> Case {
        let square = AttentionShape::square(batch, q_len, heads, kv_heads, head_dim);
        let packed = ((heads + 2 * kv_heads) * head_dim) as i64;
        if q_len == k_len {
            return Case {
                shape: square,
                strides: [packed; 3],
                gradient_strides: Some([packed; 3]),
            };
        }
        // With context parallel, keys and values of other ranks have buffers of their own.
        let kv_width = (kv_heads * head_dim) as i64;
        Case {
            shape: AttentionShape { k_len, q_start: k_len, ..square },
            strides: [packed, kv_width, kv_width],
            gradient_strides: None,
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
