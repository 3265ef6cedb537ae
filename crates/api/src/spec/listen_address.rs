//! Where a listener of TCP is.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use super::address::{as_text, from_text};

/// An address of this host and a port, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenAddress(SocketAddr);

/// A text that is no such address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address to listen on: write numbers and a port, as in 192.168.1.5:10809 or [::]:10809")]
pub struct NotAListenAddress(String);

/// NBD's port (IANA's registry of service names).
const NBD_PORT: u16 = 10809;

impl ListenAddress {
    /// All addresses of this host, also those of IPv4 (ipv6(7), `IPV6_V6ONLY`), and NBD's port.
    pub fn usual() -> Self {
        ListenAddress(SocketAddr::from((Ipv6Addr::UNSPECIFIED, NBD_PORT)))
    }

    /// The address.
    pub fn address(&self) -> SocketAddr {
        self.0
    }
}

impl FromStr for ListenAddress {
    type Err = NotAListenAddress;

    fn from_str(text: &str) -> Result<Self, NotAListenAddress> {
        let wrong = || NotAListenAddress(text.chars().take(60).collect());
        text.parse().map(ListenAddress).map_err(|_| wrong())
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

as_text!(ListenAddress, {
    "type": "string",
    "description": "An address of this host in numbers, and a port, as 192.168.1.5:10809.",
});
from_text!(ListenAddress);
super::values!(ListenAddress: parsed;);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_numbers() {
        for good in ["127.0.0.1:10809", "[::]:1"] {
            assert_eq!(good.parse::<ListenAddress>().unwrap().to_string(), good);
        }
        for bad in ["", "host-a:10809", "127.0.0.1", ":10809", "1.2.3.4:99999"] {
            assert!(bad.parse::<ListenAddress>().is_err(), "{bad}");
        }
    }
}
