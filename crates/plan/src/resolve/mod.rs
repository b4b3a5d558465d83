//! Resolves a `Config` to a `Plan`: fills in defaults and checks values against each other. All errors are reported
//! together, including those of parsing.

mod checker;
mod data;
mod fp8;
mod latent;
mod layout;
mod limits;
mod model;
pub(crate) mod near;
mod rest;
mod train;

use crate::config::{Config, DeviceKind};
use crate::error::ConfigError;
use crate::model::Shape;
use crate::placement;
use crate::plan::{Device, Overlap, Plan};
use checker::Checker;
use lockstep_types::DeviceType;

/// The longest sequence whose attention is deterministic on a GPU by default. Longer ones cost more, because the
/// gradients of all scores are stored: about 6% of a step at 4,096 tokens and 15% at 8,192 (Llama 1B, H200).
pub const DETERMINISTIC_UP_TO: usize = 1024;

/// Inputs of a plan besides the run file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Environment {
    pub ranks: usize,
    /// Ranks per host.
    pub local_ranks: usize,
    /// Cores per host.
    pub cores: usize,
    /// Collectives run next to compute without taking its cores, even inside a host: NCCL on GPUs.
    pub offloaded_comm: bool,
    /// Whether the ranks have a GPU that can be used.
    pub gpu: bool,
    /// Vocabulary of the data, if known.
    pub data_vocab: Option<usize>,
}

impl Environment {
    /// All ranks on one host.
    pub fn one_host(ranks: usize, cores: usize) -> Environment {
        Environment {
            ranks,
            local_ranks: ranks,
            cores,
            offloaded_comm: false,
            gpu: false,
            data_vocab: None,
        }
    }

    pub fn with_vocab(self, vocab: usize) -> Environment {
        Environment { data_vocab: Some(vocab), ..self }
    }
}

impl Plan {
    /// Resolves `config`, or returns all of its errors in the order of the file.
    pub fn resolve(config: &Config, env: &Environment) -> Result<Plan, Vec<ConfigError>> {
        let mut checker = Checker::new(config);
        if !checker.readable() {
            return Err(checker.all());
        }
        let layout = layout::layout(&mut checker, env);
        let before = checker.count();
        let model = model::shape(&mut checker, env.data_vocab);
        let sound = checker.count() == before;
        let data = data::data(&mut checker, model.as_ref());
        let train = train::train(&mut checker, &data, layout.data, env);
        // Checking the layout against an invalid model would only repeat its errors.
        if let Some(shape) = model.as_ref().filter(|_| sound) {
            layout::fits(&mut checker, &layout, shape, &data, &train);
            if checker.is_empty() {
                limits::step(&mut checker, &layout, shape, &data, &train);
            }
        }
        let name = rest::name(&mut checker);
        let precision = rest::precision(&mut checker);
        let comm = rest::comm(&mut checker, train.steps);
        if let Some(shape) = model.as_ref().filter(|_| checker.is_empty()) {
            rest::compressible(&mut checker, &comm, &layout, shape.vocab);
        }
        let checkpoint = rest::checkpoint(&mut checker);
        let (Some(model), true) = (model, checker.is_empty()) else { return Err(checker.all()) };
        let device = device(config, env, data.seq);
        let mut plan = Plan {
            name,
            ranks: env.ranks,
            model,
            data,
            train,
            layout,
            precision,
            device,
            comm,
            checkpoint,
            trace: config.trace.steps,
        };
        if config.layout.placement.is_none() {
            let traffic = placement::axis_traffic(&plan);
            plan.layout.order = placement::order(&plan.mesh(), env.local_ranks.max(1), &traffic);
        }
        plan.comm.overlap = Overlap::resolve(config.comm.overlap, &plan.mesh(), env);
        fp8::check(&mut checker, &plan);
        if checker.is_empty() { Ok(plan) } else { Err(checker.all()) }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

fn device(config: &Config, env: &Environment, seq: usize) -> Device {
    let kind = match config.device.kind.unwrap_or_default() {
        DeviceKind::Cpu => DeviceType::Cpu,
        DeviceKind::Cuda => DeviceType::Cuda,
        DeviceKind::Auto if env.gpu => DeviceType::Cuda,
        DeviceKind::Auto => DeviceType::Cpu,
    };
    let deterministic = kind == DeviceType::Cpu || seq <= DETERMINISTIC_UP_TO;
    Device {
        kind,
        tf32: config.device.tf32.unwrap_or(false),
        grouped_experts: config.device.grouped_experts.unwrap_or(true),
        deterministic: config.device.deterministic.unwrap_or(deterministic),
        memory_limit: config.device.memory_gib.map(|gib| (gib.max(0.0) * GIB) as u64),
    }
}

/// Resolves only the model.
pub(crate) fn shape(config: &Config, data_vocab: Option<usize>) -> Result<Shape, Vec<ConfigError>> {
    let mut checker = Checker::new(config);
    match model::shape(&mut checker, data_vocab) {
        Some(shape) if checker.is_empty() => Ok(shape),
        _ => Err(checker.all()),
    }
}
