//! Client side of SOCKS5 (RFC 1928): asks a proxy to connect to an IP address, without authentication.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};

/// Asks the proxy at the other end of `stream` to connect to `addr`; afterwards the stream leads there.
pub(super) fn request(stream: &mut (impl Read + Write), addr: SocketAddr) -> io::Result<()> {
    // Version 5, one method: no authentication.
    stream.write_all(&[5, 1, 0])?;
    if read::<2>(stream)? != [5, 0] {
        return Err(io::Error::other("the SOCKS5 proxy refuses connections without a password"));
    }
    // CONNECT; address type 1 is IPv4, 4 is IPv6.
    let mut request = vec![5, 1, 0];
    match addr.ip() {
        IpAddr::V4(ip) => request.extend([&[1], &ip.octets()[..]].concat()),
        IpAddr::V6(ip) => request.extend([&[4], &ip.octets()[..]].concat()),
    }
    request.extend(addr.port().to_be_bytes());
    stream.write_all(&request)?;
    let [_, code, _, kind] = read::<4>(stream)?;
    match code {
        0 => {}
        3 | 4 => return Err(io::ErrorKind::HostUnreachable.into()),
        5 => return Err(io::ErrorKind::ConnectionRefused.into()),
        code => return Err(io::Error::other(format!("the SOCKS5 proxy reports error {code}"))),
    }
    // The address from which the proxy connects, which nobody needs.
    match kind {
        1 => read::<6>(stream).map(drop),
        4 => read::<18>(stream).map(drop),
        _ => Err(io::Error::other("the SOCKS5 proxy sent an invalid answer")),
    }
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
