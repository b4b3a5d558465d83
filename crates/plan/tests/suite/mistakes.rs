//! Mistakes in, exact texts out.

use lockstep_plan::{Config, Environment, Plan};

/// What is said about a file on `ranks` ranks, with 64 tokens in the data.
fn said(text: &str, sets: &[&str], ranks: usize) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let env = Environment::one_host(ranks, 4).with_vocab(64);
    match Plan::resolve(&Config::parse(text, &sets), &env) {
        Ok(plan) => panic!("{text} {sets:?} is a plan: {plan:?}"),
        Err(mistakes) => mistakes.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn of_typing() {
    #[rustfmt::skip]
    let cases = [
        ("nam = \"a\"", "nam (line 1): no such key; did you mean name?"),
        ("[train]\nstpes = 3", "train.stpes (line 2): no such key; did you mean train.steps?"),
        ("[train]\nlearning_rate = 3", "train.learning_rate (line 2): no such key; did you mean train.lr?"),
        ("[train]\nbatch_size = 3", "train.batch_size (line 2): no such key; did you mean train.global_batch?"),
        ("[train]\nlayers = 3", "train.layers (line 2): no such key; did you mean model.layers?"),
        ("[train]\naccumulation = 3", "train.accumulation (line 2): no such key; it follows from global_batch = micro_batch × accumulation × data"),
        ("[checkpoint]\nfolder = \"x\"", "checkpoint.folder (line 2): no such key; there are every, keep, keep_every"),
        ("[model.rope_scaling]\nfactr = 2", "model.rope_scaling.factr (line 2): no such key; did you mean model.rope_scaling.factor?"),
        ("\n[trian]\nlr = 1\nsteps = 2", "trian (line 3): no such section; did you mean [train]?"),
        ("[mesh]", "mesh (line 1): no such section; there are checkpoint, comm, data, layout, model, model.rope_scaling, precision, train"),
        ("model = 3", "model (line 1): model is a section, not a value; write [model] and its keys below"),
        ("[[model]]\ndim = 64", "model (line 1): model is a section, not a value; write [model] and its keys below"),
        ("[model]\ndim = \"wide\"", "model.dim (line 2): \"wide\" is text; write a whole number such as 8"),
        ("[model]\ndim = -8", "model.dim (line 2): -8 is negative; write a whole number such as 8"),
        ("[model]\ndim = 8.5", "model.dim (line 2): 8.5 is a number with a fraction; write a whole number such as 8"),
        ("[model]\ntied = 1", "model.tied (line 2): 1 is a whole number; write true or false"),
        ("[train]\nlr = [1]", "train.lr (line 2): [1] is a list; write a number such as 0.1 or 3e-4"),
        ("[train]\nlr = inf", "train.lr (line 2): inf is without bounds; write a number such as 0.1 or 3e-4"),
        ("[train]\nlr = 2024-01-01", "train.lr (line 2): 2024-01-01 is a date; write a number such as 0.1 or 3e-4"),
        ("[train]\nbetas = [0.9]", "train.betas (line 2): [0.9] is a list; write two numbers such as [0.9, 0.95]"),
        ("name = 7", "name (line 1): 7 is a whole number; write text in quotes"),
        ("[model]\nfamily = \"lama\"", "model.family (line 2): \"lama\" is none of \"gpt2\", \"llama\", \"moe\"; did you mean \"llama\"?"),
        ("[model]\nbalance = \"sequences\"", "model.balance (line 2): \"sequences\" is none of \"sequence\", \"batch\"; did you mean \"sequence\"?"),
        ("[model]\nfamily = \"rnn\"", "model.family (line 2): \"rnn\" is none of \"gpt2\", \"llama\", \"moe\"; write one of \"gpt2\", \"llama\", \"moe\""),
        ("[model]\nfamily = true", "model.family (line 2): true is a truth value; write one of \"gpt2\", \"llama\", \"moe\""),
        ("[comm]\ncompression = \"int4\"", "comm.compression (line 2): \"int4\" is none of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\"; did you mean \"int8\"?"),
        ("[comm]\ncompression = \"top_k:0.1\"", "comm.compression (line 2): \"top_k:0.1\" is none of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\"; did you mean \"topk:0.01\"?"),
        ("[comm]\ncompression = \"powersgd\"", "comm.compression (line 2): \"powersgd\" is none of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\"; write one of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\""),
        ("[comm]\ncompression = \"topk\"", "comm.compression (line 2): topk does not say which fraction to send; write it as in topk:0.01"),
        ("[comm]\ncompression = \"topk:1%\"", "comm.compression (line 2): \"1%\" is no fraction; write it as in topk:0.01"),
        ("[comm]\ncompression = 8", "comm.compression (line 2): 8 is a whole number; write one of \"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\""),
        ("[precision]\ncompute = \"fp32\"", "precision.compute (line 2): \"fp32\" is none of \"f32\", \"bf16\"; did you mean \"f32\"?"),
    ];
    for (text, expected) in cases {
        assert_eq!(said(text, &[], 1), [expected], "{text}");
    }
}

#[test]
fn of_meaning() {
    #[rustfmt::skip]
    let cases = [
        ("[model]\nheads = 6", 1, "model.heads (line 2): heads=6 does not divide dim=128; try 4 or 8"),
        ("[model]\npreset = \"tiny\"\ndim = 130", 1, "model.dim (line 3): heads=4 does not divide dim=130; try 2 or 5"),
        ("[model]\nheads = 8\nkv_heads = 3", 1, "model.kv_heads (line 3): kv_heads=3 does not divide heads=8; try 2 or 4"),
        ("[model]\nheads = 0", 1, "model.heads (line 2): heads=0 cannot be; it must be at least 1"),
        ("[model]\ndim = 0", 1, "model.dim (line 2): dim=0 cannot be; it must be at least 1"),
        ("[model]\nfamily = \"moe\"\nexperts = 0", 1, "model.experts (line 3): experts=0 cannot be; it must be at least 1"),
        ("[model]\nlayers = 2_000_000_000", 1, "model.layers (line 2): layers=2000000000 cannot be; that is more than can be meant"),
        ("[model]\ndim = 67_108_864\nffn = 1", 1, "model.dim (line 2): this makes 7.2e16 parameters; 1e15 is the most that is counted"),
        ("[model]\nheads = 200", 1, "model.heads (line 2): heads=200 does not divide dim=128; try 128"),
        ("[model]\nfamily = \"llama\"\nhead_dim = 7", 1, "model.head_dim (line 3): head_dim=7 is odd, and rotary positions turn pairs; it must be even"),
        ("[model]\npreset = \"gpt2-125m\"", 1, "model.preset (line 2): no preset is called \"gpt2-125m\"; did you mean \"gpt2-124m\"?"),
        ("[model]\nvocab = 63", 1, "model.vocab (line 2): vocab=63 is less than the 64 of the data; leave it out, or say 64 or more"),
        ("[model]\nexperts = 4", 1, "model.experts (line 2): experts is for the moe family, and this is gpt2; say family = \"moe\", or leave it out"),
        ("[model]\nfamily = \"moe\"\nexperts = 4\ntop_k = 5", 1, "model.top_k (line 4): top_k=5 is more than experts=4; say at most 4"),
        ("[model]\nfamily = \"moe\"\nffn = 1\nshared_experts = 2_000_000_000", 1, "model.shared_experts (line 4): shared_experts=2000000000 cannot be; that is more than can be meant"),
        ("[model]\nfamily = \"moe\"\nq_lora_rank = 8", 1, "model.q_lora_rank (line 3): q_lora_rank is for latent attention, which has a kv_lora_rank; give model.kv_lora_rank"),
        ("[model]\nkv_lora_rank = 8", 1, "model.kv_lora_rank (line 2): kv_lora_rank is for rotary positions, and gpt2 learns its positions; say family = \"moe\" or \"llama\""),
        ("[model]\nfamily = \"llama\"\nkv_lora_rank = 8\nhead_dim = 64", 1, "model.head_dim (line 4): head_dim=64, but nope_head_dim + rope_head_dim = 192; leave head_dim out"),
        ("[model]\nfamily = \"moe\"\nlayers = 2\ndense_layers = 3\ndense_ffn = 64", 1, "model.dense_layers (line 4): dense_layers=3 is more than layers=2; say at most 2"),
        ("[model]\nfamily = \"llama\"\ndense_layers = 1", 1, "model.dense_layers (line 3): dense_layers is for a mixture's first layers; say family = \"moe\", or leave it out"),
        ("[model]\nshared_experts = 1", 1, "model.shared_experts (line 2): shared_experts is for the moe family, and this is gpt2; say family = \"moe\", or leave it out"),
        ("[model]\nrope_theta = 1e4", 1, "model.rope_theta (line 2): rope_theta is for rotary positions, and gpt2 learns its positions; say family = \"llama\", or leave it out"),
        ("[model]\ndropout = 1.0", 1, "model.dropout (line 2): dropout=1 cannot be; it must be from 0 to below 1"),
        ("[model]\nfamily = \"llama\"\nrope_scaling.original_seq = 8", 1, "model.rope_scaling.original_seq (line 3): rope_scaling has no factor; give model.rope_scaling.factor"),
        ("[data]\nsource = \"builtin:gramar\"", 1, "data.source (line 2): no built-in source is called \"gramar\"; did you mean \"builtin:grammar\"?"),
        ("[data]\nseq = 129", 1, "data.seq (line 2): seq=129 is longer than model.seq=128; say at most 128"),
        ("[data]\nheld_out = 1.0", 1, "data.held_out (line 2): held_out=1 cannot be; it must be from 0 to below 1"),
        ("[data]\nheld_out = 0\n[train]\neval_every = 5", 1, "train.eval_every (line 4): eval_every=5, but data.held_out=0 keeps nothing to evaluate on; say data.held_out = 0.05, or leave it out"),
        ("", 3, "train.global_batch: global_batch=32 is not a multiple of data=3; try 30 or 33"),
        ("[train]\nglobal_batch = 32\nmicro_batch = 4", 3, "train.global_batch (line 2): global_batch=32 is not a multiple of data=3; try 24 or 36"),
        ("[train]\nglobal_batch = 32\nmicro_batch = 5", 2, "train.global_batch (line 2): global_batch=32 is not a multiple of micro_batch=5 × data=2 = 10; try 30 or 40, or micro_batch=4 or 8"),
        ("[train]\nmicro_batch = 64", 1, "train.micro_batch (line 2): global_batch=32 is not a multiple of micro_batch=64 × data=1 = 64; try 64, or micro_batch=32"),
        ("[train]\nsteps = 0\nwarmup = 0", 1, "train.steps (line 2): steps=0 cannot be; it must be at least 1"),
        ("[train]\nsteps = 5\nwarmup = 6", 1, "train.warmup (line 3): warmup=6 is more than steps=5; say at most 5"),
        ("[train]\nlr = 0", 1, "train.lr (line 2): lr=0 cannot be; it must be more than 0"),
        ("[train]\nmin_lr = 1", 1, "train.min_lr (line 2): min_lr=1 is more than lr=0.0003; say at most 0.0003"),
        ("[train]\nschedule = \"constant\"\nmin_lr = 0", 1, "train.min_lr (line 3): min_lr=0, but a constant schedule stays at lr=0.0003; leave it out, or take another schedule"),
        ("[train]\ndecay = 0.5", 1, "train.decay (line 2): decay=0.5 is for the wsd schedule; say schedule = \"wsd\", or leave it out"),
        ("[train]\nbetas = [0.9, 1.0]", 1, "train.betas (line 2): betas=[0.9, 1] cannot be; both must be from 0 to below 1"),
        ("[train]\nclip = -1", 1, "train.clip (line 2): clip=-1 cannot be; it must be more than 0, or 0 for no clipping"),
        ("[checkpoint]\nevery = 100\nkeep_every = 250", 1, "checkpoint.keep_every (line 3): keep_every=250 is no multiple of every=100: other steps are not saved; try 200 or 300"),
        ("[comm]\ncompression = \"topk:0\"", 2, "comm.compression (line 2): compression=topk:0 cannot be; it must be more than 0 and at most 1, as in topk:0.01"),
        ("[comm]\ncompression = \"topk:-0.1\"", 2, "comm.compression (line 2): compression=topk:-0.1 cannot be; it must be more than 0 and at most 1, as in topk:0.01"),
        ("[comm]\ncompression = \"topk:inf\"", 2, "comm.compression (line 2): compression=topk:inf cannot be; it must be more than 0 and at most 1, as in topk:0.01"),
        ("[comm]\ncompression = \"topk:nan\"", 2, "comm.compression (line 2): compression=topk:NaN cannot be; it must be more than 0 and at most 1, as in topk:0.01"),
        ("[comm]\ncompression = \"topk:5\"", 2, "comm.compression (line 2): topk:5 is more than the whole gradient; 5 percent is topk:0.05"),
        ("[comm]\ncompression = \"int8\"\ncompression_warmup = 9", 2, "comm.compression_warmup (line 3): compression_warmup=9, but int8 has no warm-up; leave it out, or send the largest elements only, as in compression = \"topk:0.01\""),
        ("[comm]\ncompression = \"int8\"\n[precision]\ngradients = \"bf16\"", 2, "precision.gradients (line 4): compression=int8 is of gradients in f32, but gradients=bf16; leave one of them out: in bf16 they travel in two bytes as it is"),
        ("[comm]\ncompression = \"int8\"\n[model]\nvocab = 257\n[layout]\ntensor = 2\nzero = 1", 4, "comm.compression (line 2): compression=int8 with zero=1 takes shares of one size, but tensor=2 does not divide vocab=257; take vocab=258, or compression=bf16, or zero=0"),
        ("[comm]\ntimeout_s = 0", 2, "comm.timeout_s (line 2): timeout_s=0 cannot be; it must be more than 0"),
        ("name = \"a/b\"", 1, "name (line 1): \"a/b\" cannot be the name of a folder; take letters, digits, - and _"),
    ];
    for (text, ranks, expected) in cases {
        assert_eq!(said(text, &[], ranks), [expected], "{text}");
    }
}

/// On `ranks` ranks, of 4 layers of 4 heads, an inner width of 512, 128 tokens, and 32 samples a step.
#[test]
fn of_layouts() {
    #[rustfmt::skip]
    let cases = [
        // Ranks.
        ("data = 4", 2, "layout.data (line 2): data=4 takes 4 ranks, but 2 ranks are started; start with --ranks 4, or leave data out"),
        ("data = 1", 2, "layout.data (line 2): data=1 takes 1 rank, but 2 ranks are started; start with --ranks 1, or leave data out"),
        ("data = 2\ntensor = 2", 2, "layout.data (line 2): data=2 × tensor=2 takes 4 ranks, but 2 ranks are started; start with --ranks 4, or leave data out"),
        ("data = 2\ntensor = 2", 1, "layout.data (line 2): data=2 × tensor=2 takes 4 ranks, but 1 rank is started; start with --ranks 4"),
        ("tensor = 2", 1, "layout.tensor (line 2): tensor=2 takes 2 ranks, but 1 rank is started; start with --ranks 2"),
        ("context = 2\npipe = 2", 2, "layout.context (line 2): context=2 × pipe=2 takes 4 ranks, but 2 ranks are started; start with --ranks 4"),
        ("pipe = 2", 3, "layout.pipe (line 2): pipe=2 takes 2 ranks, but 3 ranks are started; start with --ranks 2 or 4"),
        ("tensor = 0", 1, "layout.tensor (line 2): tensor=0 cannot be; it must be at least 1"),
        ("expert = 0", 1, "layout.expert (line 2): expert=0 cannot be; it must be at least 1"),
        ("pipe = 2\nchunks = 0", 2, "layout.chunks (line 3): chunks=0 cannot be; it must be at least 1"),
        // ZeRO.
        ("zero = 4", 2, "layout.zero (line 2): zero=4 cannot be; ZeRO has the stages 0, 1, 2 and 3"),
        ("shard = 2", 2, "layout.shard (line 2): shard=2, but zero=0 cuts nothing; say zero = 1, 2 or 3, or leave it out"),
        ("zero = 1\nshard = 0", 2, "layout.shard (line 3): shard=0 cannot be; it must be at least 1"),
        ("zero = 2\nshard = 3", 4, "layout.shard (line 3): shard=3 does not divide data × context = 4; try 2 or 4"),
        ("zero = 3\nshard = 8", 4, "layout.shard (line 3): shard=8 does not divide data × context = 4; try 4"),
        // The tensor axis.
        ("tensor = 8", 8, "layout.tensor (line 2): tensor=8 does not divide heads=4; try 4"),
        ("tensor = 4\n[model]\nffn = 510", 4, "layout.tensor (line 2): tensor=4 does not divide ffn=510; try 2"),
        ("tensor = 4\n[model]\nheads = 12\nhead_dim = 8\nkv_heads = 6", 4, "layout.tensor (line 2): tensor=4 and kv_heads=6: neither divides the other; try 2"),
        ("tensor = 128\n[model]\nheads = 128", 128, "layout.tensor (line 2): tensor=128 is more than vocab=64; say at most 64"),
        ("tensor = 2\nsequence = true\n[data]\nseq = 33\n[train]\nmicro_batch = 1", 2, "layout.sequence (line 3): sequence=true, but tensor=2 does not divide the 33 tokens of a rank's micro-batch; try micro_batch=2, or sequence=false"),
        // What is wrong by itself is not also wrong to cut.
        ("tensor = 4\n[model]\nheads = 6", 4, "model.heads (line 4): heads=6 does not divide dim=128; try 4 or 8"),
        // The context axis.
        ("context = 2\n[data]\nseq = 126", 2, "layout.context (line 2): seq=126 is no multiple of 4: a ring of 2 cuts it in 4; try 124 or 128"),
        ("context = 4\ncontext_kind = \"ulysses\"\n[data]\nseq = 126", 4, "layout.context (line 2): seq=126 is no multiple of 4: ulysses cuts it in 4; try 124 or 128"),
        ("context = 4\ncontext_kind = \"both\"\n[data]\nseq = 126", 4, "layout.context (line 2): seq=126 is no multiple of 4: ulysses=2 in a ring of 2 cuts it in 4; try 124 or 128"),
        ("context = 8\ncontext_kind = \"ulysses\"", 8, "layout.context (line 2): context=8 does not divide heads=4, which ulysses deals out; try 4, or ring"),
        ("context = 4\ncontext_kind = \"ulysses\"\ntensor = 2", 8, "layout.context (line 2): context=4 does not divide heads=2, which ulysses deals out (tensor=2 has cut them); try 2, or ring"),
        ("context_kind = \"rings\"", 2, "layout.context_kind (line 2): \"rings\" is none of \"ring\", \"ulysses\", \"both\"; did you mean \"ring\"?"),
        // Stages.
        ("pipe = 8", 8, "layout.pipe (line 2): pipe=8 stages are more than layers=4; every stage has a layer at least: take at most 4"),
        ("pipe = 4\nchunks = 2", 4, "layout.pipe (line 2): pipe=4 × chunks=2 = 8 stages are more than layers=4; every stage has a layer at least: take at most 4"),
        ("pipe = 2\nschedule = \"interleaved\"\n[train]\nglobal_batch = 12\nmicro_batch = 4", 2, "layout.schedule (line 3): interleaved takes micro-batches in rounds of pipe=2, and a step has 3; try global_batch=8 or 16"),
        ("pipe = 2\nschedule = \"gpipe\"\nchunks = 2", 2, "layout.schedule (line 3): schedule=gpipe has one stage per rank, not chunks=2; leave chunks out, or say schedule = \"interleaved\""),
        ("schedule = \"zb\"", 2, "layout.schedule (line 2): \"zb\" is none of \"gpipe\", \"1f1b\", \"interleaved\", \"zb-h1\", \"zb-h2\"; write one of \"gpipe\", \"1f1b\", \"interleaved\", \"zb-h1\", \"zb-h2\""),
        // Experts.
        ("expert = 2", 2, "layout.expert (line 2): expert=2, but the model has no experts; leave it out, or say family = \"moe\""),
        ("expert = 3\n[model]\nfamily = \"moe\"\nexperts = 6", 4, "layout.expert (line 2): expert=3 does not divide data × context = 4; try 2"),
        ("expert = 4\n[model]\nfamily = \"moe\"\nexperts = 6", 4, "layout.expert (line 2): expert=4 does not divide experts=6; try 2"),
        ("context = 2\n[model]\nfamily = \"moe\"\ncapacity = 1.5", 2, "layout.context (line 2): context=2 cuts sequences, and with capacity which tokens are dropped would depend on it; leave capacity out (dropless)"),
    ];
    for (text, ranks, expected) in cases {
        assert_eq!(said(&format!("[layout]\n{text}"), &[], ranks), [expected], "{text}");
    }
}

#[test]
fn of_the_command_line() {
    #[rustfmt::skip]
    let cases = [
        ("train.lr=fast", "train.lr (--set): fast is text; write a number such as 0.1 or 3e-4"),
        ("train.lrr=1", "train.lrr (--set): no such key; did you mean train.lr?"),
        ("lr=1", "lr (--set): no such key; did you mean train.lr?"),
        ("model.heads=6", "model.heads (--set): heads=6 does not divide dim=128; try 4 or 8"),
        ("train.lr", "--set: `train.lr` has no `=`; write it as --set train.lr=3e-4"),
    ];
    for (set, expected) in cases {
        assert_eq!(said("", &[set], 1), [expected], "{set}");
    }
}

#[test]
fn all_at_once_in_the_order_of_the_file() {
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
        "train.lr (line 3): \"fast\" is text; write a number such as 0.1 or 3e-4",
        // Not a word about warmup=2000 and steps=1000: `stpes` was meant to be the steps.
        "train.stpes (line 4): no such key; did you mean train.steps?",
        "model.heads (line 7): heads=6 does not divide dim=128; try 4 or 8",
        "modle (line 9): no such section; did you mean [model]?",
        "layout.data (line 12): data=3 × pipe=2 takes 6 ranks, but 2 ranks are started; start with --ranks 6, or leave data out",
        "layout.data (line 12): global_batch=32 is not a multiple of data=3; try 30 or 33",
        "train.clip (--set): clip=-1 cannot be; it must be more than 0, or 0 for no clipping",
    ];
    assert_eq!(said(text, &["train.clip=-1"], 2), expected);
}

