//! The socket on which rank 0 awaits the others, bound by its launcher before any rank starts: so a
//! taken port is an error at once and a free one cannot be lost in between. Never accepts.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use super::identity::DEFAULT_PORT;
use super::spec::{LaunchError, LaunchSpec};

/// Where the ranks meet, and the listening socket if rank 0 is one of ours.
pub(crate) struct Meeting {
    pub port: u16,
    pub listener: Option<TcpListener>,
}

pub(crate) fn arrange(spec: &LaunchSpec) -> Result<Meeting, LaunchError> {
    let port = match spec.master_port {
        0 if spec.nnodes > 1 => DEFAULT_PORT,
        port => port,
    };
    if spec.node_rank != 0 {
        return Ok(Meeting { port, listener: None });
    }
    open(spec, port)
}

/// Listens where rank 0 is to be met; 0 is a free port.
pub(crate) fn open(spec: &LaunchSpec, port: u16) -> Result<Meeting, LaunchError> {
    let listener = listen(spec, port)?;
    let port = match listener.local_addr() {
        Ok(address) => address.port(),
        Err(cause) => {
            let act = "ask a socket for its port";
            return Err(LaunchError::System { act, cause });
        }
    };
    Ok(Meeting { port, listener: Some(listener) })
}

fn listen(spec: &LaunchSpec, port: u16) -> Result<TcpListener, LaunchError> {
    let (ip, otherwise) = address(spec)?;
    let bind = |ip| {
        let at = SocketAddr::new(ip, port);
        TcpListener::bind(at).map_err(|cause| LaunchError::Listen { at, cause })
    };
    match (bind(ip), otherwise) {
        (Err(LaunchError::Listen { cause, .. }), Some(any))
            if cause.kind() == io::ErrorKind::AddrNotAvailable =>
        {
            bind(any)
        }
        (result, _) => result,
    }
}

/// The address to listen on, and one to try where that is not an address of this host.
fn address(spec: &LaunchSpec) -> Result<(IpAddr, Option<IpAddr>), LaunchError> {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    if let Some(ip) = spec.bind {
        return Ok((ip, None));
    }
    match spec.master_addr.parse() {
        // In a cluster the master's address may be a service that forwards to this host.
        Ok(IpAddr::V6(ip)) => Ok((ip.into(), Some(Ipv6Addr::UNSPECIFIED.into()))),
        Ok(IpAddr::V4(ip)) => Ok((ip.into(), Some(any))),
        // Many hosts know their own name as 127.0.1.1, where no other node could reach them.
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
    fn where_rank_0_listens() {
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
    fn a_free_port_is_taken_and_a_taken_one_is_an_error() {
        let mut spec = LaunchSpec::local(1, vec!["true".into()], "logs".into());
        let first = arrange(&spec).unwrap();
        assert_ne!(first.port, 0);
        spec.master_port = first.port;
        let error = arrange(&spec).err().expect("the port is taken");
        assert!(error.to_string().contains("in use"), "{error}");
    }
}
