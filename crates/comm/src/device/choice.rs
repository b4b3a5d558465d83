//! Which engine performs the collectives of a group on device memory. Pure: all members know the same facts and come to
//! the same choice.

use super::shared::MAX_MEMBERS;
use lockstep_types::DeviceEngine;

/// Options for the collectives of a group on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    pub engine: DeviceEngine,
    /// Register the buffers of collectives with NCCL, if it is the engine.
    pub register: bool,
}

impl From<DeviceEngine> for DeviceOptions {
    fn from(engine: DeviceEngine) -> DeviceOptions {
        DeviceOptions { engine, register: false }
    }
}

/// The engine of a group, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineChoice {
    pub engine: DeviceEngine,
    pub reason: String,
    /// Buffers of collectives are registered with NCCL.
    pub registers: bool,
    /// Why collectives are slower than they could be.
    pub warning: Option<String>,
}

impl EngineChoice {
    /// Registers buffers, if the engine is NCCL and each member is a process of its own.
    pub(super) fn with_registration(self, facts: &[MemberFacts]) -> EngineChoice {
        if self.engine != DeviceEngine::Nccl {
            return self;
        }
        let is_same = |a: &MemberFacts, b: &MemberFacts| (a.host, a.pid) == (b.host, b.pid);
        let threads = facts
            .iter()
            .enumerate()
            .find_map(|(i, b)| facts[..i].iter().find(|a| is_same(a, b)).map(|a| (a.rank, b.rank)));
        match threads {
            None => {
                let reason = format!("{}; buffers are registered", self.reason);
                EngineChoice { registers: true, reason, ..self }
            }
            // Not tried between threads, where NCCL 2.32 was seen to hang with buffers that span two allocations.
            Some((a, b)) => {
                let warning = format!(
                    "buffers are not registered with NCCL: ranks {a} and {b} are threads of one process; start a process \
                     per rank, e.g. with --engine shm"
                );
                EngineChoice { warning: self.warning.or(Some(warning)), ..self }
            }
        }
    }
}

/// Facts about one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberFacts {
    /// World rank.
    pub rank: usize,
    /// Number of its host.
    pub host: usize,
    pub pid: u64,
    /// UUID of its GPU, if it has one.
    pub gpu: Option<[u64; 2]>,
    /// Version of its NCCL, e.g. 22803; 0 if it was not found or is too old.
    pub nccl: u64,
    /// Whether its MPI says that it can read and write the memory of GPUs, if it says anything.
    pub cuda_aware_mpi: Option<bool>,
}

impl MemberFacts {
    pub const WORDS: usize = 6;

    pub fn words(&self) -> [i64; MemberFacts::WORDS] {
        let [low, high] = self.gpu.unwrap_or_default();
        let has_gpu = i64::from(self.gpu.is_some());
        let mpi = self.cuda_aware_mpi.map_or(-1, i64::from);
        [has_gpu, low as i64, high as i64, self.pid as i64, self.nccl as i64, mpi]
    }

    pub fn from_words(rank: usize, host: usize, words: &[i64]) -> MemberFacts {
        let gpu = (words[0] != 0).then_some([words[1] as u64, words[2] as u64]);
        let cuda_aware_mpi = (words[5] >= 0).then_some(words[5] == 1);
        MemberFacts { rank, host, gpu, pid: words[3] as u64, nccl: words[4] as u64, cuda_aware_mpi }
    }
}

/// The oldest NCCL that lets several ranks use one GPU.
const NCCL_SHARES_A_GPU: u64 = 23000;

/// Chooses the engine, or says why the wanted one cannot be used.
pub(super) fn choose(wanted: DeviceEngine, facts: &[MemberFacts]) -> Result<EngineChoice, String> {
    let (shared, nccl) = (why_not_shared(facts), why_not_nccl(facts));
    let choice = |engine, reason: String| {
        Ok(EngineChoice { engine, reason, registers: false, warning: None })
    };
    match wanted {
        DeviceEngine::Host => choice(DeviceEngine::Host, "as configured".into()),
        DeviceEngine::Shared => match shared {
            None => choice(DeviceEngine::Shared, "as configured".into()),
            Some(why) => Err(format!("the engine \"shared\" cannot be used: {why}")),
        },
        DeviceEngine::Nccl => match nccl {
            None => choice(DeviceEngine::Nccl, "as configured".into()),
            Some(why) => Err(format!("the engine \"nccl\" cannot be used: {why}")),
        },
        DeviceEngine::Mpi => Err("the engine \"mpi\" cannot be used: MPI does not connect the \
             ranks; start them with `mpirun lockstep ... --engine mpi`"
            .into()),
        DeviceEngine::Auto => match (shared, nccl) {
            (None, _) => choice(DeviceEngine::Shared, "all ranks use one GPU".into()),
            (Some(_), None) if !any_share(facts) => {
                let why = format!("each rank has a GPU, and NCCL {}", dotted(facts[0].nccl));
                choice(DeviceEngine::Nccl, why)
            }
            (Some(_), None) => {
                let why = "some ranks share a GPU".into();
                choice(DeviceEngine::Host, why)
            }
            (Some(_), Some(why)) => choice(DeviceEngine::Host, why),
        },
    }
}