#[test]
fn vocabulary_that_nobody_knows() {
    let mistakes = Plan::resolve(&Config::default(), &Environment::one_host(1, 1)).unwrap_err();
    let said: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        ["model.vocab: vocab is not given, and the data does not say it; give model.vocab"]
    );
}

#[test]
fn text_that_is_not_toml() {
    // Every broken line is named; nothing is said about what may have been meant by the rest.
    let said = said("[train]\nlr = \nsteps = 0\nsteps = 3\n[model\n", &[], 1);
    let lines: Vec<&str> = said.iter().map(|text| text.split(':').next().unwrap()).collect();
    assert_eq!(lines, ["line 2", "line 4", "line 5"], "{said:#?}");
    assert!(said.iter().all(|text| text.contains("this is not TOML")), "{said:#?}");
}

#[test]
fn numbers_out_of_bounds_are_mistakes_not_overflows() {
    let sizes = [
        "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "experts", "top_k",
    ];
    for name in sizes {
        for value in ["0", "9223372036854775807"] {
            let text = format!("[model]\nfamily = \"moe\"\n{name} = {value}");
            assert!(!said(&text, &[], 1).is_empty(), "{text}");
        }
    }
    for name in ["global_batch", "micro_batch", "steps", "threads", "log_every"] {
        let text = format!("[train]\n{name} = 9223372036854775807");
        assert!(!said(&text, &[], 2).is_empty(), "{text}");
    }
    let degrees =
        ["data", "shard", "tensor", "context", "pipe", "pipe = 2\nchunks", "expert", "zero"];
    for name in degrees {
        for kind in ["ring", "ulysses", "both"] {
            // The second is as much as is ever taken for meant.
            for value in ["9223372036854775807", "1000000000"] {
                let kind = format!("context_kind = \"{kind}\"");
                let text = format!("[layout]\n{kind}\n{name} = {value}");
                assert!(!said(&text, &[], 2).is_empty(), "{text}");
            }
        }
    }
}

#[test]
fn any_beginning_of_a_file_is_read_or_refused() {
    let text = "name = \"ä\"\n[model]\nrope_scaling = { factor = 8.0 }\nheads = 6\n[train]\nbetas = [0.9, 0.95]\n";
    for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let config = Config::parse(&text[..end], &[]);
        // No vocabulary is known, so that there is always something to say.
        assert!(Plan::resolve(&config, &Environment::one_host(1, 1)).is_err(), "{}", &text[..end]);
    }
}
