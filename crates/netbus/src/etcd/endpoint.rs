//! Where a member of etcd is.

use std::fmt;
use std::str::FromStr;

use crate::address::DirectoryAddress;
use crate::error::NetbusError;
use crate::names::{is_host, shown};

/// The port of etcd if nothing else is said.
pub const ETCD_PORT: u16 = 2379;

/// A member of etcd: `http://HOST[:PORT]`, or `https://HOST[:PORT][?tls-hostname=NAME]`, where NAME is the name in its certificate if that is not HOST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    pub(super) address: DirectoryAddress,
    tls: bool,
}

impl EtcdEndpoint {
    /// Whether it is asked with TLS.
    pub fn tls(&self) -> bool {
        self.tls
    }
}

impl FromStr for EtcdEndpoint {
    type Err = NetbusError;

    fn from_str(text: &str) -> Result<Self, NetbusError> {
        let bad = || NetbusError::Endpoint(shown(text));
        let (tls, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(bad()),
        };
        let (place, name) = match rest.split_once("?tls-hostname=") {
            Some((place, name)) if tls && is_host(name) => (place, Some(name.to_ascii_lowercase())),
            Some(_) => return Err(bad()),
            None => (rest, None),
        };
        let place = place.strip_suffix('/').unwrap_or(place);
        let address = DirectoryAddress::with_port(place, ETCD_PORT).map_err(|_| bad())?;
        Ok(EtcdEndpoint { address: DirectoryAddress { tls_hostname: name, ..address }, tls })
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.address)?;
        match &self.address.tls_hostname {
            Some(name) => write!(f, "?tls-hostname={name}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written() {
        for (text, same) in [
            ("http://127.0.0.1:2379", "http://127.0.0.1:2379"),
            ("http://[::1]/", "http://[::1]:2379"),
            ("https://host-a", "https://host-a:2379"),
            ("https://10.0.0.1:7?tls-hostname=Host-A", "https://10.0.0.1:7?tls-hostname=host-a"),
        ] {
            assert_eq!(text.parse::<EtcdEndpoint>().unwrap().to_string(), same);
        }
        for bad in [
            "",
            "host-a",
            "ftp://host-a",
            "http://",
            "http://host-a:0",
            "http://host-a/v3",
            "http://a@host-a",
            "http://host-a?tls-hostname=b",
            "https://host-a?tls-hostname=",
            "https://host-a?tls-hostname=../b",
            "https://host a",
        ] {
            let error = bad.parse::<EtcdEndpoint>().unwrap_err();
            assert!(matches!(error, NetbusError::Endpoint(_)), "{bad:?}: {error}");
        }
    }
}
