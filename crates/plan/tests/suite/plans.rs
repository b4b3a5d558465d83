//! Derived values of a plan.

use lockstep_plan::config::Model;
use lockstep_plan::model::{Family, Moe, Shape};
use lockstep_plan::{Compression, Config, Curve, DeviceType, Environment, Plan, Source};

fn plan(text: &str, ranks: usize) -> Plan {
    let config = Config::parse(text, &[]);
    let env = Environment::one_host(ranks, 4).with_vocab(64);
    Plan::resolve(&config, &env).unwrap_or_else(|errors| panic!("{text}: {errors:#?}"))
}

#[test]
fn an_empty_file_uses_the_defaults() {
    let plan = plan("", 1);
    let tiny = lockstep_plan::presets::shape("tiny", None).unwrap();
    assert_eq!(plan.model, lockstep_plan::model::Shape { vocab: 64, ..tiny });
    assert_eq!((plan.data.source, plan.data.seq), (Source::Builtin("grammar".into()), 128));
    assert_eq!((plan.train.lr.curve, plan.train.lr.warmup), (Curve::Cosine, 100));
    assert_eq!((plan.train.eval.unwrap().every, plan.train.clip), (100, Some(1.0)));
    assert_eq!(plan.train.sample, None);
}

#[test]
fn eval_every_zero_does_not_evaluate() {
    let eval = |text: &str| plan(&format!("[train]\n{text}"), 1).train.eval;
    assert_eq!(eval("eval_every = 0"), None);
    assert_eq!(eval("eval_every = 0\neval_batches = 4\n[data]\nheld_out = 0"), None);
    // A short run is evaluated at its end.
    assert_eq!(eval("steps = 7").unwrap().every, 7);
}

#[test]
fn keys_that_are_not_set_are_those_of_the_checkpoint() {
    for preset in ["gpt2-test", "llama-test", "moe-test"] {
        let mut shape = lockstep_plan::presets::shape(preset, Some(300)).unwrap();
        shape.moe = shape.moe.map(|moe| Moe { aux_loss: 0.5, z_loss: 0.0, ..moe });
        let mut config = Config::parse("[model]\ndropout = 0.1", &[]);
        config.base = Model::of(&shape);
        let env = Environment::one_host(1, 4).with_vocab(64);
        let plan = Plan::resolve(&config, &env).unwrap();
        assert_eq!(plan.model, Shape { dropout: 0.1, ..shape });
        let errors = Plan::resolve(&config, &env.with_vocab(301)).unwrap_err();
        let expected = "model.vocab: vocab=300 is less than the vocabulary of the data, 301; prepare the data with the \
                        tokenizer of the checkpoint";
        assert_eq!(errors[0].to_string(), expected);
    }
}

#[test]
fn the_global_batch_does_not_depend_on_the_ranks() {
    for (ranks, micro, accumulation, threads) in
        [(1, 8, 4, 4), (2, 8, 2, 2), (4, 8, 1, 1), (8, 4, 1, 1), (32, 1, 1, 1)]
    {
        let plan = plan("", ranks);
        assert_eq!(plan.train.global_batch, 32, "{ranks} ranks");
        let train = (plan.train.micro_batch, plan.train.accumulation, plan.train.threads);
        assert_eq!(train, (micro, accumulation, threads), "{ranks} ranks");
        assert_eq!(plan.local_batch() * ranks, 32, "{ranks} ranks");
    }
}

#[test]
fn threads_divide_the_cores_of_one_host() {
    let env = Environment {
        ranks: 8,
        local_ranks: 2,
        cores: 12,
        offloaded_comm: false,
        gpu: false,
        data_vocab: Some(64),
    };
    assert_eq!(Plan::resolve(&Config::default(), &env).unwrap().train.threads, 6);
}

