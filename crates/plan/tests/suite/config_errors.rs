//! Invalid run files and the exact texts of their errors.

use lockstep_plan::{Config, Environment, Plan};

/// Errors of a run file on `ranks` ranks, with a data vocabulary of 64.
fn errors(text: &str, sets: &[&str], ranks: usize) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let env = Environment::one_host(ranks, 4).with_vocab(64);
    match Plan::resolve(&Config::parse(text, &sets), &env) {
        Ok(plan) => panic!("{text} {sets:?} is a plan: {plan:?}"),
        Err(errors) => errors.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn syntax_and_types() {
    #[rustfmt::skip]
    let cases = [
        ("nam = \"a\"", "nam (line 1): unknown key; did you mean name?"),
        ("[train]\nstpes = 3", "train.stpes (line 2): unknown key; did you mean train.steps?"),
        ("[train]\nlearning_rate = 3", "train.learning_rate (line 2): unknown key; did you mean train.lr?"),
        ("[train]\nbatch_size = 3", "train.batch_size (line 2): unknown key; did you mean train.global_batch?"),
        ("[train]\nlayers = 3", "train.layers (line 2): unknown key; did you mean model.layers?"),
        ("[train]\naccumulation = 3", "train.accumulation (line 2): unknown key; it is derived from global_batch = micro_batch × accumulation × data"),
        ("[checkpoint]\nfolder = \"x\"", "checkpoint.folder (line 2): unknown key; valid keys: every, keep, keep_every"),
        ("[model.rope_scaling]\nfactr = 2", "model.rope_scaling.factr (line 2): unknown key; did you mean model.rope_scaling.factor?"),
        ("\n[trian]\nlr = 1\nsteps = 2", "trian (line 2): unknown section; did you mean [train]?"),
        ("[mesh]", "mesh (line 1): unknown section; valid sections: checkpoint, comm, data, device, layout, model, model.rope_scaling, precision, trace, train"),
        ("model = 3", "model (line 1): model is a section, not a value; write [model] with its keys below"),
        ("[[model]]\ndim = 64", "model (line 1): model is a section, not a value; write [model] with its keys below"),
        ("[model]\ndim = \"wide\"", "model.dim (line 2): dim must be a non-negative integer, e.g. 8 (got \"wide\")"),
        ("[model]\ndim = -8", "model.dim (line 2): dim must be a non-negative integer, e.g. 8 (got -8)"),
        ("[model]\ndim = 8.5", "model.dim (line 2): dim must be a non-negative integer, e.g. 8 (got 8.5)"),
        ("[model]\ntied = 1", "model.tied (line 2): tied must be true or false (got 1)"),
        ("[train]\nlr = [1]", "train.lr (line 2): lr must be a finite number, e.g. 0.1 or 3e-4 (got [1])"),
        ("[train]\nlr = inf", "train.lr (line 2): lr must be a finite number, e.g. 0.1 or 3e-4 (got inf)"),
        ("[train]\nlr = 2024-01-01", "train.lr (line 2): lr must be a finite number, e.g. 0.1 or 3e-4 (got 2024-01-01)"),
        ("[train]\nbetas = [0.9]", "train.betas (line 2): betas must be two numbers, e.g. [0.9, 0.95] (got [0.9])"),
        ("name = 7", "name (line 1): name must be a quoted string (got 7)"),
        ("[model]\nfamily = \"lama\"", "model.family (line 2): family must be one of \"gpt2\", \"llama\", \"moe\" (got \"lama\"); did you mean \"llama\"?"),
        ("[model]\nbalance = \"sequences\"", "model.balance (line 2): balance must be one of \"sequence\", \"batch\" (got \"sequences\"); did you mean \"sequence\"?"),
        ("[model]\nfamily = \"rnn\"", "model.family (line 2): family must be one of \"gpt2\", \"llama\", \"moe\" (got \"rnn\")"),
        ("[model]\nfamily = true", "model.family (line 2): family must be one of \"gpt2\", \"llama\", \"moe\" (got true)"),
        ("[comm]\ncompression = \"int4\"", "comm.compression (line 2): unknown compression \"int4\"; did you mean \"int8\"?"),
        ("[comm]\ncompression = \"top_k:0.1\"", "comm.compression (line 2): unknown compression \"top_k:0.1\"; did you mean \"topk:0.01\"?"),
        ("[comm]\ncompression = \"powersgd\"", "comm.compression (line 2): unknown compression \"powersgd\"; use one of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\""),
        ("[comm]\ncompression = \"topk\"", "comm.compression (line 2): topk needs the fraction to send; write for example topk:0.01"),
        ("[comm]\ncompression = \"topk:1%\"", "comm.compression (line 2): \"1%\" is not a number; write for example topk:0.01"),
        ("[comm]\ncompression = 8", "comm.compression (line 2): compression must be one of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\" (got 8)"),
        ("[device]\nkind = \"gpu\"", "device.kind (line 2): kind must be one of \"auto\", \"cpu\", \"cuda\" (got \"gpu\"); did you mean \"cpu\"?"),
        ("[precision]\ncompute = \"fp32\"", "precision.compute (line 2): compute must be one of \"f32\", \"bf16\" (got \"fp32\"); did you mean \"f32\"?"),
    ];
    for (text, expected) in cases {
        assert_eq!(errors(text, &[], 1), [expected], "{text}");
    }
}

#[test]
fn invalid_values() {
    #[rustfmt::skip]
    let cases = [
        ("[model]\nheads = 6", 1, "model.heads (line 2): heads=6 does not divide dim=128; use 4 or 8"),
        ("[model]\npreset = \"tiny\"\ndim = 130", 1, "model.dim (line 3): heads=4 does not divide dim=130; use 2 or 5"),
        ("[model]\nheads = 8\nkv_heads = 3", 1, "model.kv_heads (line 3): kv_heads=3 does not divide heads=8; use 2 or 4"),
        ("[model]\nheads = 0", 1, "model.heads (line 2): heads must be a positive integer (got 0)"),
        ("[model]\ndim = 0", 1, "model.dim (line 2): dim must be a positive integer (got 0)"),
        ("[model]\nfamily = \"moe\"\nexperts = 0", 1, "model.experts (line 3): experts must be a positive integer (got 0)"),
        ("[model]\nlayers = 2_000_000_000", 1, "model.layers (line 2): layers must be at most 1000000000 (got 2000000000)"),
        ("[model]\ndim = 67_108_864\nffn = 1", 1, "model.dim (line 2): the model has 7.2e16 parameters; the maximum is 1e15"),
        ("[model]\nheads = 200", 1, "model.heads (line 2): heads=200 does not divide dim=128; use 128"),
        ("[model]\nfamily = \"llama\"\nhead_dim = 7", 1, "model.head_dim (line 3): head_dim=7 is odd, but rotary positions rotate pairs; use an even head_dim"),
        ("[model]\npreset = \"gpt2-125m\"", 1, "model.preset (line 2): unknown preset \"gpt2-125m\"; did you mean \"gpt2-124m\"?"),
        ("[model]\nvocab = 63", 1, "model.vocab (line 2): vocab=63 is less than the vocabulary of the data, 64; remove it, or use at least 64"),
        ("[model]\nexperts = 4", 1, "model.experts (line 2): experts is only used with family = \"moe\" (got \"gpt2\"); set family = \"moe\" or remove it"),
        ("[model]\nfamily = \"moe\"\nexperts = 4\ntop_k = 5", 1, "model.top_k (line 4): top_k=5 is more than experts=4; use at most 4"),
        ("[model]\nfamily = \"moe\"\nffn = 1\nshared_experts = 2_000_000_000", 1, "model.shared_experts (line 4): shared_experts must be at most 1000000000 (got 2000000000)"),
        ("[model]\nfamily = \"moe\"\nq_lora_rank = 8", 1, "model.q_lora_rank (line 3): q_lora_rank is only used with latent attention, but kv_lora_rank is not set; set model.kv_lora_rank or remove q_lora_rank"),
        ("[model]\nkv_lora_rank = 8", 1, "model.kv_lora_rank (line 2): kv_lora_rank requires rotary positions, but gpt2 has learned positions; set family = \"moe\" or \"llama\""),
        ("[model]\nfamily = \"llama\"\nkv_lora_rank = 8\nhead_dim = 64", 1, "model.head_dim (line 4): head_dim=64, but nope_head_dim + rope_head_dim = 192; remove head_dim"),
        ("[model]\nfamily = \"moe\"\nlayers = 2\ndense_layers = 3\ndense_ffn = 64", 1, "model.dense_layers (line 4): dense_layers=3 is more than layers=2; use at most 2"),
        ("[model]\nfamily = \"llama\"\ndense_layers = 1", 1, "model.dense_layers (line 3): dense_layers is only used with family = \"moe\"; set family = \"moe\" or remove it"),
        ("[model]\nshared_experts = 1", 1, "model.shared_experts (line 2): shared_experts is only used with family = \"moe\" (got \"gpt2\"); set family = \"moe\" or remove it"),
        ("[model]\nrope_theta = 1e4", 1, "model.rope_theta (line 2): rope_theta requires rotary positions, but gpt2 has learned positions; set family = \"llama\" or remove it"),
        ("[model]\ndropout = 1.0", 1, "model.dropout (line 2): dropout must be at least 0 and less than 1 (got 1)"),
        ("[model]\nfamily = \"llama\"\nrope_scaling.original_seq = 8", 1, "model.rope_scaling.original_seq (line 3): rope_scaling needs a factor; set model.rope_scaling.factor"),
        ("[data]\nsource = \"builtin:gramar\"", 1, "data.source (line 2): unknown built-in source \"gramar\"; did you mean \"builtin:grammar\"?"),
        ("[data]\nseq = 129", 1, "data.seq (line 2): seq=129 is longer than model.seq=128; use at most 128"),
        ("[data]\nheld_out = 1.0", 1, "data.held_out (line 2): held_out must be at least 0 and less than 1 (got 1)"),
        ("[data]\nheld_out = 0\n[train]\neval_every = 5", 1, "train.eval_every (line 4): eval_every=5, but data.held_out=0 reserves no data for evaluation; set data.held_out = 0.05 or remove it"),
        ("", 3, "train.global_batch: global_batch=32 is not a multiple of data=3; use 30 or 33"),
        ("[train]\nglobal_batch = 32\nmicro_batch = 4", 3, "train.global_batch (line 2): global_batch=32 is not a multiple of data=3; use 24 or 36"),
        ("[train]\nglobal_batch = 32\nmicro_batch = 5", 2, "train.global_batch (line 2): global_batch=32 is not a multiple of micro_batch=5 × data=2 = 10; use 30 or 40, or micro_batch=4 or 8"),
        ("[train]\nmicro_batch = 64", 1, "train.micro_batch (line 2): global_batch=32 is not a multiple of micro_batch=64 × data=1 = 64; use 64, or micro_batch=32"),
        ("[train]\nsteps = 0\nwarmup = 0", 1, "train.steps (line 2): steps must be a positive integer (got 0)"),
        ("[train]\nsteps = 5\nwarmup = 6", 1, "train.warmup (line 3): warmup=6 is more than steps=5; use at most 5"),
        ("[train]\nlr = 0", 1, "train.lr (line 2): lr must be greater than 0 (got 0)"),
        ("[train]\nmin_lr = 1", 1, "train.min_lr (line 2): min_lr=1 is more than lr=0.0003; use at most 0.0003"),
        ("[train]\nschedule = \"constant\"\nmin_lr = 0", 1, "train.min_lr (line 3): min_lr=0, but a constant schedule stays at lr=0.0003; remove it, or use another schedule"),
        ("[train]\ndecay = 0.5", 1, "train.decay (line 2): decay=0.5 is only used with schedule = \"wsd\"; set schedule = \"wsd\" or remove it"),
        ("[train]\nbetas = [0.9, 1.0]", 1, "train.betas (line 2): betas must both be at least 0 and less than 1 (got [0.9, 1])"),
        ("[train]\nclip = -1", 1, "train.clip (line 2): clip must be greater than 0, or 0 for no clipping (got -1)"),
        ("[checkpoint]\nevery = 100\nkeep_every = 250", 1, "checkpoint.keep_every (line 3): keep_every=250 is not a multiple of every=100, so those steps are not saved; use 200 or 300"),
        ("[comm]\ncompression = \"topk:0\"", 2, "comm.compression (line 2): compression must have a fraction greater than 0 and at most 1, e.g. topk:0.01 (got topk:0)"),
        ("[comm]\ncompression = \"topk:-0.1\"", 2, "comm.compression (line 2): compression must have a fraction greater than 0 and at most 1, e.g. topk:0.01 (got topk:-0.1)"),
        ("[comm]\ncompression = \"topk:inf\"", 2, "comm.compression (line 2): compression must have a fraction greater than 0 and at most 1, e.g. topk:0.01 (got topk:inf)"),
        ("[comm]\ncompression = \"topk:nan\"", 2, "comm.compression (line 2): compression must have a fraction greater than 0 and at most 1, e.g. topk:0.01 (got topk:NaN)"),
        ("[comm]\ncompression = \"topk:5\"", 2, "comm.compression (line 2): topk:5 is more than the whole gradient; for 5 percent use topk:0.05"),
        ("[comm]\ncompression = \"int8\"\ncompression_warmup = 9", 2, "comm.compression_warmup (line 3): compression_warmup=9 is only used with topk, but compression=int8; remove it, or use for example compression = \"topk:0.01\""),
        ("[comm]\ncompression = \"int8\"\n[precision]\ngradients = \"bf16\"", 2, "precision.gradients (line 4): compression=int8 requires f32 gradients, but gradients=bf16; remove one of them: bf16 gradients already take two bytes"),
        ("[comm]\ncompression = \"int8\"\n[model]\nvocab = 257\n[layout]\ntensor = 2\nzero = 1", 4, "comm.compression (line 2): compression=int8 with zero=1 requires shards of equal size, but tensor=2 does not divide vocab=257; use vocab=258, compression=bf16 or zero=0"),
        ("[comm]\ntimeout_s = 0", 2, "comm.timeout_s (line 2): timeout_s must be greater than 0 (got 0)"),
        ("name = \"a/b\"", 1, "name (line 1): \"a/b\" is not a valid folder name; use letters, digits, - and _"),
    ];
    for (text, ranks, expected) in cases {
        assert_eq!(errors(text, &[], ranks), [expected], "{text}");
    }
}

/// The model has 4 layers, 4 heads, ffn=512 and seq=128; a step has 32 samples.
#[test]
fn invalid_layouts() {
    #[rustfmt::skip]
    let cases = [
        // Ranks.
        ("data = 4", 2, "layout.data (line 2): data=4 needs 4 ranks, but 2 ranks were started; use --ranks 4, or remove data"),
        ("data = 1", 2, "layout.data (line 2): data=1 needs 1 rank, but 2 ranks were started; use --ranks 1, or remove data"),
        ("data = 2\ntensor = 2", 2, "layout.data (line 2): data=2 × tensor=2 needs 4 ranks, but 2 ranks were started; use --ranks 4, or remove data"),
        ("data = 2\ntensor = 2", 1, "layout.data (line 2): data=2 × tensor=2 needs 4 ranks, but 1 rank was started; use --ranks 4"),
        ("tensor = 2", 1, "layout.tensor (line 2): tensor=2 needs 2 ranks, but 1 rank was started; use --ranks 2"),
        ("context = 2\npipe = 2", 2, "layout.context (line 2): context=2 × pipe=2 needs 4 ranks, but 2 ranks were started; use --ranks 4"),
        ("pipe = 2", 3, "layout.pipe (line 2): pipe=2 needs 2 ranks, but 3 ranks were started; use --ranks 2 or 4"),
        ("tensor = 0", 1, "layout.tensor (line 2): tensor must be a positive integer (got 0)"),
        ("expert = 0", 1, "layout.expert (line 2): expert must be a positive integer (got 0)"),
        ("pipe = 2\nchunks = 0", 2, "layout.chunks (line 3): chunks must be a positive integer (got 0)"),
        // ZeRO.
        ("zero = 4", 2, "layout.zero (line 2): zero must be 0, 1, 2 or 3 (got 4)"),
        ("shard = 2", 2, "layout.shard (line 2): shard=2 has no effect with zero=0; set zero = 1, 2 or 3, or remove shard"),
        ("zero = 1\nshard = 0", 2, "layout.shard (line 3): shard must be a positive integer (got 0)"),
        ("zero = 2\nshard = 3", 4, "layout.shard (line 3): shard=3 does not divide data × context = 4; use 2 or 4"),
        ("zero = 3\nshard = 8", 4, "layout.shard (line 3): shard=8 does not divide data × context = 4; use 4"),
        // The tensor axis.
        ("tensor = 8", 8, "layout.tensor (line 2): tensor=8 does not divide heads=4; use 4"),
        ("tensor = 4\n[model]\nffn = 510", 4, "layout.tensor (line 2): tensor=4 does not divide ffn=510; use 2"),
        ("tensor = 4\n[model]\nheads = 12\nhead_dim = 8\nkv_heads = 6", 4, "layout.tensor (line 2): tensor=4 and kv_heads=6: neither divides the other; use 2"),
        ("tensor = 128\n[model]\nheads = 128", 128, "layout.tensor (line 2): tensor=128 is more than vocab=64; use at most 64"),
        ("tensor = 2\nsequence = true\n[data]\nseq = 33\n[train]\nmicro_batch = 1", 2, "layout.sequence (line 3): sequence=true, but tensor=2 does not divide the 33 tokens of a micro-batch on one rank; use micro_batch=2, or sequence=false"),
        // An invalid model is not checked against the layout.
        ("tensor = 4\n[model]\nheads = 6", 4, "model.heads (line 4): heads=6 does not divide dim=128; use 4 or 8"),
        // The context axis.
        ("context = 2\n[data]\nseq = 126", 2, "layout.context (line 2): seq=126 is not a multiple of 4: a ring of 2 splits it into 4; use 124 or 128"),
        ("context = 4\ncontext_kind = \"ulysses\"\n[data]\nseq = 126", 4, "layout.context (line 2): seq=126 is not a multiple of 4: ulysses splits it into 4; use 124 or 128"),
        ("context = 4\ncontext_kind = \"both\"\n[data]\nseq = 126", 4, "layout.context (line 2): seq=126 is not a multiple of 4: ulysses=2 in a ring of 2 splits it into 4; use 124 or 128"),
        ("context = 8\ncontext_kind = \"ulysses\"", 8, "layout.context (line 2): context=8 does not divide heads=4, as ulysses requires; use 4, or context_kind = \"ring\""),
        ("context = 4\ncontext_kind = \"ulysses\"\ntensor = 2", 8, "layout.context (line 2): context=4 does not divide heads=2, as ulysses requires (heads per rank, with tensor=2); use 2, or context_kind = \"ring\""),
        ("context_kind = \"rings\"", 2, "layout.context_kind (line 2): context_kind must be one of \"ring\", \"ulysses\", \"both\" (got \"rings\"); did you mean \"ring\"?"),
        // Stages.
        ("pipe = 8", 8, "layout.pipe (line 2): pipe=8 stages are more than layers=4; every stage needs a layer: use at most 4 stages"),
        ("pipe = 4\nchunks = 2", 4, "layout.pipe (line 2): pipe=4 × chunks=2 = 8 stages are more than layers=4; every stage needs a layer: use at most 4 stages"),
        ("pipe = 2\nschedule = \"interleaved\"\n[train]\nglobal_batch = 12\nmicro_batch = 4", 2, "layout.schedule (line 3): schedule=interleaved needs a multiple of pipe=2 micro-batches per step (got 3); use global_batch=8 or 16"),
        ("pipe = 2\nschedule = \"gpipe\"\nchunks = 2", 2, "layout.schedule (line 3): schedule=gpipe has one stage per rank, but chunks=2; remove chunks, or set schedule = \"interleaved\""),
        ("schedule = \"zb\"", 2, "layout.schedule (line 2): schedule must be one of \"gpipe\", \"1f1b\", \"interleaved\", \"zb-h1\", \"zb-h2\" (got \"zb\")"),
        // Experts.
        ("expert = 2", 2, "layout.expert (line 2): expert=2, but the model has no experts; remove it, or set family = \"moe\""),
        ("expert = 3\n[model]\nfamily = \"moe\"\nexperts = 6", 4, "layout.expert (line 2): expert=3 does not divide data × context = 4; use 2"),
        ("expert = 4\n[model]\nfamily = \"moe\"\nexperts = 6", 4, "layout.expert (line 2): expert=4 does not divide experts=6; use 2"),
        ("context = 2\n[model]\nfamily = \"moe\"\ncapacity = 1.5", 2, "layout.context (line 2): context=2 with capacity: which tokens are dropped would depend on the layout; remove capacity (dropless routing)"),
    ];
    for (text, ranks, expected) in cases {
        assert_eq!(errors(&format!("[layout]\n{text}"), &[], ranks), [expected], "{text}");
    }
}

#[test]
fn invalid_overrides() {
    #[rustfmt::skip]
    let cases = [
        ("train.lr=fast", "train.lr (--set): lr must be a finite number, e.g. 0.1 or 3e-4 (got fast)"),
        ("train.lrr=1", "train.lrr (--set): unknown key; did you mean train.lr?"),
        ("lr=1", "lr (--set): unknown key; did you mean train.lr?"),
        ("model.heads=6", "model.heads (--set): heads=6 does not divide dim=128; use 4 or 8"),
        ("train.lr", "--set: `train.lr` has no `=`; write for example --set train.lr=3e-4"),
    ];
    for (set, expected) in cases {
        assert_eq!(errors("", &[set], 1), [expected], "{set}");
    }
}

#[test]
fn all_errors_in_the_order_of_the_file() {
    let text = "
[train]
lr = \"fast\"
stpes = 10
warmup = 2000
[model]
heads = 6
[modle]
dim = 8
[layout]
pipe = 2
data = 3
";
    let expected = [
        "train.lr (line 3): lr must be a finite number, e.g. 0.1 or 3e-4 (got \"fast\")",
        // warmup=2000 is not compared with the default steps=1000, because `stpes` was meant to set the steps.
        "train.stpes (line 4): unknown key; did you mean train.steps?",
        "model.heads (line 7): heads=6 does not divide dim=128; use 4 or 8",
        "modle (line 8): unknown section; did you mean [model]?",
        "layout.data (line 12): data=3 × pipe=2 needs 6 ranks, but 2 ranks were started; use --ranks 6, or remove data",
        "layout.data (line 12): global_batch=32 is not a multiple of data=3; use 30 or 33",
        "train.clip (--set): clip must be greater than 0, or 0 for no clipping (got -1)",
    ];
    assert_eq!(errors(text, &["train.clip=-1"], 2), expected);
}

#[test]
fn unknown_vocabulary() {
    let errors = Plan::resolve(&Config::default(), &Environment::one_host(1, 1)).unwrap_err();
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "model.vocab: vocab is not set, and the vocabulary of the data is unknown; set model.vocab"
        ]
    );
}

