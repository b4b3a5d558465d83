//! Variables, and the identity or the errors that they give.

use super::*;

fn read(variables: &str) -> Result<Identity, IdentityError> {
    let set: Vec<(&str, &str)> = variables
        .split_whitespace()
        .map(|item| item.split_once('=').expect("tests write NAME=value"))
        .collect();
    from_env(&|name| {
        let (_, value) = set.iter().find(|(key, _)| *key == name)?;
        Some(value.to_string())
    })
}

/// `rank/size local_rank/local_size node address:port launcher`
fn shown(id: &Identity) -> String {
    format!(
        "{}/{} {}/{} {} {}:{} {:?}",
        id.rank,
        id.size,
        id.local_rank,
        id.local_size,
        id.node,
        id.master_addr,
        id.master_port,
        id.launcher
    )
}

const OMPI_2_OF_4: &str = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 \
    OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=2";
const SLURM_6_OF_7: &str = "SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=0 SLURM_NODEID=3 \
    SLURM_TASKS_PER_NODE=2(x3),1 SLURM_JOB_NODELIST=gpu[001-003,7],login1 SLURM_JOB_ID=12345";

#[test]
fn identities_of_all_launchers() {
    let slurm_under_mpi = format!("{SLURM_6_OF_7} {OMPI_2_OF_4}");
    let slurm_step = format!(
        "{SLURM_6_OF_7} SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=2(x4) SLURM_STEP_NODELIST=b[4-7]"
    );
    let slurm_pmi2 = format!("{SLURM_6_OF_7} PMI_RANK=6 PMI_SIZE=7");
    let hydra_in_slurm =
        format!("{SLURM_6_OF_7} PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2");
    let slurm_master = format!("{SLURM_6_OF_7} MASTER_ADDR=head MASTER_PORT=7000");
    for (variables, expected) in [
        // No launcher; a shell inside a Slurm allocation counts as none.
        ("", "0/1 0/1 0 127.0.0.1:0 Standalone"),
        ("SLURM_NTASKS=8 SLURM_JOB_ID=1", "0/1 0/1 0 127.0.0.1:0 Standalone"),
        ("RANK= WORLD_SIZE=", "0/1 0/1 0 127.0.0.1:0 Standalone"),
        // torchrun.
        (
            "RANK=5 WORLD_SIZE=6 LOCAL_RANK=2 LOCAL_WORLD_SIZE=3 GROUP_RANK=1 NODE_RANK=9 MASTER_ADDR=a MASTER_PORT=1",
            "5/6 2/3 1 a:1 Explicit",
        ),
        (
            "RANK=5 WORLD_SIZE=6 LOCAL_RANK=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=a",
            "5/6 2/3 1 a:29500 Explicit",
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
            "1/2 1/2 0 127.0.0.1:29500 Explicit",
        ),
        // Kubeflow: one process per pod; PET_* are for launchers.
        (
            "RANK=2 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=3 PET_NODE_RANK=2",
            "2/3 0/1 2 job-master-0:23456 Explicit",
        ),
        ("PET_NNODES=3 PET_NODE_RANK=2", "0/1 0/1 0 127.0.0.1:0 Standalone"),
        // Slurm.
        (SLURM_6_OF_7, "6/7 0/1 3 gpu001:20345 Slurm"),
        (&slurm_step, "6/8 0/2 3 b4:20345 Slurm"),
        (&slurm_pmi2, "6/7 0/1 3 gpu001:20345 Slurm"),
        (&slurm_master, "6/7 0/1 3 head:7000 Slurm"),
        (
            "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS_PER_NODE=2 SLURM_JOB_NODELIST=n[1-2]",
            "3/4 1/2 1 n1:29500 Slurm",
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=3",
            "0/1 0/1 0 127.0.0.1:20003 Slurm",
        ),
        // MPI, outside and inside a Slurm allocation.
        (OMPI_2_OF_4, "2/4 2/4 0 127.0.0.1:29500 OpenMpi"),
        (&slurm_under_mpi, "2/4 2/4 0 127.0.0.1:29500 OpenMpi"),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=m",
            "3/4 1/2 1 m:29500 OpenMpi",
        ),
        (
            "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
            "1/2 1/2 0 127.0.0.1:29500 Pmi",
        ),
        (&hydra_in_slurm, "1/2 1/2 0 127.0.0.1:29500 Pmi"),
        ("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=m", "1/2 0/1 1 m:29500 Pmi"),
        // Explicit variables take precedence.
        (
            "RANK=0 WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=4 OMPI_COMM_WORLD_RANK=7",
            "0/1 0/1 0 127.0.0.1:29500 Explicit",
        ),
    ] {
        match read(variables) {
            Ok(id) => assert_eq!(shown(&id), expected, "{variables}"),
            Err(error) => panic!("{variables}: {error}"),
        }
    }
}

