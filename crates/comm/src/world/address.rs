//! Addresses of this host: where rank 0 listens, and where others reach this process. Never all addresses,
//! unless the user asks for it.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

/// The address at which rank 0 listens if `host` names it: that address if this host has it, or else the local
/// address of a route to it, since it may be a service that forwards to this host. Loopback stays loopback.
pub fn listen_ip(host: &str) -> io::Result<IpAddr> {
    let found: Vec<IpAddr> = (host, 0).to_socket_addrs()?.map(|address| address.ip()).collect();
    let own = || found.iter().filter(|ip| is_own(**ip));
    match own().find(|ip| !ip.is_loopback()).or(own().next()) {
        Some(ip) => Ok(*ip),
        None => {
            let first = found.first().ok_or(io::ErrorKind::NotFound)?;
            // The port does not matter for a route, but it must not be 0.
            local_ip_towards((*first, 1).into())
        }
    }
}

/// Local address of a route to `there`.
pub(crate) fn local_ip_towards(there: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match there {
        SocketAddr::V4(_) => [0, 0, 0, 0].into(),
        SocketAddr::V6(_) => [0u16; 8].into(),
    };
    // Connecting a datagram socket sends nothing; it only selects a route.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(there)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether it is an address of this host.
fn is_own(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_do_not_listen_on_all_addresses() {
        for host in ["localhost", "127.0.0.1", "127.0.0.2"] {
            let ip = listen_ip(host).unwrap();
            assert!(ip.is_loopback(), "{host}: {ip}");
        }
        assert_eq!(listen_ip("127.0.0.2").unwrap(), IpAddr::from([127, 0, 0, 2]));
        assert!(listen_ip("no-such-host.invalid").is_err());
    }

    #[test]
    fn an_address_of_another_host_is_replaced_by_one_of_this_host() {
        // A documentation address that no host has. Without any route there is nothing to listen on.
        if let Ok(ip) = listen_ip("192.0.2.1") {
            assert!(is_own(ip) && !ip.is_unspecified(), "{ip}");
        }
    }
}
