//! Tests of the binary: `lockstep plan`, and how `lockstep train` uses a plan.

mod program;

use std::path::PathBuf;
use std::process::Output;

fn lockstep(args: &[&str]) -> Output {
    program::lockstep().args(args).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("lockstep-plan-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

const RUN: &str = "name = \"run\"\n[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
                   [layout]\ndata = 4\nzero = 1\ntensor = 4\nsequence = true\npipe = 4\n[precision]\ncompute = \"bf16\"\n";

#[test]
fn predicts_the_cost_of_a_run_file() {
    let folder = folder("run-file");
    let (run, page) = (folder.join("run.toml"), folder.join("page.html"));
    std::fs::write(&run, RUN).unwrap();
    let args = ["plan", run.to_str().unwrap(), "--cluster", "examples/clusters/h100-64.toml"];
    let text = lockstep(&[&args[..], &["--html", page.to_str().unwrap()]].concat());
    assert!(text.status.success(), "{}", err(&text));
    let shown = out(&text);
    for part in ["memory per rank", "NVSwitch", "pipeline timeline", "MFU", "fits: "] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));

    let json = lockstep(&[&args[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["fits"], true);
    assert!(json["step_s"].as_f64().unwrap() > 0.0 && json["mfu"].as_f64().unwrap() < 1.0);
    assert_eq!(json["memory"].as_array().unwrap().len(), 4);
    assert!(json["memory"][0]["parameters"].as_f64().unwrap() > 0.0);
    let traffic = json["traffic"].as_array().unwrap();
    assert!(
        traffic.iter().any(|row| row["kind"] == "tensor" && row["link"] == "NVSwitch"),
        "{traffic:?}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn searches_layouts_for_a_preset() {
    let output =
        lockstep(&["plan", "--preset", "llama3-8b", "--cluster", "h100-16", "--advice", "--json"]);
    assert!(output.status.success(), "{}", err(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = json["found"].as_array().unwrap();
    assert_eq!(found.len(), 5);
    assert_eq!(found[0]["step_s"], json["step_s"]);
    assert!(found.iter().all(|one| one["fits"] == true && one["ranks"] == 16));
    assert!(!json["reasons"].as_array().unwrap().is_empty());
    let steps = json["advice"].as_array().unwrap();
    assert_eq!(steps[0]["technique"], "data parallel");
}

#[test]
fn errors_suggest_a_fix() {
    let preset =
        |more: &[&'static str]| [&["plan", "--preset", "llama3-8b", "--cluster"], more].concat();
    let fp8_f32 = preset(&["h100-8", "--fp8", "--set", "precision.compute=f32"]);
    let cases: [(&[&str], &str); 10] = [
        (&preset(&["h100-0"]), "`h100-0`: ranks must be at least 1 (got 0)"),
        (&preset(&["h100-8", "--price", "nan"]), "use a number of dollars, e.g. 2.5"),
        (&preset(&["h100-8", "--price=-1"]), "use a number of dollars, e.g. 2.5"),
        (&preset(&["a100-80-8", "--fp8"]), "--fp8: A100-80 has no FP8; remove --fp8"),
        (&fp8_f32, "--fp8: this run computes in f32; use --set precision.compute=bf16"),
        (&["plan", "--preset", "llama3-8b", "--cluster", "h10-8"], "did you mean `h100-8`?"),
        (&["plan", "--preset", "lama3-8b", "--cluster", "h100-8"], "did you mean `llama3-8b`?"),
        (&["plan", "--preset", "llama3-405b", "--cluster", "h100-8"], "no offload mode is enough"),
        (&["plan", "examples/grammar.toml", "--cluster", "no.toml"], "cannot read no.toml"),
        (
            &["plan", "examples/grammar.toml", "--cluster", "h100-8", "--ranks", "16"],
            "16 ranks are more than cluster h100-8 has (8)",
        ),
    ];
    for (args, part) in cases {
        let output = lockstep(args);
        assert!(
            !output.status.success() && err(&output).contains(part),
            "{args:?}: {}",
            err(&output)
        );
    }
}

/// A machine with one GPU that has more ranks shares it among them.
#[test]
fn ranks_share_the_only_gpu_of_a_machine() {
    let machine = "crates/sim/tests/measured/h200.toml";
    let output = lockstep(&["plan", "examples/grammar.toml", "--cluster", machine]);
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    assert!(
        text.contains("one H200, shared by 2 ranks") && text.contains("device memory"),
        "{text}"
    );
}

/// A search offloads if nothing fits without, and only then; a mode of the run is kept.
#[test]
fn a_search_offloads_what_does_not_fit() {
    let plan = |more: &[&'static str]| {
        let output = lockstep(&[&["plan", "--preset", "llama3-8b", "--cluster"], more].concat());
        assert!(output.status.success(), "{more:?}: {}", err(&output));
        out(&output)
    };
    let alone = plan(&["h100-1"]);
    assert!(alone.contains("offload=optimizer: nothing fits without it"), "{alone}");
    assert!(alone.contains("offloaded to host memory"), "{alone}");
    assert!(!plan(&["h100-8"]).contains("offload"), "8 GPUs have enough memory");
    let set = plan(&["h100-8", "--set", "layout.offload=all"]);
    assert!(set.contains("offload=all") && !set.contains("nothing fits"), "{set}");
}

#[test]
fn a_plan_that_does_not_fit_is_printed_and_fails() {
    let folder = folder("large");
    let run = folder.join("run.toml");
    std::fs::write(&run, RUN.replace("llama3-8b", "llama3-405b").replace("data = 4", "data = 1"))
        .unwrap();
    let output = lockstep(&["plan", run.to_str().unwrap(), "--cluster", "h100-16"]);
    assert!(!output.status.success());
    assert!(out(&output).contains("does not fit: "), "{}{}", out(&output), err(&output));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn latent_attention_is_for_planning_only() {
    let planned = lockstep(&["plan", "--preset", "deepseek-v2-lite", "--cluster", "h100-64"]);
    assert!(planned.status.success(), "{}", err(&planned));
    assert!(out(&planned).contains("deepseek-v2-lite"), "{}", out(&planned));
    let folder = folder("planned-only");
    let run = folder.join("run.toml");
    let small = "[model]\nfamily = \"moe\"\ndim = 64\nheads = 2\nlayers = 2\nexperts = 4\nkv_lora_rank = 16\n";
    std::fs::write(&run, small).unwrap();
    for command in ["train", "verify"] {
        let output = lockstep(&[command, run.to_str().unwrap()]);
        assert!(!output.status.success());
        let error = err(&output);
        assert!(error.contains("kv_lora_rank") && error.contains("for planning only"), "{error}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// A model that is too large for any machine is rejected before a rank starts.
#[test]
fn train_rejects_models_that_do_not_fit() {
    let folder = folder("too-large");
    let run = folder.join("run.toml");
    let huge = "[model]\nfamily = \"llama\"\ndim = 65536\nlayers = 200\nheads = 64\nseq = 64\n[train]\nglobal_batch = 1\n";
    std::fs::write(&run, huge).unwrap();
    let runs = folder.join("runs");
    let output = lockstep(&["train", run.to_str().unwrap(), "--runs", runs.to_str().unwrap()]);
    assert!(!output.status.success());
    assert!(err(&output).contains("but this machine has"), "{}", err(&output));
    assert!(!runs.exists(), "no folder was created");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_example_of_two_hosts_fits_and_a_slow_tensor_axis_is_a_warning() {
    let args = ["plan", "deploy/two-hosts/run.toml", "--cluster", "a100-ethernet-16", "--json"];
    let plan = |more: &[&str]| -> serde_json::Value {
        let output = lockstep(&[&args[..], more].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", err(&output)))
    };
    let example = plan(&[]);
    assert_eq!((&example["fits"], example["warnings"].is_null()), (&true.into(), true));
    let tensor =
        plan(&["--set", "layout.data=2", "--set", "layout.tensor=8", "--set", "layout.zero=1"]);
    let warning = tensor["warnings"][0].as_str().unwrap();
    assert!(warning.starts_with("tensor parallelism uses PCIe (20.0 GB/s per rank)"), "{warning}");
}