#[test]
fn errors_are_collected_and_suggest_a_fix() {
    let cases: &[(&str, &[&str])] = &[
        ("RANK=1", &["WORLD_SIZE is not set although RANK is; set both or neither"]),
        (
            "WORLD_SIZE=2 LOCAL_RANK=0",
            &["RANK is not set", "LOCAL_WORLD_SIZE is not set although LOCAL_RANK is"],
        ),
        (
            "RANK=4 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a",
            &[
                "RANK=4 is out of range: WORLD_SIZE=4, and ranks count from 0",
                "LOCAL_RANK=2 is out of range: LOCAL_WORLD_SIZE=2",
            ],
        ),
        (
            "RANK=0 WORLD_SIZE=0",
            &[
                "RANK=0 is out of range: WORLD_SIZE=0",
                "LOCAL_WORLD_SIZE=1 is larger than the whole job (WORLD_SIZE=0)",
                "set it to the host of rank 0",
            ],
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=0 MASTER_ADDR=a",
            &["LOCAL_RANK=0 is out of range: LOCAL_WORLD_SIZE=0"],
        ),
        (
            "RANK=-1 WORLD_SIZE=two GROUP_RANK=x MASTER_PORT=70000 LOCKSTEP_GENERATION=1.5 LOCKSTEP_BIND=here LOCKSTEP_LISTEN_FD=1",
            &[
                "RANK=\"-1\"",
                "WORLD_SIZE=\"two\"",
                "GROUP_RANK",
                "LOCKSTEP_GENERATION",
                "LOCKSTEP_BIND=\"here\" is not an IP address",
                "LOCKSTEP_LISTEN_FD=1",
                "MASTER_PORT=\"70000\"",
            ],
        ),
        (
            "RANK=0 WORLD_SIZE=2",
            &["MASTER_ADDR is not set, but only 1 of 2 ranks run on this host"],
        ),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", &["MASTER_PORT=0"]),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            &["MASTER_ADDR is not set, but only 2 of 4 ranks run on this host"],
        ),
        (
            "SLURM_PROCID=6",
            &["SLURM_NTASKS is not set", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE"],
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_TASKS_PER_NODE=1(x2) SLURM_JOB_NODELIST=n[1-2]",
            &["SLURM_TASKS_PER_NODE=\"1(x2)\" has no entry for node 2"],
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=1(x2) SLURM_JOB_NODELIST=n[1-",
            &["SLURM_JOB_NODELIST=\"n[1-\" is not a host list", "MASTER_ADDR"],
        ),
        (
            "LOCKSTEP_TOKEN=abc",
            &["the token in LOCKSTEP_TOKEN is not 64 hex digits (it has 3 characters)"],
        ),
    ];
    for (variables, expected) in cases {
        let error = read(variables).expect_err(variables);
        assert_eq!(error.errors.len(), expected.len(), "{variables}: {error}");
        for (message, part) in error.errors.iter().zip(*expected) {
            assert!(message.contains(part), "{variables}: {message}");
        }
    }
}

#[test]
fn precedence_of_generation_variables() {
    for (variables, generation) in [
        ("", 0),
        ("SLURM_RESTART_COUNT=3", 3),
        ("SLURM_RESTART_COUNT=3 TORCHELASTIC_RESTART_COUNT=2", 2),
        ("SLURM_RESTART_COUNT=3 TORCHELASTIC_RESTART_COUNT=2 LOCKSTEP_GENERATION=1", 1),
    ] {
        assert_eq!(read(variables).unwrap().generation, generation, "{variables}");
    }
}

#[test]
fn to_env_is_the_inverse_of_from_env() {
    let whole = Identity {
        rank: 5,
        size: 6,
        local_rank: 2,
        local_size: 3,
        node: 1,
        master_addr: "gpu001".into(),
        master_port: 4242,
        token: TokenSource::Env("0a".repeat(32)),
        generation: 7,
        bind: Some([10, 0, 0, 1].into()),
        listener_fd: Some(9),
        transport: Transport { socks5: Some(([10, 0, 0, 2], 1080).into()), encrypt: true },
        launcher: Launcher::Explicit,
    };
    let bare = Identity {
        bind: None,
        listener_fd: None,
        transport: Transport::default(),
        token: TokenSource::None,
        ..whole.clone()
    };
    let file = Identity { token: TokenSource::File("/etc/token".into()), ..bare.clone() };
    for identity in [whole, bare, file] {
        let env = to_env(&identity);
        assert!(env.iter().all(|(name, _)| VARIABLES.contains(&name.as_str())));
        let set: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(read(&set.join(" ")).unwrap(), identity);
    }
}
