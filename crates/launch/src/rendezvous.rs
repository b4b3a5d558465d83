//! The listening socket of rank 0. The launcher binds it before any rank starts, so a port in use is an error at once
//! and a free port cannot be taken in between. Never accepts connections.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use lockstep_comm::listen_ip;

use super::identity::DEFAULT_PORT;
use super::spec::{LaunchError, LaunchSpec};

/// A cluster may publish the name of a new host a little late.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The port at which ranks meet, and the listening socket if rank 0 is on this node.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    pub port: u16,
    pub listener: Option<TcpListener>,
}

pub(crate) fn prepare(spec: &LaunchSpec) -> Result<Rendezvous, LaunchError> {
    let port = match spec.master_port {
        0 if spec.nnodes > 1 => DEFAULT_PORT,
        port => port,
    };
    if spec.node_rank != 0 {
        return Ok(Rendezvous { port, listener: None });
    }
    let (port, listener) = listen(spec, port)?;
    Ok(Rendezvous { port, listener: Some(listener) })
}

/// Listens at the address of rank 0, on `port` or, if it is 0, on a free one. Returns the port.
pub(crate) fn listen(spec: &LaunchSpec, port: u16) -> Result<(u16, TcpListener), LaunchError> {
    let listener = bind(spec, port)?;
    match listener.local_addr() {
        Ok(address) => Ok((address.port(), listener)),
        Err(cause) => Err(LaunchError::System { action: "query the port of a socket", cause }),
    }
}

fn bind(spec: &LaunchSpec, port: u16) -> Result<TcpListener, LaunchError> {
    let at = SocketAddr::new(address(spec)?, port);
    TcpListener::bind(at).map_err(|cause| LaunchError::Listen { at, cause })
}

/// `--bind`, or the address that the master address names.
fn address(spec: &LaunchSpec) -> Result<IpAddr, LaunchError> {
    if let Some(ip) = spec.bind {
        return Ok(ip);
    }
    let host = &spec.master_addr;
    let deadline = Instant::now() + RESOLVE_TIMEOUT;
    let ip = loop {
        match listen_ip(host) {
            Ok(ip) => break ip,
            Err(cause) if spec.nnodes == 1 || Instant::now() >= deadline => {
                return Err(LaunchError::Address { host: host.to_string(), cause });
            }
            Err(cause) => {
                tracing::warn!("cannot resolve {host} yet: {cause}");
                std::thread::sleep(Duration::from_secs(5));
            }
        }
    };
    // Many hosts resolve their own name to 127.0.1.1.
    if spec.nnodes > 1 && ip.is_loopback() {
        tracing::warn!(
            "{host} is {ip} on this host, where other hosts cannot reach it; if there are any, set --bind to an \
             address of this host"
        );
    }
    Ok(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_addresses() {
        for (nnodes, host, bind, expected) in [
            (1, "127.0.0.1", None, "127.0.0.1"),
            (1, "127.0.0.1", Some("0.0.0.0"), "0.0.0.0"),
            (2, "127.0.0.1", None, "127.0.0.1"),
            (2, "127.0.0.3", None, "127.0.0.3"),
            (2, "some-host", Some("10.9.9.9"), "10.9.9.9"),
        ] {
            let spec = LaunchSpec {
                nnodes,
                master_addr: host.to_string(),
                bind: bind.map(|ip| ip.parse().unwrap()),
                ..LaunchSpec::local(1, vec!["true".into()], "logs".into())
            };
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(address(&spec).unwrap(), expected, "{nnodes} {host}");
        }
    }

    #[test]
    fn a_host_name_of_several_nodes_does_not_listen_on_all_addresses() {
        let spec = LaunchSpec {
            nnodes: 2,
            master_addr: "localhost".to_string(),
            ..LaunchSpec::local(1, vec!["true".into()], "logs".into())
        };
        let (_, listener) = listen(&spec, 0).unwrap();
        assert!(listener.local_addr().unwrap().ip().is_loopback());
    }

    #[test]
    fn picks_a_free_port_and_rejects_one_in_use() {
        let mut spec = LaunchSpec::local(1, vec!["true".into()], "logs".into());
        let first = prepare(&spec).unwrap();
        assert_ne!(first.port, 0);
        spec.master_port = first.port;
        let error = prepare(&spec).expect_err("the port is in use");
        assert!(error.to_string().contains("in use"), "{error}");
    }
}