#[test]
fn invalid_toml() {
    // Every invalid line is reported, and nothing else.
    let texts = errors("[train]\nlr = \nsteps = 0\nsteps = 3\n[model\n", &[], 1);
    let lines: Vec<&str> = texts.iter().map(|text| text.split(':').next().unwrap()).collect();
    assert_eq!(lines, ["line 2", "line 4", "line 5"], "{texts:#?}");
    assert!(texts.iter().all(|text| text.contains("invalid TOML")), "{texts:#?}");
}

#[test]
fn out_of_range_sizes_are_errors_not_overflows() {
    let sizes = [
        "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "experts", "top_k",
    ];
    for name in sizes {
        for value in ["0", "9223372036854775807"] {
            let text = format!("[model]\nfamily = \"moe\"\n{name} = {value}");
            assert!(!errors(&text, &[], 1).is_empty(), "{text}");
        }
    }
    for name in ["global_batch", "micro_batch", "steps", "threads", "log_every"] {
        let text = format!("[train]\n{name} = 9223372036854775807");
        assert!(!errors(&text, &[], 2).is_empty(), "{text}");
    }
    let degrees =
        ["data", "shard", "tensor", "context", "pipe", "pipe = 2\nchunks", "expert", "zero"];
    for name in degrees {
        for kind in ["ring", "ulysses", "both"] {
            // The second value is the largest valid size.
            for value in ["9223372036854775807", "1000000000"] {
                let kind = format!("context_kind = \"{kind}\"");
                let text = format!("[layout]\n{kind}\n{name} = {value}");
                assert!(!errors(&text, &[], 2).is_empty(), "{text}");
            }
        }
    }
}

