//! What each kind of launcher says about a process, and which of them to believe. Never decides what
//! Lockstep's own settings (token, generation, bind) mean; those are the same under every launcher.

use lockstep_comm::Launcher;

use super::slurm;
use super::vars::Vars;

/// A process's seat as its launcher tells it.
pub(super) struct Place {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub local_size: usize,
    pub node: usize,
    /// Where rank 0 is to be met, if the launcher knows.
    pub master: (Option<String>, Option<u16>),
    /// The variables that said so, to speak of when they contradict each other.
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
/// MPI's launchers come before Slurm because `mpirun` inside an allocation leaves every rank with
/// the SLURM_PROCID of the daemon that started it. But `srun --mpi=pmi2` sets PMI_RANK too, without
/// local ranks, and then Slurm knows more.
pub(super) fn most_specific(vars: &Vars) -> Launcher {
    let any = |names: &[&str]| names.iter().any(|name| vars.is_set(name));
    let pmi = any(&["PMI_RANK", "PMI_SIZE"]);
    if any(&["RANK", "WORLD_SIZE"]) {
        Launcher::Explicit
    } else if any(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) {
        Launcher::OpenMpi
    } else if pmi && vars.is_set("MPI_LOCALRANKID") {
        Launcher::Pmi
    } else if vars.is_set("SLURM_PROCID") {
        // SLURM_NTASKS alone is a shell inside an allocation, not a task of it.
        Launcher::Slurm
    } else if pmi {
        Launcher::Pmi
    } else {
        Launcher::Standalone
    }
}

/// The seat according to `launcher`, or none when mistakes were noted.
pub(super) fn read(launcher: Launcher, vars: &mut Vars) -> Option<Place> {
    match launcher {
        Launcher::Explicit => explicit(vars),
        Launcher::OpenMpi => open_mpi(vars),
        Launcher::Pmi => pmi(vars),
        Launcher::Slurm => slurm(vars),
        Launcher::Standalone => Some(alone()),
    }
}

const EXPLICIT: Names = Names {
    rank: "RANK",
    size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_size: "LOCAL_WORLD_SIZE",
};

fn explicit(vars: &mut Vars) -> Option<Place> {
    // Kubeflow's PyTorchJob sets no LOCAL_*: one process per pod.
    let one_per_host = (0, 1);
    let place = by_names(EXPLICIT, one_per_host, vars);
    // torchrun numbers its nodes itself; NODE_RANK may be left over from the pod it runs in.
    let node = vars.first_number(&["GROUP_RANK", "NODE_RANK"]);
    let place = place?;
    Some(Place { node: node.unwrap_or(place.node), ..place })
}

fn open_mpi(vars: &mut Vars) -> Option<Place> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    // OMPI_COMM_WORLD_NODE_RANK is a rank *on* a node, not the number of one: of no use here.
    by_names(names, (0, 1), vars)
}

fn pmi(vars: &mut Vars) -> Option<Place> {
    let names = Names {
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    };
    by_names(names, (0, 1), vars)
}

fn slurm(vars: &mut Vars) -> Option<Place> {
    let rank = vars.number("SLURM_PROCID");
    // A step may use fewer tasks and hosts than its job.
    let size = match vars.number("SLURM_STEP_NUM_TASKS") {
        Some(size) => Some(size),
        None => vars.needed("SLURM_NTASKS", "SLURM_PROCID"),
    };
    let local_rank = vars.needed("SLURM_LOCALID", "SLURM_PROCID");
    let node = vars.needed("SLURM_NODEID", "SLURM_PROCID");
    let local_size = slurm_local_size(vars, size, node);
    let job: Option<u64> = vars.number("SLURM_JOB_ID");
    Some(Place {
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

/// SLURM_NTASKS_PER_NODE comes last: it is what was asked for, the lists are what was given.
fn slurm_local_size(vars: &mut Vars, size: Option<usize>, node: Option<usize>) -> Option<usize> {
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(counts) = vars.text(name) else {
            continue;
        };
        let node = node?;
        let tasks = slurm::tasks_on_node(&counts, node);
        if tasks.is_none() {
            vars.complain(format!(
                "{name}={counts:?} says nothing of node {node}; it should read like 2(x3),1"
            ));
        }
        return tasks;
    }
    if size == Some(1) {
        return size;
    }
    vars.needed("SLURM_NTASKS_PER_NODE", "SLURM_PROCID")
}

fn slurm_first_host(vars: &mut Vars) -> Option<String> {
    let name =
        ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find(|name| vars.is_set(name))?;
    let list = vars.text(name)?;
    let host = slurm::first_host(&list);
    if host.is_none() && !vars.is_set("MASTER_ADDR") {
        vars.complain(format!(
            "{name}={list:?} is not a host list; set MASTER_ADDR to the host of rank 0"
        ));
    }
    host
}

fn alone() -> Place {
    Place {
        rank: 0,
        size: 1,
        local_rank: 0,
        local_size: 1,
        node: 0,
        // Nobody is to be met.
        master: (None, Some(0)),
        names: EXPLICIT,
    }
}

/// A seat from four plain numbers. The node is a guess: hosts filled one after the other, all alike.
fn by_names(names: Names, without_local: (usize, usize), vars: &mut Vars) -> Option<Place> {
    let rank: Option<usize> = vars.needed(names.rank, names.size);
    let size = vars.needed(names.size, names.rank);
    let (local_rank, local_size) = vars.pair(names.local_rank, names.local_size, without_local);
    let (rank, local_size) = (rank?, local_size?);
    Some(Place {
        rank,
        size: size?,
        local_rank: local_rank?,
        local_size,
        node: rank / local_size.max(1),
        master: (None, None),
        names,
    })
}