/// The same between ranks that MPI connects.
pub(super) fn choose_over_mpi(
    wanted: DeviceEngine,
    facts: &[MemberFacts],
) -> Result<EngineChoice, String> {
    let choice = |engine, reason: String| {
        Ok(EngineChoice { engine, reason, registers: false, warning: None })
    };
    let refuses = facts.iter().find(|f| f.cuda_aware_mpi == Some(false));
    match wanted {
        DeviceEngine::Host => choice(DeviceEngine::Host, "as configured".into()),
        DeviceEngine::Mpi => match why_not_mpi(facts) {
            None => Ok(EngineChoice {
                engine: DeviceEngine::Mpi,
                reason: "as configured".into(),
                registers: false,
                warning: refuses.map(|fact| {
                    format!(
                        "the MPI of rank {} says that it has no CUDA support: it may crash when it reads the memory of a GPU",
                        fact.rank
                    )
                }),
            }),
            Some(why) => Err(format!("the engine \"mpi\" cannot be used: {why}")),
        },
        DeviceEngine::Auto => {
            let silent = facts.iter().find(|f| f.cuda_aware_mpi.is_none());
            match (why_not_mpi(facts), refuses, silent) {
                (Some(why), _, _) => choice(DeviceEngine::Host, why),
                (_, Some(fact), _) => choice(
                    DeviceEngine::Host,
                    format!("the MPI of rank {} has no CUDA support", fact.rank),
                ),
                (_, _, Some(fact)) => choice(
                    DeviceEngine::Host,
                    format!(
                        "the MPI of rank {} does not say whether it has CUDA support; if it has, set comm.device_engine=mpi",
                        fact.rank
                    ),
                ),
                (None, None, None) => {
                    choice(DeviceEngine::Mpi, "MPI has CUDA support".into())
                }
            }
        }
        DeviceEngine::Shared | DeviceEngine::Nccl => Err(format!(
            "the engine \"{}\" cannot be used between ranks that MPI connects; use auto, mpi or host, or start the ranks \
             without --engine mpi",
            wanted.name()
        )),
    }
}

fn why_not_mpi(facts: &[MemberFacts]) -> Option<String> {
    if let Some(why) = without_gpu(facts) {
        return Some(why);
    }
    // Our kernel adds the contributions of all members in one pass.
    (facts.len() > MAX_MEMBERS).then(|| {
        format!("MPI on device memory supports {MAX_MEMBERS} ranks, and there are {}", facts.len())
    })
}

fn why_not_shared(facts: &[MemberFacts]) -> Option<String> {
    if let Some(why) = without_gpu(facts) {
        return Some(why);
    }
    let first = facts[0];
    if let Some(other) = facts.iter().find(|f| f.gpu != first.gpu || f.host != first.host) {
        let what =
            if other.host != first.host { "are on different hosts" } else { "use different GPUs" };
        return Some(format!("ranks {} and {} {what}", first.rank, other.rank));
    }
    let twice = |f: &MemberFacts| facts.iter().filter(|other| other.pid == f.pid).count();
    if (2..facts.len()).contains(&twice(&first)) || facts.iter().any(|f| twice(f) != twice(&first))
    {
        return Some("some ranks are threads of one process and others are not".into());
    }
    if facts.len() > MAX_MEMBERS {
        return Some(format!("it supports {MAX_MEMBERS} ranks, and there are {}", facts.len()));
    }
    None
}

fn why_not_nccl(facts: &[MemberFacts]) -> Option<String> {
    if let Some(why) = without_gpu(facts) {
        return Some(why);
    }
    if let Some(fact) = facts.iter().find(|f| f.nccl == 0) {
        return Some(format!("rank {} has no NCCL 2.18 or newer", fact.rank));
    }
    let first = facts[0];
    if let Some(other) = facts.iter().find(|f| f.nccl != first.nccl) {
        return Some(format!(
            "rank {} has NCCL {} and rank {} has {}; install the same version everywhere",
            first.rank,
            dotted(first.nccl),
            other.rank,
            dotted(other.nccl)
        ));
    }
    let allowed = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|v| v == "1");
    if any_share(facts) && (first.nccl < NCCL_SHARES_A_GPU || !allowed) {
        return Some(format!(
            "several ranks use one GPU, which needs NCCL {} or newer (found {}) and NCCL_MULTI_RANK_GPU_ENABLE=1",
            dotted(NCCL_SHARES_A_GPU),
            dotted(first.nccl)
        ));
    }
    None
}

