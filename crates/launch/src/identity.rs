//! Identities as environment variables: reads those of every supported launcher, writes those of torchrun. Never opens
//! a connection and never reads a token file.

use std::fmt;

use lockstep_comm::{Identity, Launcher, TokenSource, Transport};

use super::detect::{self, Placement};
use super::vars::Vars;

/// Default rendezvous port; the same as torchrun's.
pub const DEFAULT_PORT: u16 = 29500;

/// Directory of the ranks' logs, for other files that a rank writes.
pub const LOG_DIR: &str = "LOCKSTEP_LOG_DIR";

/// Slot of the node that a rank runs in. Equals its local rank unless a lower slot was excluded after failures.
pub(super) const SLOT: &str = "LOCKSTEP_SLOT";

/// The slot of this process, if a launcher set it. It selects the rank's GPU, so that the ranks after an excluded one keep
/// theirs.
pub fn slot_from_process_env() -> Option<usize> {
    std::env::var(SLOT).ok()?.parse().ok()
}

/// Every variable that [`to_env`] may set. A launcher clears them all first, so that none is inherited from a launcher
/// around it.
pub(super) const VARIABLES: [&str; 15] = [
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
    "LOCKSTEP_SOCKS5",
    "LOCKSTEP_ENCRYPT",
];

/// Reads an identity from variables. All errors are reported together.
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
    let launcher = detect::launcher(&vars);
    let placement = detect::placement(launcher, &mut vars);
    if let Some(placement) = &placement {
        check(placement, &mut vars);
    }
    let identity = complete(launcher, placement, &mut vars);
    let errors = vars.into_errors();
    match identity {
        Some(identity) if errors.is_empty() => Ok(identity),
        _ => Err(IdentityError { launcher, errors }),
    }
}

/// Reads the identity of this process. For the command line only; everything below it receives its identity as a value.
pub fn from_process_env() -> Result<Identity, IdentityError> {
    from_env(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
}

/// How a process that starts ranks, and its ranks, connect to others. For the command line only.
pub fn transport_from_process_env() -> Result<Transport, IdentityError> {
    let env = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    let mut vars = Vars::new(&env);
    let (transport, launcher) = (transport(&mut vars), detect::launcher(&vars));
    let errors = vars.into_errors();
    if errors.is_empty() { Ok(transport) } else { Err(IdentityError { launcher, errors }) }
}

/// The variables from which [`from_env`] reads this identity back.
pub(crate) fn to_env(identity: &Identity) -> Vec<(String, String)> {
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
    env.extend(identity.transport.socks5.map(|proxy| ("LOCKSTEP_SOCKS5", proxy.to_string())));
    env.extend(identity.transport.encrypt.then(|| ("LOCKSTEP_ENCRYPT", "1".to_string())));
    env.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// All errors in the variables of one launcher.
#[derive(Clone, PartialEq, Eq)]
pub struct IdentityError {
    pub launcher: Launcher,
    pub errors: Vec<String>,
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot determine this process's rank from the environment:")?;
        self.errors.iter().try_for_each(|error| write!(f, "\n  {error}"))
    }
}

impl std::error::Error for IdentityError {}

fn check(placement: &Placement, vars: &mut Vars) {
    let names = &placement.names;
    let out_of_range = |(index, i), (count, n)| {
        format!("{index}={i} is out of range: {count}={n}, and ranks count from 0")
    };
    if placement.rank >= placement.size {
        vars.error(out_of_range((names.rank, placement.rank), (names.size, placement.size)));
    }
    if placement.local_rank >= placement.local_size {
        vars.error(out_of_range(
            (names.local_rank, placement.local_rank),
            (names.local_size, placement.local_size),
        ));
    }
    if placement.local_size > placement.size {
        vars.error(format!(
            "{}={} is larger than the whole job ({}={})",
            names.local_size, placement.local_size, names.size, placement.size
        ));
    }
}

/// Adds the settings that are the same under every launcher. Without a placement it still reads them, to find all
/// errors.
fn complete(launcher: Launcher, placement: Option<Placement>, vars: &mut Vars) -> Option<Identity> {
    let generation = vars.first_number(&[
        "LOCKSTEP_GENERATION",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_RESTART_COUNT",
    ]);
    let bind = vars.parsed("LOCKSTEP_BIND", "an IP address");
    let listener_fd = listener_fd(vars);
    let transport = transport(vars);
    let token = token(vars);
    let port: Option<u16> = vars.number("MASTER_PORT");
    let placement = placement?;
    let master_addr = master_addr(&placement, vars)?;
    let master_port = port.or(placement.master.1).unwrap_or(DEFAULT_PORT);
    if master_port == 0 && placement.size > 1 {
        vars.error("MASTER_PORT=0 is not a port; give all ranks the same free port");
    }
    Some(Identity {
        rank: placement.rank,
        size: placement.size,
        local_rank: placement.local_rank,
        local_size: placement.local_size,
        node: placement.node,
        master_addr,
        master_port,
        token,
        generation: generation.unwrap_or(0),
        bind,
        listener_fd,
        transport,
        launcher,
    })
}

fn master_addr(placement: &Placement, vars: &mut Vars) -> Option<String> {
    let one_host = placement.local_size == placement.size;
    let address = vars
        .text("MASTER_ADDR")
        .or_else(|| placement.master.0.clone())
        .or_else(|| one_host.then(|| "127.0.0.1".to_string()));
    if address.is_none() {
        vars.error(format!(
            "MASTER_ADDR is not set, but only {} of {} ranks run on this host; set it to the host of rank 0",
            placement.local_size, placement.size
        ));
    }
    address
}

fn listener_fd(vars: &mut Vars) -> Option<i32> {
    let fd = vars.number("LOCKSTEP_LISTEN_FD")?;
    if fd < 3 {
        vars.error(format!("LOCKSTEP_LISTEN_FD={fd} is not an inherited socket; unset it"));
    }
    Some(fd)
}

fn transport(vars: &mut Vars) -> Transport {
    let encrypt = match vars.text("LOCKSTEP_ENCRYPT").as_deref() {
        None | Some("0" | "false") => false,
        Some("1" | "true") => true,
        // Never less secure than the user may have meant.
        Some(other) => {
            vars.error(format!("LOCKSTEP_ENCRYPT={other:?} is not valid; use 0 or 1"));
            true
        }
    };
    Transport {
        socks5: vars.parsed("LOCKSTEP_SOCKS5", "an IP address and port (IP:PORT)"),
        encrypt,
    }
}

/// LOCKSTEP_TOKEN takes precedence: a launcher that set it has already read the file.
fn token(vars: &mut Vars) -> TokenSource {
    let source = match (vars.text("LOCKSTEP_TOKEN"), vars.text("LOCKSTEP_TOKEN_FILE")) {
        (Some(hex), _) => TokenSource::Env(hex),
        (None, Some(path)) => return TokenSource::File(path.into()),
        (None, None) => TokenSource::None,
    };
    if let Err(error) = source.load() {
        vars.error(error);
    }
    source
}

#[cfg(test)]
#[path = "identity_tests.rs"]
mod tests;
