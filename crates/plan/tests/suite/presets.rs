//! Parameter counts of presets match the published ones.

use lockstep_plan::model::{Family, Moe, Shape, flops_per_token};
use lockstep_plan::presets::{NAMES, find, shape};

#[test]
fn published_parameter_counts() {
    let counts = [
        ("gpt2-124m", 124_439_808),
        ("gpt2-350m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_404_352),
    ];
    for (name, count) in counts {
        assert_eq!(shape(name, None).unwrap().param_count(), count, "{name}");
    }
}

#[test]
fn every_preset_resolves() {
    for name in NAMES {
        let shape = shape(name, Some(64)).unwrap_or_else(|errors| panic!("{name}: {errors:?}"));
        assert!(
            find(name).unwrap().family == Some(shape.family),
            "{name}: the section is not in the file"
        );
        assert_eq!(shape.moe.is_some(), shape.family == Family::Moe, "{name}");
        assert!(flops_per_token(&shape, shape.seq).total() > 0.0, "{name}");
    }
    assert_eq!(find("gpt3"), None);
}

#[test]
fn test_presets_are_small() {
    let attention = 16 * (16 + 8 + 8) + 16 * 16;
    let counts = [
        ("gpt2-test", (64 + 16) * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16),
        ("llama-test", 2 * 64 * 16 + 2 * (2 * 16 + attention + 3 * 16 * 40) + 16),
        ("moe-test", 2 * 64 * 16 + 2 * (2 * 16 + attention + 4 * 16 + 4 * 3 * 16 * 24) + 16),
    ];
    for (name, count) in counts {
        assert_eq!(shape(name, Some(64)).unwrap().param_count(), count, "{name}");
    }
}

/// Two shared experts (one SwiGLU of twice the width) next to four experts with top_k=2.
#[test]
fn shared_experts_are_counted() {
    let plain = shape("moe-test", Some(64)).unwrap();
    let moe = plain.moe.map(|moe| Moe { shared: 2, ..moe });
    let shared = Shape { moe, ..plain.clone() };
    let more = plain.layers * 2 * 3 * plain.dim * plain.ffn;
    assert_eq!(shared.param_count() - plain.param_count(), more);
    let flops = |shape| flops_per_token(shape, 16).weights;
    assert_eq!(flops(&shared) - flops(&plain), 6.0 * more as f64);

    // Dense parameters and expert parameters are separate runs.
    let units = shared.blocks()[1].units();
    assert_eq!(units.iter().map(|unit| unit.expert).collect::<Vec<_>>(), [false, true]);
    let down = shared.blocks()[1].range("shared.down.weight");
    assert_eq!(units[0].range.end, down.end);
}

#[test]
fn benchmark_models() {
    let tiny = shape("tiny", None).unwrap();
    // 256 × 128 + 128 × 128 embeddings, 4 layers of 12 × 128² + 13 × 128, and the last norm.
    assert_eq!(tiny.param_count(), 49_152 + 4 * (12 * 16_384 + 13 * 128) + 256);
    let small = shape("small", None).unwrap();
    assert_eq!(
        (small.vocab, small.dim, small.layers, small.heads, small.seq),
        (8192, 512, 8, 8, 256)
    );
    let scaling = shape("llama3-405b", None).unwrap().rope_scaling.unwrap();
    assert_eq!((scaling.factor, scaling.original_seq), (8.0, 8192));
}
