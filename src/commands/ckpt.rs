//! `lockstep ckpt`: lists, inspects, checks and compares checkpoints.

use super::progress::Quiet;
use anyhow::bail;
use lockstep_ckpt::{
    Checkpoint, Manifest, TensorKind, diff, find, folder, is_checkpoint, load, steps,
};
use lockstep_plan::Plan;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List the checkpoints of a run: step, size, age, and whether files are missing (`check` also reads the data)
    List {
        /// Run folder
        run: PathBuf,
        /// Print one JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Show the contents of a checkpoint: plan, files, tensors and their slices
    Inspect {
        /// Run folder (uses its newest checkpoint) or checkpoint
        checkpoint: PathBuf,
        /// Show only tensors whose names contain TEXT, with their slices [default: all tensors]
        #[arg(long, value_name = "TEXT")]
        tensor: Option<String>,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Verify the checksums of all data; exits with an error if a checkpoint is corrupt
    Check {
        /// Run folder (checks all its checkpoints) or checkpoint
        checkpoint: PathBuf,
        /// Print one JSON object per checkpoint
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        quiet: Quiet,
    },
    /// Compare the tensors of two checkpoints of any layout; exits with an error if they differ
    Diff {
        /// First run folder or checkpoint
        one: PathBuf,
        /// Second run folder or checkpoint
        other: PathBuf,
        /// Maximum number of differing tensors to show
        #[arg(long, default_value_t = 10, value_name = "N")]
        limit: usize,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        quiet: Quiet,
    },
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List { run, json } => list(&run, json),
        Command::Inspect { checkpoint, tensor, json } => {
            inspect(&checkpoint, tensor.as_deref(), json)
        }
        Command::Check { checkpoint, json, quiet } => check(&checkpoint, json, quiet),
        Command::Diff { one, other, limit, json, quiet } => {
            let _bar = quiet.spinner("diff");
            compare(&one, &other, limit, json)
        }
    }
}

/// The given checkpoint, or all checkpoints of a run, newest first.
fn checkpoints(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if is_checkpoint(path) {
        return Ok(vec![path.to_path_buf()]);
    }
    let found: Vec<PathBuf> = steps(path).into_iter().map(|step| folder(path, step)).collect();
    if found.is_empty() {
        return Err(lockstep_ckpt::Error::NotFound { path: path.to_path_buf() }.into());
    }
    Ok(found)
}