#[test]
fn keys_override_a_preset() {
    let plan = plan("[model]\npreset = \"gpt2-124m\"\nlayers = 2\ndim = 384", 1);
    let model = &plan.model;
    // The number of heads is the preset's; head_dim and ffn are derived from the new dim.
    assert_eq!(
        (model.layers, model.dim, model.heads, model.head_dim, model.ffn),
        (2, 384, 12, 32, 1536)
    );
    assert_eq!((model.vocab, model.seq, model.tied), (50257, 1024, true));
}

#[test]
fn another_family_ignores_the_experts_of_a_preset() {
    let plan = plan("[model]\npreset = \"moe-test\"\nfamily = \"llama\"", 1);
    assert_eq!((plan.model.family, plan.model.moe, plan.model.ffn), (Family::Llama, None, 24));
}

#[test]
fn default_head_widths_divide_dim() {
    for family in ["gpt2", "llama", "moe"] {
        for dim in (2..200).step_by(2).chain([256, 320, 512, 1000, 4096]) {
            let shape = plan(&format!("[model]\nfamily = \"{family}\"\ndim = {dim}"), 1).model;
            assert_eq!(shape.heads * shape.head_dim, dim, "{family} {dim}");
        }
    }
}

#[test]
fn json_round_trip() {
    let texts = [
        "",
        "[model]\npreset = \"llama3-405b\"\n[train]\nlr = 0.1\nmin_lr = 0.03\nschedule = \"wsd\"\nclip = 0",
        "[model]\npreset = \"moe-test\"\ncapacity = 1.1\n[train]\nsample = \"a\\n\"\neps = 1e-310",
        "[data]\nsource = \"a/b.bin\"\nheld_out = 0\n[layout]\nrecompute = \"selective\"",
    ];
    let compressions = ["none", "bf16", "f16", "int8", "topk:0.01", "topk:1", "topk:1e-7"]
        .map(|how| format!("[comm]\ncompression = \"{how}\""));
    for text in texts.into_iter().chain(compressions.iter().map(String::as_str)) {
        let plan = plan(text, 2);
        let json = serde_json::to_string_pretty(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan, "{json}");
    }
}

#[test]
fn json_uses_the_words_of_the_run_file() {
    let json = serde_json::to_value(plan("", 1)).unwrap();
    assert_eq!(json["data"]["source"], "builtin:grammar");
    assert_eq!(json["model"]["family"], "gpt2");
    assert_eq!(json["train"]["lr"]["curve"], "cosine");
    assert_eq!(json["layout"]["recompute"], "none");
    assert_eq!(json["precision"]["compute"], "f32");
    assert_eq!(json["comm"]["compression"], "none");
}

#[test]
fn older_plans_get_defaults_for_missing_keys() {
    let mut json = serde_json::to_value(plan("[comm]\ncompression = \"int8\"", 2)).unwrap();
    assert_eq!(json["comm"]["compression"], "int8");
    json["comm"].as_object_mut().unwrap().remove("compression");
    json["data"].as_object_mut().unwrap().remove("max_corrupt");
    let old: Plan = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(old.comm.compression, Compression::None);
    assert_eq!(
        old.data.max_corrupt,
        plan("", 1).data.max_corrupt,
        "default limit of corrupt samples"
    );
    json["comm"]["compression"] = "int9".into();
    assert!(serde_json::from_value::<Plan>(json).is_err());
}

#[test]
fn auto_takes_a_gpu_if_there_is_one() {
    let kind = |kind: &str, gpu: bool| {
        let config = Config::parse(&format!("[device]\nkind = \"{kind}\""), &[]);
        let env = Environment { gpu, ..Environment::one_host(1, 1).with_vocab(64) };
        Plan::resolve(&config, &env).unwrap().device.kind
    };
    assert_eq!(kind("auto", true), DeviceType::Cuda);
    assert_eq!(kind("auto", false), DeviceType::Cpu);
    assert_eq!(kind("cpu", true), DeviceType::Cpu);
    assert_eq!(kind("cuda", false), DeviceType::Cuda);
}
