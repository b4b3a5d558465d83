//! Who a process is among the ranks of its job, as its launcher told it through the environment.
//! Knows every launcher's dialect; never opens a connection and never reads a token file.

use std::fmt;

use lockstep_comm::{Identity, Launcher, TokenSource};

use super::sources::{self, Place};
use super::vars::Vars;

/// Where ranks meet when nobody chose a port; the same as torchrun's.
pub const DEFAULT_PORT: u16 = 29500;

/// Where the launcher keeps the logs of the ranks, for what else a rank leaves behind.
pub const LOG_DIR: &str = "LOCKSTEP_LOG_DIR";

/// Which of its node's places a rank has been given. Its local rank, unless a place before it was taken out.
pub const SLOT: &str = "LOCKSTEP_SLOT";

/// Every variable that [`to_env`] may set. A launcher clears them all first, so that
/// nothing is left over from a launcher around it.
pub const VARIABLES: [&str; 13] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCKSTEP_TOKEN",
    "LOCKSTEP_TOKEN_FILE",
    "LOCKSTEP_GENERATION",
    "LOCKSTEP_BIND",
    "LOCKSTEP_LISTEN_FD",
];

/// Reads an identity from variables; every mistake in them is reported at once.
///
/// ```
/// use lockstep_launch::identity;
/// let set = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MASTER_ADDR", "node0")];
/// let env = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, v)| v.to_string());
/// let identity = identity::from_env(&env).unwrap();
/// assert_eq!((identity.rank, identity.size), (1, 2));
/// ```
pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Result<Identity, IdentityError> {
    let mut vars = Vars::new(env);
    let launcher = sources::most_specific(&vars);
    let place = sources::read(launcher, &mut vars);
    if let Some(place) = &place {
        check_place(place, &mut vars);
    }
    let identity = complete(launcher, place, &mut vars);
    let mistakes = vars.into_mistakes();
    match identity {
        Some(identity) if mistakes.is_empty() => Ok(identity),
        _ => Err(IdentityError { launcher, mistakes }),
    }
}

/// For the command line only; everything below it is handed its identity.
pub fn from_process_env() -> Result<Identity, IdentityError> {
    from_env(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
}

/// The variables from which [`from_env`] reads this identity back.
pub fn to_env(identity: &Identity) -> Vec<(String, String)> {
    let mut env = vec![
        ("RANK", identity.rank.to_string()),
        ("WORLD_SIZE", identity.size.to_string()),
        ("LOCAL_RANK", identity.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", identity.local_size.to_string()),
        ("GROUP_RANK", identity.node.to_string()),
        ("NODE_RANK", identity.node.to_string()),
        ("MASTER_ADDR", identity.master_addr.clone()),
        ("MASTER_PORT", identity.master_port.to_string()),
        ("LOCKSTEP_GENERATION", identity.generation.to_string()),
    ];
    match &identity.token {
        TokenSource::Env(hex) => env.push(("LOCKSTEP_TOKEN", hex.clone())),
        TokenSource::File(path) => {
            env.push(("LOCKSTEP_TOKEN_FILE", path.display().to_string()));
        }
        TokenSource::None => {}
    }
    env.extend(identity.bind.map(|ip| ("LOCKSTEP_BIND", ip.to_string())));
    env.extend(identity.listener_fd.map(|fd| ("LOCKSTEP_LISTEN_FD", fd.to_string())));
    env.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// What is wrong with the variables, all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityError {
    pub launcher: Launcher,
    pub mistakes: Vec<String>,
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the environment does not say which rank this is:")?;
        self.mistakes.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
    }
}

impl std::error::Error for IdentityError {}

fn check_place(place: &Place, vars: &mut Vars) {
    let names = &place.names;
    let below = |(small, s), (large, l)| {
        format!("{small}={s} is not below {large}={l}; ranks count from 0")
    };
    if place.rank >= place.size {
        vars.complain(below((names.rank, place.rank), (names.size, place.size)));
    }
    if place.local_rank >= place.local_size {
        vars.complain(below(
            (names.local_rank, place.local_rank),
            (names.local_size, place.local_size),
        ));
    }
    if place.local_size > place.size {
        vars.complain(format!(
            "{}={} is more than {}={}, the whole job",
            names.local_size, place.local_size, names.size, place.size
        ));
    }
}

/// Adds what is the same under every launcher. Reads on without a place, to find all mistakes.
fn complete(launcher: Launcher, place: Option<Place>, vars: &mut Vars) -> Option<Identity> {
    let generation = vars.first_number(&[
        "LOCKSTEP_GENERATION",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_RESTART_COUNT",
    ]);
    let bind = vars.parsed("LOCKSTEP_BIND", "an IP address");
    let listener_fd = listener_fd(vars);
    let token = token(vars);
    let port: Option<u16> = vars.number("MASTER_PORT");
    let place = place?;
    let master_addr = master_addr(&place, vars)?;
    let master_port = port.or(place.master.1).unwrap_or(DEFAULT_PORT);
    if master_port == 0 && place.size > 1 {
        vars.complain("MASTER_PORT=0 is no port to meet at; give all ranks the same free one");
    }
    Some(Identity {
        rank: place.rank,
        size: place.size,
        local_rank: place.local_rank,
        local_size: place.local_size,
        node: place.node,
        master_addr,
        master_port,
        token,
        generation: generation.unwrap_or(0),
        bind,
        listener_fd,
        launcher,
    })
}

fn master_addr(place: &Place, vars: &mut Vars) -> Option<String> {
    let told = vars
        .text("MASTER_ADDR")
        .or_else(|| place.master.0.clone())
        .or_else(|| (place.local_size == place.size).then(|| "127.0.0.1".to_string()));
    if told.is_none() {
        vars.complain(format!(
            "{} of {} ranks run on this host, so the others need MASTER_ADDR; set it to the host of rank 0",
            place.local_size, place.size
        ));
    }
    told
}

fn listener_fd(vars: &mut Vars) -> Option<i32> {
    let fd = vars.number("LOCKSTEP_LISTEN_FD")?;
    if fd < 3 {
        vars.complain(format!("LOCKSTEP_LISTEN_FD={fd} is no inherited socket; unset it"));
    }
    Some(fd)
}

/// The token in the environment wins: a launcher that set it has read the file.
fn token(vars: &mut Vars) -> TokenSource {
    let source = match (vars.text("LOCKSTEP_TOKEN"), vars.text("LOCKSTEP_TOKEN_FILE")) {
        (Some(hex), _) => TokenSource::Env(hex),
        (None, Some(path)) => return TokenSource::File(path.into()),
        (None, None) => TokenSource::None,
    };
    if let Err(mistake) = source.load() {
        vars.complain(mistake);
    }
    source
}

#[cfg(test)]
#[path = "identity_tests.rs"]
mod tests;
