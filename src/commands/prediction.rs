//! Checks that a run can be trained on this machine, predicts its traffic and step time, and compares the prediction
//! with the measurement.

use std::path::Path;

use anyhow::bail;
use lockstep_comm::{World, human_bytes};
use lockstep_events::StepReport;
use lockstep_kernels::Device;
use lockstep_plan::{DeviceType, Ledger, Offload, Plan};
use lockstep_sim::advice::slow_tensor;
use lockstep_sim::search::layout_words;
use lockstep_sim::{Options, estimate};
use lockstep_trainer::{PlannedTraffic, planned_traffic};

use crate::commands::device;
use crate::machine;
use crate::print::print_line;
use crate::world::Engine;

/// Fails if the ranks need more memory to train and save than this machine has available.
pub fn check_memory(plan: &Plan) -> anyhow::Result<()> {
    let ledgers = (0..plan.ranks).map(|rank| Ledger::of(plan, rank));
    let on_host = |ledger: Ledger| match plan.device.kind {
        DeviceType::Cpu => (ledger.least() + ledger.offloaded.total()) as u64,
        DeviceType::Cuda => (ledger.snapshot + ledger.offloaded.total()) as u64,
    };
    let needed: u64 = ledgers.map(on_host).sum();
    // Without /proc/meminfo there is nothing to compare with.
    let Ok(available) = machine::available_memory() else { return Ok(()) };
    if needed <= available {
        return Ok(());
    }
    bail!(
        "{} rank(s) need at least {} of memory, but this machine has {} available; use recompute = \"full\", a \
         smaller micro_batch, a smaller data.seq (samples have {} tokens), zero = 1 to 3 on more machines, or a smaller \
         model",
        plan.ranks,
        human_bytes(needed),
        human_bytes(available),
        plan.data.seq
    )
}

/// Fails if this rank needs more memory to train than its GPU has free.
pub fn check_device_memory(plan: &Plan, rank: usize, device: &Device) -> anyhow::Result<()> {
    let Some(free) = device.free_bytes() else { return Ok(()) };
    let free = plan.device.memory_limit.map_or(free, |limit| free.min(limit as usize));
    let ledger = Ledger::of(plan, rank);
    let needed = ledger.least() - ledger.snapshot;
    if needed <= free {
        return Ok(());
    }
    let lines = [
        ("parameters", ledger.parameters),
        ("gradients", ledger.gradients),
        ("optimizer", ledger.optimizer),
        ("activations", ledger.activations),
        ("gathered", ledger.gathered),
    ];
    let lines = lines.map(|(name, bytes)| format!("{name} {}", human_bytes(bytes as u64)));
    bail!(
        "rank {rank} needs at least {} of GPU memory ({}), but {} are free{}",
        human_bytes(needed as u64),
        lines.join(", "),
        human_bytes(free as u64),
        ways_to_fit(plan)
    )
}

/// The cheapest ways in which a plan needs less memory, as the end of a message.
pub fn ways_to_fit(plan: &Plan) -> String {
    let fixes = lockstep_dash::doctor::cheapest_memory_fixes(plan);
    if fixes.is_empty() {
        return "; use more ranks, a smaller data.seq or a smaller model".into();
    }
    let lines: Vec<String> = fixes.iter().map(|fix| format!("\n  {fix}")).collect();
    format!("; the cheapest ways to fit (predicted):{}", lines.concat())
}

/// Fails if the model can only be planned, not trained.
pub fn check_trainable(plan: &Plan) -> anyhow::Result<()> {
    match plan.model.planned_only() {
        None => Ok(()),
        Some(what) => bail!(
            "this model has {what}, which is supported for planning only (`lockstep plan`); to train, use a preset \
             without it, e.g. mixtral-8x7b or llama3-8b"
        ),
    }
}

/// Predicted traffic and step time of a run.
pub struct Prediction {
    /// Bytes per step of this rank, after the warm-up of compression.
    traffic: PlannedTraffic,
    /// All ranks share the memory of one host.
    one_host: bool,
    /// The engine counts the bytes that it sends.
    counted: bool,
    /// Step time in seconds, and the machine description it is based on.
    step: Option<(f64, String)>,
    /// A warning about the layout.
    warning: Option<String>,
    /// Why the default machine description could not be used.
    problem: Option<String>,
}

