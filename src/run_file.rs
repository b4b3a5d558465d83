//! Reads a run file, resolves its plan, and creates the run's folder.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use lockstep_ckpt::RunLock;
use lockstep_data::{Options, Source};
use lockstep_plan::config::Model;
use lockstep_plan::model::Shape;
use lockstep_plan::{Config, ConfigError, Environment, Plan, refit};

use crate::commands::device;

/// A run's configuration and its opened data.
pub struct RunFile {
    pub config: Config,
    pub source: Source,
}

impl RunFile {
    /// Reads a run file, applies the overrides (`section.key=value`) and opens the data.
    pub fn read(path: &Path, overrides: &[String]) -> anyhow::Result<RunFile> {
        let config = parse(path, overrides)?;
        RunFile::open(config).with_context(|| format!("{}", path.display()))
    }

    /// Reads a run file whose run starts from a checkpoint. Keys that `[model]` does not set are those of the checkpoint.
    /// `checkpoint` returns its path, or that of its run, for the name of the run.
    pub fn read_with_base(
        path: &Path,
        overrides: &[String],
        checkpoint: impl Fn(&str) -> Option<PathBuf>,
    ) -> anyhow::Result<RunFile> {
        let mut config = parse(path, overrides)?;
        let base = config.name.as_deref().and_then(checkpoint);
        if let Some(shape) = base.and_then(|base| model_of(&base)) {
            config.base = Model::of(&shape);
        }
        RunFile::open(config).with_context(|| format!("{}", path.display()))
    }

    /// Reads a run file whose data may be missing, and the data's vocabulary size if it is not: planning does not need
    /// the data.
    pub fn read_without_data(
        path: &Path,
        overrides: &[String],
    ) -> anyhow::Result<(Config, Option<usize>)> {
        let config = parse(path, overrides)?;
        let vocab = open_source(&config).ok().map(|source| source.vocab());
        Ok((config, vocab))
    }

    /// Opens the data of a configuration. If that fails, reports it together with the errors of the configuration.
    pub fn open(config: Config) -> anyhow::Result<RunFile> {
        match open_source(&config) {
            Ok(source) => Ok(RunFile { config, source }),
            Err(error) => {
                // A vocabulary of 1 fits every model, so the missing data adds no second error.
                let environment = Environment::one_host(config.ranks(), 1).with_vocab(1);
                let mut messages = vec![format!("data.source={:?}: {error}", config.source())];
                if let Err(errors) = Plan::resolve(&config, &environment) {
                    messages.extend(errors.iter().map(ConfigError::to_string));
                }
                bail!("{}", join(&messages))
            }
        }
    }

    /// Resolves the plan for `ranks` ranks, at most `local_ranks` of them on one host.
    pub fn plan(&self, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        self.resolve(&self.config, ranks, local_ranks)
    }

    /// The inputs of a plan that are not in the configuration.
    pub fn environment(&self, ranks: usize, local_ranks: usize) -> Environment {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Environment {
            ranks,
            local_ranks,
            cores,
            offloaded_comm: false,
            gpu: device::has_usable_gpu(),
            data_vocab: Some(self.source.vocab()),
        }
    }

    /// Resolves the plan with the best layout for at most `ranks` ranks.
    pub fn refit_plan(&self, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        match refit(&self.config, &self.environment(ranks, local_ranks)) {
            Some(config) => self.resolve(&config, config.ranks(), local_ranks),
            // Reports the errors of the configured layout.
            None => self.plan(ranks, local_ranks),
        }
    }

    /// Resolves the plan with another layout, all ranks on this host.
    pub fn plan_with_layout(&self, layout: &str) -> anyhow::Result<Plan> {
        let config = self.config.with_layout(layout);
        self.resolve(&config, config.ranks(), config.ranks())
    }

    fn resolve(&self, config: &Config, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        Plan::resolve(config, &self.environment(ranks, local_ranks)).map_err(|errors| {
            let messages: Vec<String> = errors.iter().map(ConfigError::to_string).collect();
            anyhow::anyhow!("{}", join(&messages))
        })
    }
}

fn parse(path: &Path, overrides: &[String]) -> anyhow::Result<Config> {
    let text = read_text(path)?;
    let mut config = Config::parse(&text, overrides);
    if config.name.is_none() {
        config.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    }
    Ok(config)
}

/// The model of a checkpoint, or of the newest valid checkpoint of a run. Problems are reported by the ranks that load
/// the weights.
fn model_of(path: &Path) -> Option<Shape> {
    let open = |dir: &Path| Some(lockstep_ckpt::load(dir).ok()?.head().shape.clone());
    if lockstep_ckpt::is_checkpoint(path) {
        return open(path);
    }
    let steps = lockstep_ckpt::steps(path).into_iter();
    steps.map(|step| lockstep_ckpt::folder(path, step)).find_map(|dir| open(&dir))
}

/// Largest run file or cluster file.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// Reads a run file or a cluster file. It may be a pipe, such as `<(command)`.
pub fn read_text(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let opened = std::fs::File::open(path);
    opened
        .and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text))
        .with_context(|| format!("cannot read {}", path.display()))?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        bail!("{} is larger than {} MiB", path.display(), MAX_TEXT_BYTES >> 20);
    }
    Ok(text)
}

fn open_source(config: &Config) -> lockstep_data::Result<Source> {
    Source::open(config.source(), &Options { held_out: config.held_out() })
}

fn join(messages: &[String]) -> String {
    match messages {
        [one] => one.clone(),
        many => format!("{} errors:\n  {}", many.len(), many.join("\n  ")),
    }
}

/// Creates an empty folder `ROOT/NAME` and locks it. An existing run is renamed to `NAME.1`, `NAME.2`, …, unless it is
/// in use; its new path is returned as well.
pub fn create_run_folder(root: &Path, name: &str) -> anyhow::Result<(RunLock, Option<PathBuf>)> {
    let folder = root.join(name);
    let lock = RunLock::take(&folder)?;
    if !["metrics.jsonl", "checkpoints"].iter().any(|part| folder.join(part).exists()) {
        return Ok((lock, None));
    }
    let target = (1..)
        .map(|number| root.join(format!("{name}.{number}")))
        .find(|path| !path.exists())
        .context("no free name for the existing run")?;
    std::fs::rename(&folder, &target)
        .with_context(|| format!("cannot rename {} to {}", folder.display(), target.display()))?;
    // The lock moved with the folder.
    std::fs::remove_file(target.join("lock")).context("cannot unlock the renamed run")?;
    Ok((RunLock::take(&folder)?, Some(target)))
}
