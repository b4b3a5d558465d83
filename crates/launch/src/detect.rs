//! Detects which launcher started this process and reads the rank's placement from that launcher's variables. Settings
//! that are the same under every launcher (token, generation, bind) are read in `identity`.

use lockstep_comm::Launcher;

use super::slurm;
use super::vars::Vars;

/// A process's place in the job, as its launcher reports it.
pub(super) struct Placement {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub local_size: usize,
    pub node: usize,
    /// Host and port of rank 0, if the launcher knows them.
    pub master: (Option<String>, Option<u16>),
    /// The variables that were read, for error messages.
    pub names: Names,
}

pub(super) struct Names {
    pub rank: &'static str,
    pub size: &'static str,
    pub local_rank: &'static str,
    pub local_size: &'static str,
}

/// Picks the most specific launcher.
///
/// MPI launchers come before Slurm because `mpirun` inside an allocation leaves every rank with the SLURM_PROCID of the
/// daemon that started it. But `srun --mpi=pmi2` also sets PMI_RANK, without local ranks; then Slurm knows more.
pub(super) fn launcher(vars: &Vars) -> Launcher {
    let any = |names: &[&str]| names.iter().any(|name| vars.is_set(name));
    let pmi = any(&["PMI_RANK", "PMI_SIZE"]);
    if any(&["RANK", "WORLD_SIZE"]) {
        Launcher::Explicit
    } else if any(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) {
        Launcher::OpenMpi
    } else if pmi && vars.is_set("MPI_LOCALRANKID") {
        Launcher::Pmi
    } else if vars.is_set("SLURM_PROCID") {
        // SLURM_NTASKS without SLURM_PROCID is a shell inside an allocation, not a task of it.
        Launcher::Slurm
    } else if pmi {
        Launcher::Pmi
    } else {
        Launcher::Standalone
    }
}

/// The placement according to `launcher`; `None` if `vars` recorded errors.
pub(super) fn placement(launcher: Launcher, vars: &mut Vars) -> Option<Placement> {
    match launcher {
        Launcher::Explicit => explicit(vars),
        Launcher::OpenMpi => open_mpi(vars),
        Launcher::Pmi => pmi(vars),
        Launcher::Slurm => slurm(vars),
        Launcher::Standalone => Some(standalone()),
    }
}

const EXPLICIT: Names = Names {
    rank: "RANK",
    size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_size: "LOCAL_WORLD_SIZE",
};

/// Local rank and local size where the launcher sets neither: one process per host.
const ONE_PER_HOST: (usize, usize) = (0, 1);

fn explicit(vars: &mut Vars) -> Option<Placement> {
    // Kubeflow's PyTorchJob sets no LOCAL_*: one process per pod.
    let placement = by_names(EXPLICIT, vars);
    // torchrun numbers its nodes itself; NODE_RANK may be inherited from the pod it runs in.
    let node = vars.first_number(&["GROUP_RANK", "NODE_RANK"]);
    let placement = placement?;
    Some(Placement { node: node.unwrap_or(placement.node), ..placement })
}

fn open_mpi(vars: &mut Vars) -> Option<Placement> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    // OMPI_COMM_WORLD_NODE_RANK is a rank *on* a node, not the index of a node.
    by_names(names, vars)
}

fn pmi(vars: &mut Vars) -> Option<Placement> {
    let names = Names {
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    };
    by_names(names, vars)
}

fn slurm(vars: &mut Vars) -> Option<Placement> {
    let rank = vars.number("SLURM_PROCID");
    // A step may use fewer tasks and hosts than its job.
    let size = match vars.number("SLURM_STEP_NUM_TASKS") {
        Some(size) => Some(size),
        None => vars.required("SLURM_NTASKS", "SLURM_PROCID"),
    };
    let local_rank = vars.required("SLURM_LOCALID", "SLURM_PROCID");
    let node = vars.required("SLURM_NODEID", "SLURM_PROCID");
    let local_size = slurm_local_size(vars, size, node);
    let job: Option<u64> = vars.number("SLURM_JOB_ID");
    Some(Placement {
        rank: rank?,
        size: size?,
        local_rank: local_rank?,
        local_size: local_size?,
        node: node?,
        master: (slurm_first_host(vars), job.map(slurm::port_of_job)),
        names: Names {
            rank: "SLURM_PROCID",
            size: "SLURM_NTASKS",
            local_rank: "SLURM_LOCALID",
            local_size: "tasks on this node",
        },
    })
}

/// SLURM_NTASKS_PER_NODE comes last: it is what was requested, the lists are what was allocated.
fn slurm_local_size(vars: &mut Vars, size: Option<usize>, node: Option<usize>) -> Option<usize> {
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(counts) = vars.text(name) else {
            continue;
        };
        let node = node?;
        let tasks = slurm::tasks_on_node(&counts, node);
        if tasks.is_none() {
            vars.error(format!(
                "{name}={counts:?} has no entry for node {node}; expected a list like 2(x3),1"
            ));
        }
        return tasks;
    }
    if size == Some(1) {
        return size;
    }
    vars.required("SLURM_NTASKS_PER_NODE", "SLURM_PROCID")
}

fn slurm_first_host(vars: &mut Vars) -> Option<String> {
    let name =
        ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find(|name| vars.is_set(name))?;
    let list = vars.text(name)?;
    let host = slurm::first_host(&list);
    if host.is_none() && !vars.is_set("MASTER_ADDR") {
        vars.error(format!(
            "{name}={list:?} is not a host list; set MASTER_ADDR to the host of rank 0"
        ));
    }
    host
}

fn standalone() -> Placement {
    Placement {
        rank: 0,
        size: 1,
        local_rank: 0,
        local_size: 1,
        node: 0,
        // A world of one has no rendezvous.
        master: (None, Some(0)),
        names: EXPLICIT,
    }
}

/// Reads a placement from four plain numbers. The node is a guess: ranks fill equally large hosts one by one.
fn by_names(names: Names, vars: &mut Vars) -> Option<Placement> {
    let rank: Option<usize> = vars.required(names.rank, names.size);
    let size = vars.required(names.size, names.rank);
    let (local_rank, local_size) = vars.pair(names.local_rank, names.local_size, ONE_PER_HOST);
    let (rank, local_size) = (rank?, local_size?);
    Some(Placement {
        rank,
        size: size?,
        local_rank: local_rank?,
        local_size,
        node: rank / local_size.max(1),
        master: (None, None),
        names,
    })
}
