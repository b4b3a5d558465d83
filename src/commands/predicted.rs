//! What `train` says of a run before it begins, what it refuses, and how what was predicted compares with what came.

use std::path::Path;

use anyhow::bail;
use lockstep_comm::{Algo, CollectiveShape, human_bytes, predict_traffic};
use lockstep_events::StepReport;
use lockstep_plan::{Collective, Exchange, Ledger, Plan, traffic};
use lockstep_sim::search::layout_words;
use lockstep_sim::{Options, estimate};

use crate::machine;
use crate::print::print_line;

/// Ends what cannot fit into this machine's memory before a rank is started. What is counted is what must be there
/// at once: states, and the larger of gradients and activations, of which one comes as the other goes.
pub fn refuse(plan: &Plan) -> anyhow::Result<()> {
    let at_once = |rank: usize| {
        let ledger = Ledger::of(plan, rank);
        ledger.parameters + ledger.optimizer + ledger.gradients.max(ledger.activations)
    };
    let needed: u64 = (0..plan.ranks).map(|rank| at_once(rank) as u64).sum();
    // Where the system does not tell, it will tell when it is too late.
    let Ok(available) = machine::available_memory() else { return Ok(()) };
    if needed <= available {
        return Ok(());
    }
    bail!(
        "{} rank(s) of this run need {} at least, and this machine has {} left; \
         try recompute = \"full\", a smaller micro_batch, zero = 1 to 3 on more machines, or a smaller model",
        plan.ranks,
        human_bytes(needed),
        human_bytes(available)
    )
}

/// Ends what can be planned, and not trained.
pub fn planned_only(plan: &Plan) -> anyhow::Result<()> {
    match plan.model.planned_only() {
        None => Ok(()),
        Some(what) => bail!(
            "this model has {what}, which is for planning only: `lockstep plan` tells what it would take, \
             and no block here computes it; to train, take a preset without it (mixtral-8x7b, llama3-8b)"
        ),
    }
}

/// What a run is expected to exchange and to take.
pub struct Predicted {
    /// Bytes that rank 0 sends in a step, by the formulas of the collectives.
    sent: u64,
    /// Seconds of a step, where the machine was measured, and the file that says so.
    step: Option<(f64, String)>,
    /// Why a file that is there does not say it.
    unsaid: Option<String>,
}

impl Predicted {
    pub fn of(plan: &Plan, cluster: Option<&str>, runs: &Path) -> anyhow::Result<Predicted> {
        let usual = runs.join("machine.toml");
        let path = match cluster {
            Some(typed) => Some(typed.to_string()),
            None => usual.exists().then(|| usual.display().to_string()),
        };
        let (step, unsaid) =
            match path.map(|path| (machine::cluster(&path, Some(plan.ranks)), path)) {
                None => (None, None),
                Some((Ok(machine), path)) => {
                    let seconds = estimate(plan, &machine, &Options::default()).step_s;
                    (Some((seconds, path)), None)
                }
                // Nobody asked for the usual one: without it the run goes on.
                Some((Err(why), _)) if cluster.is_none() => (None, Some(format!("{why:#}"))),
                Some((Err(why), _)) => return Err(why),
            };
        let sent =
            traffic(plan, 0).iter().map(|exchange| exchange.times as u64 * bytes(exchange)).sum();
        Ok(Predicted { sent, step, unsaid })
    }

    pub fn introduce(&self, plan: &Plan) {
        let ledger = Ledger::of(plan, 0);
        let layout = layout_words(plan);
        print_line!(
            "plan: {layout}, micro_batch={} × {}; {} per rank at most; {} sent per step",
            plan.train.micro_batch,
            plan.train.accumulation,
            human_bytes(ledger.total() as u64),
            human_bytes(self.sent)
        );
        if let Some((seconds, file)) = &self.step {
            print_line!("a step should take {:.1} ms by {file}", 1e3 * seconds);
        }
        if let Some(why) = &self.unsaid {
            print_line!("how long a step should take is not known: {why}");
        }
    }

    /// Traffic and time, planned and measured.
    pub fn compare(&self, plan: &Plan, measured: &Measured) {
        if plan.ranks > 1 {
            // Groups of a host that read each other's memory send nothing.
            let counted = match measured.sent {
                Some(0) | None => "read in place".into(),
                Some(bytes) => human_bytes(bytes),
            };
            print_line!("sent per step, planned and counted: {} {counted}", human_bytes(self.sent));
        }
        if let (Some((predicted, _)), Some(seconds)) = (&self.step, measured.step(plan)) {
            let off = 100.0 * (predicted / seconds - 1.0);
            print_line!(
                "a step, planned and measured: {:.1} {:.1} ms ({off:+.1}%)",
                1e3 * predicted,
                1e3 * seconds
            );
        }
    }
}

/// What rank 0 sends in one exchange among ranks of one host.
fn bytes(exchange: &Exchange) -> u64 {
    let Exchange { members, count, width, .. } = *exchange;
    let kind = match exchange.collective {
        Collective::SendRecv => return (count * width) as u64,
        Collective::AllToAllV => Collective::AllToAll,
        collective => collective,
    };
    let hosts = vec![0; members];
    let shape = CollectiveShape { kind, count, width, root: 0, hosts: &hosts };
    predict_traffic(&shape, Algo::Direct, 0).map_or(0, |traffic| traffic.bytes)
}

/// What reports have said so far.
#[derive(Default)]
pub struct Measured {
    tokens_per_s: Vec<f64>,
    sent: Option<u64>,
}

impl Measured {
    pub fn take(&mut self, report: &StepReport) {
        self.tokens_per_s.extend(report.tokens_per_s);
        self.sent = report.more.get("comm_bytes").and_then(|bytes| bytes.as_u64()).or(self.sent);
    }

    /// Seconds of a step: the mean, as that is what is predicted, without the first, which warms up.
    fn step(&self, plan: &Plan) -> Option<f64> {
        let rates = self.tokens_per_s.get(1..).filter(|rates| !rates.is_empty())?;
        let tokens = plan.tokens_per_step() as f64;
        Some(rates.iter().map(|rate| tokens / rate).sum::<f64>() / rates.len() as f64)
    }
}
