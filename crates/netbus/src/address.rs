//! Where a directory is.

use std::fmt;
use std::str::FromStr;

use crate::DEFAULT_PORT;
use crate::error::NetbusError;
use crate::names::{is_host, shown};

/// Where a directory is: `HOST[:PORT]`, an IPv6 address in brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryAddress {
    /// A name or an address.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The name in its certificate, if that is not `host`.
    pub tls_hostname: Option<String>,
}

impl FromStr for DirectoryAddress {
    type Err = NetbusError;

    fn from_str(text: &str) -> Result<Self, NetbusError> {
        DirectoryAddress::with_port(text, DEFAULT_PORT)
    }
}

impl DirectoryAddress {
    /// Reads `HOST[:PORT]`; `usual` is the port if none is there.
    pub(crate) fn with_port(text: &str, usual: u16) -> Result<DirectoryAddress, NetbusError> {
        let bad = || NetbusError::Host(shown(text));
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(bad)?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_| bad())?;
                (host, port)
            }
            None => match text.rfind(':') {
                Some(at) => text.split_at(at),
                None => (text, ""),
            },
        };
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?,
            None if port.is_empty() => usual,
            None => return Err(bad()),
        };
        if !text.starts_with('[') && !is_host(host) {
            return Err(bad());
        }
        Ok(DirectoryAddress { host: host.to_owned(), port, tls_hostname: None })
    }
}

impl fmt::Display for DirectoryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, same) in [
            ("host-a", "host-a:10808"),
            ("host-a.example:7", "host-a.example:7"),
            ("10.0.0.1", "10.0.0.1:10808"),
            ("[::1]:99", "[::1]:99"),
            ("[fe80::1]", "[fe80::1]:10808"),
        ] {
            assert_eq!(text.parse::<DirectoryAddress>().unwrap().to_string(), same);
        }
        for bad in
            ["", ":1", "host:", "host:0", "host:99999", "::1", "[::1", "[x]:1", "[::1]x", "a b", "http://a"]
        {
            assert!(bad.parse::<DirectoryAddress>().is_err(), "{bad:?}");
        }
    }
}