#[test]
fn absurd_counts_are_rejected_before_anything_is_listed() {
    #[rustfmt::skip]
    let cases = [
        ("[model]\nlayers = 1e9", "model.layers (line 2): the model has about 1.6e10 tensors; the maximum is 2e5"),
        ("[model]\nfamily = \"moe\"\nexperts = 1e9", "model.experts (line 3): the model has about 1.2e10 tensors; the maximum is 2e5"),
        ("[model]\nfamily = \"moe\"\ncapacity = 1e300", "model.capacity (line 3): capacity must be at most 1000, or removed for dropless routing (got 1000000"),
        ("[train]\nglobal_batch = 1e9", "train.global_batch (line 2): a step has 125000000 micro-batches, which take 5.0e8 passes; the maximum is 2e6; use a larger micro_batch or a smaller global_batch"),
        ("[train]\nthreads = 1e9", "train.threads (line 2): threads must be at most 4096 (got 1000000000)"),
        ("[layout]\ndata = 1e6\ntensor = 1e6", "layout.data (line 2): the layout has 1000000000000 ranks; the maximum is 1000000"),
        ("[layout]\ntensor = 1e7", "layout.tensor (line 2): tensor must be at most 1000000 (got 10000000)"),
        ("[checkpoint]\nevery = 18446744073709551615", "checkpoint.every (line 2): every must be at most 1000000000 (got 18446744073709551615)"),
    ];
    for (text, expected) in cases {
        let config = Config::parse(text, &[]);
        let env = Environment::one_host(config.ranks(), 4).with_vocab(64);
        let errors = Plan::resolve(&config, &env).unwrap_err();
        let found = errors.iter().any(|error| error.to_string().starts_with(expected));
        assert!(found, "{text}: {errors:#?}");
    }
}

