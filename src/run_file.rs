//! From a run file to a plan, and the folder of a run.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use lockstep_data::{Options, Source};
use lockstep_plan::{Config, ConfigError, Environment, Plan, refit};

/// What was typed, and the data it names.
pub struct RunFile {
    pub config: Config,
    pub source: Source,
}

impl RunFile {
    /// Reads a run file, with `section.key=value` laid over it.
    pub fn read(path: &Path, sets: &[String]) -> anyhow::Result<RunFile> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let mut config = Config::parse(&text, sets);
        if config.name.is_none() {
            config.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        }
        RunFile::of(config).with_context(|| format!("{}", path.display()))
    }

    /// What was typed, and the vocabulary of its data where that is here: a plan can be made where the data is not.
    pub fn typed(path: &Path, sets: &[String]) -> anyhow::Result<(Config, Option<usize>)> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let mut config = Config::parse(&text, sets);
        if config.name.is_none() {
            config.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        }
        let options = Options { held_out: config.held_out() };
        let vocab = Source::open(config.source(), &options).ok().map(|source| source.vocab());
        Ok((config, vocab))
    }

    /// Opens the data.
    pub fn of(config: Config) -> anyhow::Result<RunFile> {
        let options = Options { held_out: config.held_out() };
        match Source::open(config.source(), &options) {
            Ok(source) => Ok(RunFile { config, source }),
            Err(error) => {
                // What else is wrong is told too. Any model has a vocabulary of one: that the data's is not
                // known is no second mistake.
                let around = Environment::one_host(config.ranks(), 1).with_vocab(1);
                let mut told = vec![format!("data.source={:?}: {error}", config.source())];
                if let Err(mistakes) = Plan::resolve(&config, &around) {
                    told.extend(mistakes.iter().map(ConfigError::to_string));
                }
                bail!("{}", list(&told))
            }
        }
    }

    /// What it means on that many ranks of this machine.
    pub fn plan(&self, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        self.plan_of(&self.config, ranks, local_ranks)
    }

    /// What a plan for so many ranks, that many of them on this machine, depends on besides.
    pub fn around(&self, ranks: usize, local_ranks: usize) -> Environment {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Environment {
            ranks,
            local_ranks,
            cores,
            offloaded_comm: false,
            data_vocab: Some(self.source.vocab()),
        }
    }

    /// What it means on that many ranks, with as much of its layout as they allow.
    pub fn plan_within(&self, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        match refit(&self.config, &self.around(ranks, local_ranks)) {
            Some(config) => self.plan_of(&config, config.ranks(), local_ranks),
            // The typed layout's mistakes are what is to be told.
            None => self.plan(ranks, local_ranks),
        }
    }

    /// What the same run means with another layout, as threads or processes of this machine.
    pub fn plan_with(&self, layout: &str) -> anyhow::Result<Plan> {
        let config = self.config.with_layout(layout);
        self.plan_of(&config, config.ranks(), config.ranks())
    }

    fn plan_of(&self, config: &Config, ranks: usize, local_ranks: usize) -> anyhow::Result<Plan> {
        Plan::resolve(config, &self.around(ranks, local_ranks)).map_err(|mistakes| {
            let told: Vec<String> = mistakes.iter().map(ConfigError::to_string).collect();
            anyhow::anyhow!("{}", list(&told))
        })
    }
}

fn list(mistakes: &[String]) -> String {
    match mistakes {
        [one] => one.clone(),
        many => format!("{} errors:\n  {}", many.len(), many.join("\n  ")),
    }
}

/// `runs/NAME`, empty. A run that was there before is kept under another name: which.
pub fn fresh_folder(root: &Path, name: &str) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
    let folder = root.join(name);
    let used = ["metrics.jsonl", "checkpoints"].iter().any(|part| folder.join(part).exists());
    let mut moved = None;
    if used {
        let aside = (1..)
            .map(|number| root.join(format!("{name}.{number}")))
            .find(|path| !path.exists())
            .context("no free name for the run that is there")?;
        std::fs::rename(&folder, &aside)
            .with_context(|| format!("cannot move {} aside", folder.display()))?;
        moved = Some(aside);
    }
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    Ok((folder, moved))
}
