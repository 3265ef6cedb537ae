//! Sockets that listen by TCP.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

/// Clients that may wait to be accepted, as with the standard library.
const BACKLOG: i32 = 128;

/// Listens at `address`; `[::]` is all addresses of this host, also those of IPv4, whatever `net.ipv6.bindv6only` says (ipv6(7)).
///
/// # Errors
/// As of `socket(2)`, `bind(2)` and `listen(2)`.
pub fn tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        of_both_families(&socket)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

fn of_both_families(socket: &impl AsFd) -> io::Result<()> {
    Ok(set_ipv6_v6only(socket, false)?)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};

    use super::*;

    #[test]
    fn all_addresses_are_those_of_both_families() {
        let listener = match tcp((Ipv6Addr::UNSPECIFIED, 0).into()) {
            Ok(listener) => listener,
            Err(error) => return eprintln!("SKIPPED: this host has no IPv6: {error}"),
        };
        let v6only = |socket: &dyn AsFd| rustix::net::sockopt::ipv6_v6only(socket.as_fd()).unwrap();
        assert!(!v6only(&listener));
        // As where net.ipv6.bindv6only is 1.
        let socket =
            socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        set_ipv6_v6only(&socket, true).unwrap();
        of_both_families(&socket).unwrap();
        assert!(!v6only(&socket));
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // What is taken is taken, also by the other family.
        let other = tcp((Ipv4Addr::LOCALHOST, port).into()).map(drop);
        assert_eq!(other.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