#[test]
fn any_prefix_of_a_file_is_parsed_or_rejected() {
    let text = "name = \"ä\"\n[model]\nrope_scaling = { factor = 8.0 }\nheads = 6\n[train]\nbetas = [0.9, 0.95]\n";
    for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let config = Config::parse(&text[..end], &[]);
        // The vocabulary is unknown, so there is always an error.
        assert!(Plan::resolve(&config, &Environment::one_host(1, 1)).is_err(), "{}", &text[..end]);
    }
}

#[test]
fn fp8_needs_a_gpu_bf16_and_sizes_that_are_multiples_of_16() {
    let base = "[precision]\ncompute = \"bf16\"\nfp8 = \"layers\"\n[model]\ndim = 64\nheads = 4\nffn = 128\nseq = 32\n[device]\nkind = \"cuda\"\n";
    let resolve = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        let config = Config::parse(base, &sets);
        let env = Environment::one_host(config.ranks(), 4).with_vocab(50);
        Plan::resolve(&config, &env)
    };
    let plan = resolve(&["precision.fp8_scaling=delayed"]).unwrap();
    assert!(plan.precision.fp8.is_on());
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    #[rustfmt::skip]
    let cases: [(&[&str], &str); 8] = [
        (&["device.kind=cpu"], "fp8=layers needs an NVIDIA GPU of compute capability 8.9 or newer, but this run uses the CPU; remove fp8, or run on a GPU with device.kind = \"cuda\""),
        (&["precision.compute=f32"], "fp8=layers requires compute=bf16, but compute=f32; use precision.compute = \"bf16\""),
        (&["layout.tensor=2"], "fp8=layers has one scale per matrix, which tensor=2 would split; use tensor=1, or another axis"),
        (&["layout.pipe=2", "layout.schedule=zb-h1"], "fp8=layers does not defer weight gradients, but schedule=zb-h1; use schedule = \"1f1b\" or \"interleaved\""),
        (&["model.dim=72"], "fp8=layers requires sizes that are multiples of 16, but dim=72; use for example dim=80"),
        (&["model.ffn=100"], "fp8=layers requires sizes that are multiples of 16, but ffn=100; use for example ffn=112"),
        (&["precision.fp8=layers+head"], "fp8=layers+head requires sizes that are multiples of 16, but vocab=50; use for example vocab=64"),
        (&["precision.fp8=all"], "fp8 must be one of \"off\", \"layers\", \"layers+head\" (got \"all\")"),
    ];
    for (sets, expected) in cases {
        let errors = resolve(sets).unwrap_err();
        let found = errors.iter().any(|error| error.to_string().contains(expected));
        assert!(found, "{sets:?}: {errors:#?}");
    }
}
