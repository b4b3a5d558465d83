//! From what was typed to what it means. Every mistake of meaning is found here, all of them at once; what
//! could not be read in the first place is returned with them.

mod data;
mod findings;
mod latent;
mod layout;
mod model;
pub(crate) mod near;
mod rest;
mod train;

use crate::config::Config;
use crate::error::ConfigError;
use crate::model::Shape;
use crate::placement;
use crate::plan::Plan;
use findings::Findings;

/// What a plan depends on besides the run file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Environment {
    /// Ranks that are started.
    pub ranks: usize,
    /// Of these, the ones on one host.
    pub local_ranks: usize,
    /// Cores of a host.
    pub cores: usize,
    /// Vocabulary of the data, where it is known.
    pub data_vocab: Option<usize>,
}

impl Environment {
    /// Ranks on one machine with so many cores.
    pub fn one_host(ranks: usize, cores: usize) -> Environment {
        Environment { ranks, local_ranks: ranks, cores, data_vocab: None }
    }

    /// The same with data of a known vocabulary.
    pub fn with_vocab(self, vocab: usize) -> Environment {
        Environment { data_vocab: Some(vocab), ..self }
    }
}

impl Plan {
    /// What `config` means here, or everything that is wrong with it, in the order of the file.
    pub fn resolve(config: &Config, around: &Environment) -> Result<Plan, Vec<ConfigError>> {
        let mut findings = Findings::new(config);
        if !findings.readable() {
            return Err(findings.all());
        }
        let layout = layout::layout(&mut findings, around);
        let before = findings.count();
        let model = model::shape(&mut findings, around.data_vocab);
        let sound = findings.count() == before;
        let data = data::data(&mut findings, model.as_ref());
        let train = train::train(&mut findings, &data, layout.data, around);
        // What a wrong model would be cut into tells nothing.
        if let Some(shape) = model.as_ref().filter(|_| sound) {
            layout::fits(&mut findings, &layout, shape, &data, &train);
        }
        let name = rest::name(&mut findings);
        let precision = rest::precision(&mut findings);
        let comm = rest::comm(&mut findings, train.steps);
        if let Some(shape) = model.as_ref().filter(|_| findings.is_empty()) {
            rest::compressible(&mut findings, &comm, &layout, shape.vocab);
        }
        let checkpoint = rest::checkpoint(&mut findings);
        let (Some(model), true) = (model, findings.is_empty()) else { return Err(findings.all()) };
        let mut plan = Plan {
            name,
            ranks: around.ranks,
            model,
            data,
            train,
            layout,
            precision,
            comm,
            checkpoint,
        };
        if config.layout.placement.is_none() {
            let said = placement::said(&plan);
            plan.layout.order = placement::order(&plan.mesh(), around.local_ranks.max(1), &said);
        }
        Ok(plan)
    }
}

/// The model alone.
pub(crate) fn shape(config: &Config, data_vocab: Option<usize>) -> Result<Shape, Vec<ConfigError>> {
    let mut findings = Findings::new(config);
    match model::shape(&mut findings, data_vocab) {
        Some(shape) if findings.is_empty() => Ok(shape),
        _ => Err(findings.all()),
    }
}
