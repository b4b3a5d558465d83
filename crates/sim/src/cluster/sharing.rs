//! Ranks that share the cores of a host, or an accelerator: what each of them gets.

use std::borrow::Cow;

use lockstep_plan::Plan;

use super::{Accelerator, Cluster, Engine, Link, Peak};

/// Latency of a collective in the memory of an accelerator, in microseconds: for two ranks, and for each further one. An
/// H200 takes 7, 11 and 19 µs for 4 KiB among 2, 4 and 8 ranks.
const START_US: f64 = 5.0;
const MEMBER_US: f64 = 2.0;

impl Engine {
    /// Whether all ranks of a host compute on one accelerator.
    pub fn shares_accelerator(self) -> bool {
        matches!(self, Engine::Shared | Engine::Staged)
    }
}

impl Cluster {
    /// One accelerator of this cluster, shared by `ranks` ranks: threads of one process, or processes under MPS.
    pub fn shared_by(&self, ranks: usize, processes: bool) -> Cluster {
        let link = Link {
            name: "device memory".into(),
            span: None,
            start_us: START_US,
            hop_us: MEMBER_US,
            bandwidth_gbs: 1e-9 * self.accelerator.stream_rate(),
            rails: None,
            oversubscription: 1.0,
        };
        Cluster {
            name: format!("{}, shared by {ranks} ranks", self.name),
            per_host: ranks,
            ranks: Some(ranks),
            links: vec![link],
            engine: if processes { Engine::Staged } else { Engine::Shared },
            differs: Vec::new(),
            ..self.clone()
        }
    }

    /// The number of ranks that share an accelerator, if a run has `ranks` ranks.
    pub(crate) fn ranks_per_accelerator(&self, ranks: usize) -> usize {
        if self.engine.shares_accelerator() { ranks.min(self.per_host) } else { 1 }
    }

    /// The cluster as one of `ranks` ranks of a plan sees it: its share of the cores or of the GPU, with the rates of TF32
    /// if the plan uses it.
    pub(crate) fn for_rank(&self, ranks: usize, plan: &Plan) -> Cow<'_, Cluster> {
        let mut cluster = self.shared(ranks, plan.train.threads);
        if let Some(peak) =
            self.accelerator.peak.tf32.filter(|_| plan.device.tf32 && self.has_gpus())
        {
            let shares = self.ranks_per_accelerator(ranks) as f64;
            let accelerator = &mut cluster.to_mut().accelerator;
            accelerator.peak.f32 = peak / shares;
            if let Some(overheads) = &mut accelerator.matmul.overheads {
                overheads.f32 = overheads.tf32.unwrap_or(overheads.f32);
            }
        }
        cluster
    }

    /// The cluster with the share of the accelerator that one of `ranks` ranks with `threads` threads gets.
    pub fn shared(&self, ranks: usize, threads: usize) -> Cow<'_, Cluster> {
        if self.cores.is_some() {
            return Cow::Owned(self.with_share_of_cores(ranks, threads));
        }
        match self.ranks_per_accelerator(ranks) {
            1 => Cow::Borrowed(self),
            ranks => Cow::Owned(self.with_share_of_accelerator(ranks)),
        }
    }

    fn with_share_of_cores(&self, ranks: usize, threads: usize) -> Cluster {
        let together = ranks.min(self.per_host) as f64;
        let computing = self.share(ranks, threads);
        let Accelerator { peak, memory_gib, bandwidth_gbs, .. } = self.accelerator;
        let peak =
            Peak { f32: peak.f32 * computing, bf16: peak.bf16 * computing, fp8: None, tf32: None };
        let accelerator = Accelerator {
            peak,
            memory_gib: memory_gib / together,
            bandwidth_gbs: bandwidth_gbs / together,
            ..self.accelerator.clone()
        };
        Cluster { accelerator, ..self.clone() }
    }

    /// All ranks compute at the same time, each at its share of every rate. Starts of operations take as long as without
    /// sharing, at the same time on all ranks.
    fn with_share_of_accelerator(&self, ranks: usize) -> Cluster {
        let mut cluster = Cluster { per_host: ranks, ..self.clone() };
        let (device, ranks) = (&mut cluster.accelerator, ranks as f64);
        let Peak { f32, bf16, fp8, tf32 } = &mut device.peak;
        let peaks = [Some(f32), Some(bf16), fp8.as_mut(), tf32.as_mut()];
        peaks.into_iter().flatten().for_each(|peak| *peak /= ranks);
        device.memory_gib /= ranks;
        device.bandwidth_gbs /= ranks;
        device.host_link_gbs /= ranks;
        device.host_bandwidth_gbs /= ranks;
        cluster
    }

    /// Fraction of the host's cores that a rank gets. Threads in excess of the cores take turns.
    pub(crate) fn share(&self, ranks: usize, threads: usize) -> f64 {
        let together = ranks.min(self.per_host) as f64;
        self.cores.map_or(1.0, |cores| (threads as f64 / cores as f64).min(1.0 / together))
    }
}