impl Prediction {
    /// Predicts with the given machine description or, by default, with RUNS/machine.toml if it exists.
    pub fn new(
        plan: &Plan,
        world: &World,
        engine: Engine,
        cluster: Option<&str>,
        runs: &Path,
    ) -> anyhow::Result<Prediction> {
        let default = runs.join("machine.toml");
        let path = match cluster {
            Some(name) => Some(name.to_string()),
            None => default.exists().then(|| default.display().to_string()),
        };
        let mut warning = None;
        let (step, problem) = match path
            .map(|path| (machine::cluster(&path, Some(plan.ranks), Some(plan.device.kind)), path))
        {
            None => (None, None),
            Some((Ok(machine), path)) => match device::as_used(machine, plan, world, engine) {
                Ok(machine) => {
                    let options = Options::default();
                    let found = estimate(plan, &machine, &options);
                    warning = slow_tensor(plan, &machine, &options, &found);
                    (Some((found.step_s, path)), None)
                }
                Err(why) => (None, Some(why)),
            },
            // The default file is optional.
            Some((Err(why), _)) if cluster.is_none() => (None, Some(format!("{why:#}"))),
            Some((Err(why), _)) => return Err(why),
        };
        let traffic = planned_traffic(plan, world, plan.train.steps as u64);
        let counted = engine.counts_traffic();
        let one_host = counted && world.hosts().iter().all(|host| *host == 0);
        let warning = warning.map(|slow| slow.to_string());
        Ok(Prediction { traffic, one_host, counted, step, warning, problem })
    }

    pub fn print(&self, plan: &Plan) {
        let ledger = Ledger::largest(plan);
        let layout = layout_words(plan);
        let traffic = match self.one_host {
            _ if plan.ranks == 1 => String::new(),
            true => format!("; {} per step in shared memory", human_bytes(self.traffic.volume)),
            false => format!("; {} sent per step", human_bytes(self.traffic.sent)),
        };
        let host = match ledger.offloaded.total() {
            0 => String::new(),
            bytes => {
                format!(" and {} of offloaded state in host memory", human_bytes(bytes as u64))
            }
        };
        print_line!(
            "plan: {layout}, micro_batch={} × {}; at most {} of memory per rank{host}{traffic}",
            plan.train.micro_batch,
            plan.train.accumulation,
            human_bytes(ledger.total() as u64)
        );
        if plan.layout.offload != Offload::None && plan.device.kind == DeviceType::Cpu {
            print_line!("note: layout.offload saves nothing on a CPU, whose memory is host memory");
        }
        if let Some((seconds, file)) = &self.step {
            print_line!("predicted step time: {:.1} ms (from {file})", 1e3 * seconds);
        }
        if let Some(warning) = &self.warning {
            print_line!("warning: {warning}");
        }
        if let Some(why) = &self.problem {
            print_line!("no step time is predicted: {why}");
        }
    }

    /// Predicted and measured traffic. What ranks of one host access in place is not counted as sent.
    fn compare_traffic(&self, measured: Option<u64>) -> String {
        let PlannedTraffic { sent, volume } = self.traffic;
        let (sent, volume) = (human_bytes(sent), human_bytes(volume));
        match (self.one_host, measured) {
            (true, Some(copied)) => format!(
                "communication per step: {volume} in shared memory, {} of it copied, the rest accessed in place",
                human_bytes(copied)
            ),
            (false, Some(measured)) => {
                format!("sent per step: {sent} predicted, {} measured", human_bytes(measured))
            }
            (_, None) => format!("sent per step: {sent} predicted, not measured"),
        }
    }

    /// Prints the predicted and the measured traffic and step time.
    pub fn compare(&self, plan: &Plan, measured: &Measured) {
        if plan.ranks > 1 {
            print_line!("{}", self.compare_traffic(measured.sent.filter(|_| self.counted)));
        }
        if let (Some((predicted, _)), Some(seconds)) = (&self.step, measured.step(plan)) {
            let error = 100.0 * (predicted / seconds - 1.0);
            print_line!(
                "step time: {:.1} ms predicted ({error:+.1}%), {:.1} ms measured",
                1e3 * predicted,
                1e3 * seconds
            );
        }
    }
}

/// Throughput and traffic from the step reports so far.
#[derive(Default)]
pub struct Measured {
    tokens_per_s: Vec<f64>,
    sent: Option<u64>,
}

impl Measured {
    pub fn add(&mut self, report: &StepReport) {
        self.tokens_per_s.extend(report.tokens_per_s);
        self.sent = report.more.get("comm_bytes").and_then(|bytes| bytes.as_u64()).or(self.sent);
    }

    /// Mean step time in seconds, without the first report, which includes warm-up.
    fn step(&self, plan: &Plan) -> Option<f64> {
        let rates = self.tokens_per_s.get(1..).filter(|rates| !rates.is_empty())?;
        let tokens = plan.tokens_per_step() as f64;
        Some(rates.iter().map(|rate| tokens / rate).sum::<f64>() / rates.len() as f64)
    }
}