fn list(run: &Path, json: bool) -> anyhow::Result<ExitCode> {
    for dir in checkpoints(run)? {
        let written = std::fs::metadata(&dir).and_then(|found| found.modified()).ok();
        let age = written.and_then(|written| SystemTime::now().duration_since(written).ok());
        let age_s = age.map(|age| age.as_secs());
        match load(&dir) {
            Ok(checkpoint) => {
                let (manifest, step) = (checkpoint.manifest(), checkpoint.head().step);
                let (bytes, files) = (manifest.bytes(), manifest.files.len());
                if json {
                    let line = json!({"path": dir, "step": step, "bytes": bytes, "files": files,
                        "age_s": age_s, "ok": true});
                    println!("{line}");
                } else {
                    let (size, age) = (mib(bytes), format_age(age));
                    println!("{}  {size:>10}  {files:>3} file(s)  {age:>9} ago  ok", name(&dir));
                }
            }
            Err(error) if json => {
                let line =
                    json!({"path": dir, "age_s": age_s, "ok": false, "error": error.to_string()});
                println!("{line}");
            }
            Err(error) => println!("{}  corrupt: {error}", name(&dir)),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(path: &Path, tensor: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let checkpoint = load(&find(path)?)?;
    let manifest = checkpoint.manifest();
    if json {
        println!("{}", serde_json::to_string_pretty(manifest)?);
        return Ok(ExitCode::SUCCESS);
    }
    let head = checkpoint.head();
    println!("{}", checkpoint.dir().display());
    println!("  written by     {}, generation {}", manifest.program, head.generation);
    println!("  step           {}", head.step);
    println!(
        "  position       {} samples of {}, seed {}",
        head.position.samples,
        if head.position.data.is_empty() { "no data" } else { &head.position.data },
        head.position.seed
    );
    println!(
        "  model          {}, {} parameters",
        head.shape.family.name(),
        head.shape.param_count()
    );
    println!("  layout         {}", layout(manifest));
    for kind in TensorKind::ALL {
        let tensors = manifest.tensors.iter().filter(|at| at.kind == kind);
        let (count, pieces) =
            tensors.fold((0, 0), |(count, pieces), at| (count + 1, pieces + at.pieces.len()));
        if count > 0 {
            println!("  {:<14} {count} tensors in {pieces} pieces", kind.name());
        }
    }
    println!("files");
    for file in &manifest.files {
        println!("  {}  {:>10}  {} chunk(s)", file.name, mib(file.bytes), file.chunks.len());
    }
    println!("tensors");
    for at in &manifest.tensors {
        if !tensor.is_none_or(|text| at.named.name.contains(text)) {
            continue;
        }
        println!("  {} {} {:?}", at.kind, at.named.name, at.named.dims);
        if tensor.is_none() {
            continue;
        }
        for piece in &at.pieces {
            let runs: Vec<String> = piece
                .runs
                .iter()
                .map(|runs| match runs.count {
                    1 => format!("{}..{}", runs.start, runs.start + runs.len),
                    count => {
                        format!("{count} × {} from {} every {}", runs.len, runs.start, runs.stride)
                    }
                })
                .collect();
            let file = &manifest.files[piece.file].name;
            println!("    {file} at byte {}: {}", piece.at, runs.join(", "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The layout that the checkpoint was saved with.
fn layout(manifest: &Manifest) -> String {
    let plan: Option<Plan> = serde_json::from_value(manifest.head.plan.clone()).ok();
    let Some(plan) = plan else { return "none (imported weights)".into() };
    let layout = &plan.layout;
    let mut words = vec![format!("{} rank(s)", plan.ranks)];
    for (name, degree) in [
        ("data", layout.data),
        ("tensor", layout.tensor),
        ("context", layout.context),
        ("pipe", layout.pipe),
        ("expert", layout.expert),
    ] {
        if degree > 1 {
            words.push(format!("{name}={degree}"));
        }
    }
    if layout.zero > 0 {
        words.push(format!("zero={}", layout.zero));
    }
    words.join(" ")
}

fn check(path: &Path, json: bool, quiet: Quiet) -> anyhow::Result<ExitCode> {
    let mut ok = true;
    for dir in checkpoints(path)? {
        let errors: Vec<String> = match load(&dir) {
            Ok(checkpoint) => {
                let bar = quiet.bytes("check", Some(checkpoint.manifest().bytes()));
                checkpoint.check(|bytes| bar.inc(bytes)).iter().map(ToString::to_string).collect()
            }
            Err(error) => vec![error.to_string()],
        };
        ok &= errors.is_empty();
        if json {
            println!("{}", json!({"path": dir, "ok": errors.is_empty(), "errors": errors}));
        } else if errors.is_empty() {
            println!("{}  ok", dir.display());
        } else {
            println!("{}  corrupt", dir.display());
            errors.iter().for_each(|error| println!("  {error}"));
        }
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn compare(one: &Path, other: &Path, limit: usize, json: bool) -> anyhow::Result<ExitCode> {
    let (a, b): (Checkpoint, Checkpoint) = (load(&find(one)?)?, load(&find(other)?)?);
    if a.head().shape.param_count() != b.head().shape.param_count() {
        bail!(
            "the checkpoints are of different models: {} has {} parameters, {} has {}",
            a.dir().display(),
            a.head().shape.param_count(),
            b.dir().display(),
            b.head().shape.param_count()
        );
    }
    let mut shown = Vec::new();
    let mut count = 0;
    for found in diff(&a, &b) {
        let found = found?;
        count += 1;
        if shown.len() < limit {
            shown.push(found);
        }
    }
    let only_in_one: Vec<&str> = [TensorKind::First, TensorKind::Second]
        .into_iter()
        .filter(|kind| a.tensors(*kind).is_some() != b.tensors(*kind).is_some())
        .map(TensorKind::name)
        .collect();
    let same = count == 0 && only_in_one.is_empty();
    if json {
        let steps = [a.head().step, b.head().step];
        println!(
            "{}",
            json!({"steps": steps, "same": same, "differ": count, "only_in_one": only_in_one, "first": shown})
        );
    } else if same {
        println!("the checkpoints are identical");
    } else {
        for found in &shown {
            let max = found.max_abs.map_or("not finite".into(), |max| format!("{max:.3e}"));
            println!(
                "{} {}: {} of {} elements differ by at most {max}; the first is element {}: {} and {}",
                found.kind,
                found.name,
                found.elements,
                found.of,
                found.first.0,
                found.first.1,
                found.first.2
            );
        }
        if count > shown.len() {
            println!("and {} more tensors", count - shown.len());
        }
        only_in_one.iter().for_each(|kind| println!("only one checkpoint has {kind}"));
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn name(dir: &Path) -> String {
    dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into())
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn format_age(age: Option<Duration>) -> String {
    match age.map(|age| age.as_secs()) {
        None => "?".into(),
        Some(seconds @ 0..120) => format!("{seconds} s"),
        Some(seconds @ 120..7200) => format!("{} min", seconds / 60),
        Some(seconds @ 7200..172_800) => format!("{} h", seconds / 3600),
        Some(seconds) => format!("{} days", seconds / 86_400),
    }
}