fn without_gpu(facts: &[MemberFacts]) -> Option<String> {
    let fact = facts.iter().find(|f| f.gpu.is_none())?;
    Some(format!("rank {} has no GPU", fact.rank))
}

fn any_share(facts: &[MemberFacts]) -> bool {
    let uses_same = |a: &MemberFacts, b: &MemberFacts| a.gpu == b.gpu;
    facts.iter().enumerate().any(|(i, a)| facts[..i].iter().any(|b| uses_same(a, b)))
}

/// A warning if processes share a GPU without MPS.
pub(super) fn mps_warning(facts: &[MemberFacts], mps_runs: bool) -> Option<String> {
    let share = |a: &MemberFacts, b: &MemberFacts| {
        a.gpu.is_some() && (a.gpu, a.host) == (b.gpu, b.host) && a.pid != b.pid
    };
    let (a, b) = facts
        .iter()
        .enumerate()
        .find_map(|(i, a)| facts[..i].iter().find(|b| share(a, b)).map(|b| (b, a)))
        .filter(|_| !mps_runs)?;
    Some(format!(
        "ranks {} and {} share a GPU without MPS: the GPU switches between their processes in time slices, and every \
         collective takes 0.3 to 5 ms instead of some microseconds; start MPS with `nvidia-cuda-mps-control -d`, or use \
         --engine threads",
        a.rank, b.rank
    ))
}

/// The largest number of members that use one GPU.
pub(super) fn most_sharing(facts: &[MemberFacts]) -> usize {
    let users =
        |a: &MemberFacts| facts.iter().filter(|b| (a.gpu, a.host) == (b.gpu, b.host)).count();
    facts.iter().map(users).max().unwrap_or(1)
}

