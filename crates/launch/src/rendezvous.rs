//! The listening socket of rank 0. The launcher binds it before any rank starts, so a port in use is an error at once
//! and a free port cannot be taken in between. Never accepts connections.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use super::identity::DEFAULT_PORT;
use super::spec::{LaunchError, LaunchSpec};

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
    let (ip, fallback) = address(spec)?;
    let bind = |ip| {
        let at = SocketAddr::new(ip, port);
        TcpListener::bind(at).map_err(|cause| LaunchError::Listen { at, cause })
    };
    match (bind(ip), fallback) {
        (Err(LaunchError::Listen { cause, .. }), Some(any))
            if cause.kind() == io::ErrorKind::AddrNotAvailable =>
        {
            bind(any)
        }
        (result, _) => result,
    }
}

/// The address to listen on, and a fallback if that is not an address of this host.
fn address(spec: &LaunchSpec) -> Result<(IpAddr, Option<IpAddr>), LaunchError> {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    if let Some(ip) = spec.bind {
        return Ok((ip, None));
    }
    match spec.master_addr.parse() {
        // In a cluster the master address may be a service that forwards to this host.
        Ok(IpAddr::V6(ip)) => Ok((ip.into(), Some(Ipv6Addr::UNSPECIFIED.into()))),
        Ok(IpAddr::V4(ip)) => Ok((ip.into(), Some(any))),
        // Many hosts resolve their own name to 127.0.1.1, where no other node can reach them.
        Err(_) if spec.nnodes > 1 => Ok((any, None)),
        Err(_) => Ok((resolve(&spec.master_addr)?, None)),
    }
}

fn resolve(host: &str) -> Result<IpAddr, LaunchError> {
    let unknown = |cause| LaunchError::Address { host: host.to_string(), cause };
    let mut found = (host, 0).to_socket_addrs().map_err(unknown)?;
    let first = found.next().ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?;
    Ok(first.ip())
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
            (2, "some-host", None, "0.0.0.0"),
            (2, "10.1.2.3", None, "10.1.2.3"),
            (2, "some-host", Some("10.9.9.9"), "10.9.9.9"),
        ] {
            let spec = LaunchSpec {
                nnodes,
                master_addr: host.to_string(),
                bind: bind.map(|ip| ip.parse().unwrap()),
                ..LaunchSpec::local(1, vec!["true".into()], "logs".into())
            };
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(address(&spec).unwrap().0, expected, "{nnodes} {host}");
        }
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
