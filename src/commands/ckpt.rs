//! `lockstep ckpt`: checkpoints for people to look at.

use super::progress;
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
    act: Act,
}

#[derive(clap::Subcommand)]
enum Act {
    /// The checkpoints of a run: step, size, age, and whether files are missing (chunks are not read: see check)
    List {
        /// A run folder
        run: PathBuf,
        /// One JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// What is in a checkpoint: plan, files, tensors and their slices
    Inspect {
        /// A run folder (its newest checkpoint) or one checkpoint
        checkpoint: PathBuf,
        /// Only tensors whose name contains this
        #[arg(long, value_name = "TEXT")]
        tensor: Option<String>,
        /// The manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Hold every byte against its checksum; fails when one is wrong
    Check {
        /// A run folder (all its checkpoints) or one checkpoint
        checkpoint: PathBuf,
        /// One JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Which tensors of two checkpoints differ, whatever their layouts; fails when any does
    Diff {
        /// A run folder or a checkpoint
        one: PathBuf,
        /// A run folder or a checkpoint
        other: PathBuf,
        /// Tensors to show at most
        #[arg(long, default_value_t = 10)]
        most: usize,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.act {
        Act::List { run, json } => list(&run, json),
        Act::Inspect { checkpoint, tensor, json } => inspect(&checkpoint, tensor.as_deref(), json),
        Act::Check { checkpoint, json } => check(&checkpoint, json),
        Act::Diff { one, other, most, json } => compare(&one, &other, most, json),
    }
}

/// The named checkpoint, or all of a run, the newest first.
fn all(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
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
    for dir in all(run)? {
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
                    let (size, age) = (mib(bytes), told(age));
                    println!("{}  {size:>10}  {files:>3} file(s)  {age:>9} ago  ok", name(&dir));
                }
            }
            Err(error) if json => {
                let line =
                    json!({"path": dir, "age_s": age_s, "ok": false, "error": error.to_string()});
                println!("{line}");
            }
            Err(error) => println!("{}  broken: {error}", name(&dir)),
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
        if head.position.data.is_empty() { "nothing" } else { &head.position.data },
        head.position.seed
    );
    println!("  model          {:?}, {} parameters", head.shape.family, head.shape.param_count());
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

/// What the plan says of how the ranks shared the work.
fn layout(manifest: &Manifest) -> String {
    let plan: Option<Plan> = serde_json::from_value(manifest.head.plan.clone()).ok();
    let Some(plan) = plan else { return "none: weights from elsewhere".into() };
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

fn check(path: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let mut good = true;
    for dir in all(path)? {
        let errors: Vec<String> = match load(&dir) {
            Ok(checkpoint) => {
                let bar = progress::bytes("check", Some(checkpoint.manifest().bytes()));
                checkpoint.check(|bytes| bar.inc(bytes)).iter().map(ToString::to_string).collect()
            }
            Err(error) => vec![error.to_string()],
        };
        good &= errors.is_empty();
        if json {
            println!("{}", json!({"path": dir, "ok": errors.is_empty(), "errors": errors}));
        } else if errors.is_empty() {
            println!("{}  ok", dir.display());
        } else {
            println!("{}  broken", dir.display());
            errors.iter().for_each(|error| println!("  {error}"));
        }
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn compare(one: &Path, other: &Path, most: usize, json: bool) -> anyhow::Result<ExitCode> {
    let (a, b): (Checkpoint, Checkpoint) = (load(&find(one)?)?, load(&find(other)?)?);
    if a.head().shape.param_count() != b.head().shape.param_count() {
        bail!(
            "{} has {} parameters and {} has {}: two models",
            a.dir().display(),
            a.head().shape.param_count(),
            b.dir().display(),
            b.head().shape.param_count()
        );
    }
    let mut apart = Vec::new();
    let mut count = 0;
    for found in diff(&a, &b) {
        let found = found?;
        count += 1;
        if apart.len() < most {
            apart.push(found);
        }
    }
    let lonely: Vec<&str> = [TensorKind::First, TensorKind::Second]
        .into_iter()
        .filter(|kind| a.tensors(*kind).is_some() != b.tensors(*kind).is_some())
        .map(TensorKind::name)
        .collect();
    let same = count == 0 && lonely.is_empty();
    if json {
        let steps = [a.head().step, b.head().step];
        println!(
            "{}",
            json!({"steps": steps, "same": same, "differ": count, "only_in_one": lonely, "first": apart})
        );
    } else if same {
        println!("the same, to the bit");
    } else {
        for found in &apart {
            let max = found.max_abs.map_or("not finite".into(), |max| format!("{max:.3e}"));
            println!(
                "{} {}: {} of {} elements, at most {max} apart; the first is {}: {} and {}",
                found.kind,
                found.name,
                found.elements,
                found.of,
                found.first.0,
                found.first.1,
                found.first.2
            );
        }
        if count > apart.len() {
            println!("and {} more", count - apart.len());
        }
        lonely.iter().for_each(|kind| println!("only one of them has {kind}"));
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn name(dir: &Path) -> String {
    dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into())
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn told(age: Option<Duration>) -> String {
    match age.map(|age| age.as_secs()) {
        None => "?".into(),
        Some(seconds @ 0..120) => format!("{seconds} s"),
        Some(seconds @ 120..7200) => format!("{} min", seconds / 60),
        Some(seconds @ 7200..172_800) => format!("{} h", seconds / 3600),
        Some(seconds) => format!("{} days", seconds / 86_400),
    }
}