/// A version of NCCL as users know it: 22803 is 2.28.3.
pub(crate) fn dotted(version: u64) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(rank: usize, gpu: u64, nccl: u64) -> MemberFacts {
        let gpu = (gpu > 0).then_some([gpu, 7]);
        MemberFacts { rank, host: 0, pid: 100, gpu, nccl, cuda_aware_mpi: None }
    }

    fn auto(facts: &[MemberFacts]) -> (DeviceEngine, String) {
        let choice = choose(DeviceEngine::Auto, facts).unwrap();
        (choice.engine, choice.reason)
    }

    #[test]
    fn automatic_choices() {
        let one_gpu = [member(0, 1, 0), member(1, 1, 22803)];
        assert_eq!(auto(&one_gpu).0, DeviceEngine::Shared);
        let own_gpus = [member(0, 1, 22803), member(1, 2, 22803)];
        let why = "each rank has a GPU, and NCCL 2.28.3".to_string();
        assert_eq!(auto(&own_gpus), (DeviceEngine::Nccl, why));
        let missing = [member(0, 1, 22803), member(1, 2, 0)];
        assert_eq!(auto(&missing), (DeviceEngine::Host, "rank 1 has no NCCL 2.18 or newer".into()));
        let mixed = [member(0, 1, 22803), member(4, 0, 0)];
        assert_eq!(auto(&mixed), (DeviceEngine::Host, "rank 4 has no GPU".into()));
        let versions = [member(0, 1, 22803), member(1, 2, 22105)];
        assert!(auto(&versions).1.contains("NCCL 2.28.3 and rank 1 has 2.21.5"));
        let some_share = [member(0, 1, 23203), member(1, 1, 23203), member(2, 2, 23203)];
        assert_eq!(auto(&some_share).0, DeviceEngine::Host);
        // Two containers with host names of their own share a GPU, which only NCCL 2.30 supports.
        let hosts = [member(0, 1, 22803), MemberFacts { host: 1, ..member(1, 1, 22803) }];
        assert_eq!(auto(&hosts).0, DeviceEngine::Host);
    }

    #[test]
    fn a_configured_engine_that_cannot_work_is_an_error() {
        let apart = [member(2, 1, 0), member(3, 2, 0)];
        let error = choose(DeviceEngine::Shared, &apart).unwrap_err();
        assert!(error.ends_with("ranks 2 and 3 use different GPUs"), "{error}");
        let error = choose(DeviceEngine::Nccl, &apart).unwrap_err();
        assert!(error.ends_with("rank 2 has no NCCL 2.18 or newer"), "{error}");
        assert_eq!(choose(DeviceEngine::Host, &apart).unwrap().engine, DeviceEngine::Host);
    }

    #[test]
    fn nccl_registers_the_buffers_of_processes() {
        let own_gpus = [member(0, 1, 22803), MemberFacts { pid: 101, ..member(1, 2, 22803) }];
        let chosen =
            |wanted, facts: &[MemberFacts]| choose(wanted, facts).unwrap().with_registration(facts);
        let choice = chosen(DeviceEngine::Auto, &own_gpus);
        assert!(choice.registers && choice.warning.is_none(), "{choice:?}");
        assert!(choice.reason.ends_with("NCCL 2.28.3; buffers are registered"), "{choice:?}");
        let apart = own_gpus.map(|member| MemberFacts { host: member.rank, pid: 100, ..member });
        assert!(chosen(DeviceEngine::Nccl, &apart).registers);

        let threads = [member(0, 1, 22803), member(1, 2, 22803)];
        let choice = chosen(DeviceEngine::Nccl, &threads);
        assert!(!choice.registers);
        let warning = choice.warning.unwrap();
        assert!(warning.contains("ranks 0 and 1 are threads of one process"), "{warning}");
        let shared = chosen(DeviceEngine::Shared, &[member(0, 1, 0), member(1, 1, 0)]);
        assert!(!shared.registers && shared.warning.is_none(), "{shared:?}");
    }

    #[test]
    fn choices_over_mpi() {
        let with = |mpi: [Option<bool>; 2]| {
            [0, 1].map(|rank| MemberFacts {
                cuda_aware_mpi: mpi[rank],
                ..member(rank, 1 + rank as u64, 0)
            })
        };
        let chosen = |wanted, facts: &[MemberFacts]| choose_over_mpi(wanted, facts);
        let aware = with([Some(true); 2]);
        assert_eq!(chosen(DeviceEngine::Auto, &aware).unwrap().engine, DeviceEngine::Mpi);
        assert_eq!(chosen(DeviceEngine::Host, &aware).unwrap().engine, DeviceEngine::Host);
        for wanted in [DeviceEngine::Nccl, DeviceEngine::Shared] {
            assert!(
                chosen(wanted, &aware).unwrap_err().contains("between ranks that MPI connects")
            );
        }
        assert!(choose(DeviceEngine::Mpi, &aware).unwrap_err().contains("--engine mpi"));

        let refuses = with([Some(true), Some(false)]);
        let auto = chosen(DeviceEngine::Auto, &refuses).unwrap();
        assert_eq!(
            (auto.engine, &auto.reason[..]),
            (DeviceEngine::Host, "the MPI of rank 1 has no CUDA support")
        );
        let forced = chosen(DeviceEngine::Mpi, &refuses).unwrap();
        assert_eq!(forced.engine, DeviceEngine::Mpi);
        assert!(forced.warning.unwrap().contains("rank 1 says that it has no CUDA support"));

        let silent = chosen(DeviceEngine::Auto, &with([None; 2])).unwrap();
        assert_eq!(silent.engine, DeviceEngine::Host);
        assert!(silent.reason.ends_with("set comm.device_engine=mpi"), "{}", silent.reason);
        assert_eq!(chosen(DeviceEngine::Mpi, &with([None; 2])).unwrap().warning, None);

        let without = [member(0, 1, 0), member(1, 0, 0)];
        assert!(chosen(DeviceEngine::Mpi, &without).unwrap_err().ends_with("rank 1 has no GPU"));
        let many: Vec<_> = (0..33)
            .map(|rank| MemberFacts { cuda_aware_mpi: Some(true), ..member(rank, 1, 0) })
            .collect();
        assert_eq!(chosen(DeviceEngine::Auto, &many).unwrap().engine, DeviceEngine::Host);
    }

    #[test]
    fn processes_that_share_a_gpu_without_mps_are_warned() {
        let threads = [member(0, 1, 0), member(1, 1, 0)];
        assert_eq!(mps_warning(&threads, false), None);
        let processes = [member(0, 1, 0), MemberFacts { pid: 101, ..member(1, 1, 0) }];
        assert_eq!(mps_warning(&processes, true), None);
        let warning = mps_warning(&processes, false).unwrap();
        assert!(warning.starts_with("ranks 0 and 1 share a GPU without MPS"), "{warning}");
        let apart = [member(0, 1, 0), MemberFacts { pid: 101, ..member(1, 2, 0) }];
        assert_eq!(mps_warning(&apart, false), None);
        assert_eq!(auto(&processes).0, DeviceEngine::Shared);
        let mixed = [member(0, 1, 0), member(1, 1, 0), MemberFacts { pid: 101, ..member(2, 1, 0) }];
        assert_eq!(auto(&mixed).0, DeviceEngine::Host);
    }

    #[test]
    fn facts_round_trip_through_words() {
        let aware = [Some(true), Some(false)];
        let with_mpi = aware.map(|mpi| MemberFacts { cuda_aware_mpi: mpi, ..member(2, 1, 0) });
        for fact in [member(3, 5, 22803), member(1, 0, 0)].into_iter().chain(with_mpi) {
            assert_eq!(MemberFacts::from_words(fact.rank, fact.host, &fact.words()), fact);
        }
    }
}
