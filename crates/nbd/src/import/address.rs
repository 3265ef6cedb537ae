//! Where an export is: NBD's URIs (`doc/uri.md` of the protocol's repository).

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::percent_decode_str;
use tokio_rustls::rustls::pki_types::ServerName;
use url::{Host, Url};

use crate::error::NbdError;

/// Where servers listen that say nothing else.
const PORT: u16 = 10809;

/// Where the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    /// A host by name or number, and a port.
    Tcp {
        /// Without brackets.
        host: String,
        /// TCP.
        port: u16,
    },
    /// A socket of this host.
    Unix {
        /// Its path.
        path: PathBuf,
    },
}

/// Most of [`Address::also`].
const MOST_PLACES: usize = 8;

/// An export: `nbd://HOST[:PORT]/EXPORT`, with TLS `nbds://HOST[:PORT]/EXPORT`, or `nbd+unix:///EXPORT?socket=PATH`, with TLS
/// `nbds+unix:///EXPORT?socket=PATH&tls-hostname=HOST`. Without a name it is the server's default export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Where the server is.
    pub endpoint: ServerAddress,
    /// The export's name.
    pub export: String,
    /// With TLS, and only with it: the name that the server's certificate must have. That is the host, or the parameter `tls-hostname`, which a socket of
    /// this host needs.
    pub tls: Option<String>,
    /// More places of the same server: the parameters `also=HOST[:PORT]`, whose port is the first one's if they name none.
    pub also: Vec<(String, u16)>,
    text: String,
}

impl FromStr for Address {
    type Err = NbdError;

    fn from_str(text: &str) -> Result<Address, NbdError> {
        let wrong =
            |why: &str| NbdError::Address { address: text.chars().take(200).collect(), why: why.into() };
        let form = "write nbd://HOST[:PORT]/EXPORT, nbds://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH or nbds+unix:///EXPORT?socket=PATH&tls-hostname=HOST";
        let url = Url::parse(text).map_err(|error| wrong(&format!("{error}; {form}")))?;
        let decoded = |part: &str| {
            let text = percent_decode_str(part).decode_utf8().map_err(|_| wrong("it is not UTF-8"))?;
            if text.contains('\0') { Err(wrong("it contains a NUL")) } else { Ok(text.into_owned()) }
        };
        let export = decoded(url.path().strip_prefix('/').unwrap_or(url.path()))?;
        if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() {
            return Err(wrong("NBD has no users, passwords or fragments"));
        }
        let (mut socket, mut tls_hostname, mut also) = (None, None, Vec::new());
        let (tls, unix) = (url.scheme().starts_with("nbds"), url.scheme().ends_with("+unix"));
        for (key, value) in url.query_pairs() {
            match &*key {
                "socket" if socket.is_none() => socket = Some(PathBuf::from(&*value)),
                "tls-hostname" if tls && tls_hostname.is_none() => tls_hostname = Some(value.into_owned()),
                "also" if !unix && also.len() < MOST_PLACES => also.push(value.into_owned()),
                _ => return Err(wrong(&format!("parameter {key:?} is not known here"))),
            }
        }
        let endpoint = match (url.scheme(), socket) {
            ("nbd" | "nbds", None) => {
                let host = host(&url).ok_or_else(|| wrong("it names no host"))?;
                ServerAddress::Tcp { host, port: url.port().unwrap_or(PORT) }
            }
            ("nbd" | "nbds", Some(_)) => return Err(wrong("a socket needs nbd+unix, or nbds+unix with TLS")),
            ("nbds+unix", Some(_)) if tls_hostname.is_none() => {
                return Err(wrong("a socket has no name for a certificate: add &tls-hostname=HOST"));
            }
            ("nbd+unix" | "nbds+unix", Some(path))
                if url.host().is_none_or(|host| host == Host::Domain("")) =>
            {
                ServerAddress::Unix { path }
            }
            ("nbd+unix" | "nbds+unix", Some(_)) => {
                return Err(wrong("a socket takes no host: write three slashes"));
            }
            ("nbd+unix" | "nbds+unix", None) => return Err(wrong("it names no socket: add ?socket=PATH")),
            _ => return Err(wrong(form)),
        };
        let port = url.port().unwrap_or(PORT);
        let also = also.iter().map(|place| {
            let place = Url::parse(&format!("nbd://{place}")).ok().filter(|place| place.path().is_empty());
            let place = place.filter(|place| place.username().is_empty() && place.password().is_none());
            let place = place.filter(|place| place.query().is_none() && place.fragment().is_none());
            let host = place.as_ref().and_then(host)?;
            Some((host, place?.port().unwrap_or(port)))
        });
        let also: Option<Vec<_>> = also.collect();
        let also = also.ok_or_else(|| wrong("write also=HOST or also=HOST:PORT"))?;
        let host = match &endpoint {
            ServerAddress::Tcp { host, .. } if tls => Some(host.clone()),
            _ => None,
        };
        let tls = tls_hostname.or(host);
        if tls.as_ref().is_some_and(|name| ServerName::try_from(name.as_str()).is_err()) {
            return Err(wrong("no certificate can be for a host of that name"));
        }
        Ok(Address { endpoint, export, tls, also, text: text.into() })
    }
}

/// The host of a URI, without brackets. What is written in percent is not one.
fn host(url: &Url) -> Option<String> {
    match url.host()? {
        Host::Domain(name) => (!name.is_empty() && !name.contains('%')).then(|| name.to_owned()),
        Host::Ipv4(number) => Some(number.to_string()),
        Host::Ipv6(number) => Some(number.to_string()),
    }
}

impl Address {
    /// All places where the server is, in the order in which they are tried; none if that is a socket of this host.
    pub fn places(&self) -> impl Iterator<Item = (&str, u16)> {
        let first = match &self.endpoint {
            ServerAddress::Tcp { host, port } => Some((host.as_str(), *port)),
            ServerAddress::Unix { .. } => None,
        };
        first.into_iter().chain(self.also.iter().map(|(host, port)| (host.as_str(), *port)))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_say_what_they_mean() {
        let tcp = |host: &str, port| ServerAddress::Tcp { host: host.into(), port };
        let unix = |path: &str| ServerAddress::Unix { path: path.into() };
        for (text, endpoint, export) in [
            ("nbd://host-a/data", tcp("host-a", 10809), "data"),
            ("nbd://host-a:99/data", tcp("host-a", 99), "data"),
            ("nbd://10.0.0.1", tcp("10.0.0.1", 10809), ""),
            ("nbd://10.0.0.1/", tcp("10.0.0.1", 10809), ""),
            ("nbd://[fe80::1]:7/a/b", tcp("fe80::1", 7), "a/b"),
            ("nbd://h/a%20b%2Fc", tcp("h", 10809), "a b/c"),
            ("nbd://h//abs", tcp("h", 10809), "/abs"),
            ("nbd+unix:///data?socket=/run/a.sock", unix("/run/a.sock"), "data"),
            ("nbds+unix:///data?socket=/run/a.sock&tls-hostname=h", unix("/run/a.sock"), "data"),
            ("nbd+unix:///?socket=/run/a%20b", unix("/run/a b"), ""),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.endpoint, address.export.as_str()), (endpoint, export), "{text}");
        }
    }

    #[test]
    fn a_server_may_have_more_places() {
        let places = |text: &str| -> Vec<(String, u16)> {
            let address: Address = text.parse().unwrap();
            address.places().map(|(host, port)| (host.to_owned(), port)).collect()
        };
        let place = |host: &str, port| (host.to_owned(), port);
        assert_eq!(
            places(
                "nbds://host-a:99/data?also=10.1.0.1&also=[fe80::1]:7&tls-hostname=host-a&also=host-a.other:8"
            ),
            [place("host-a", 99), place("10.1.0.1", 99), place("fe80::1", 7), place("host-a.other", 8)]
        );
        assert_eq!(places("nbd://h/x"), [place("h", 10809)]);
        assert!(places("nbd+unix:///x?socket=/a").is_empty());
    }

    #[test]
    fn tls_asks_for_a_name() {
        for (text, name) in [
            ("nbd://host-a/data", None),
            ("nbd+unix:///data?socket=/run/a.sock", None),
            ("nbds://host-a/data", Some("host-a")),
            ("nbds://host-a:99", Some("host-a")),
            ("nbds://10.0.0.1/data", Some("10.0.0.1")),
            ("nbds://10.0.0.1/data?tls-hostname=host-a", Some("host-a")),
            ("nbds+unix:///data?socket=/run/a.sock&tls-hostname=host-a", Some("host-a")),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.tls.as_deref(), name, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, word) in [
            ("data", "nbd://HOST"),
            ("http://host/x", "nbd://HOST"),
            ("nbd:///x", "no host"),
            ("nbd://h/x?socket=/a", "nbd+unix"),
            ("nbd+unix:///x", "?socket=PATH"),
            ("nbd+unix://h/x?socket=/a", "three slashes"),
            ("nbd+unix:///x?socket=/a&tls=1", "\"tls\""),
            ("nbd://me@h/x", "no users"),
            ("nbds+unix:///x?socket=/a", "&tls-hostname=HOST"),
            ("nbds+unix:///x?tls-hostname=a", "?socket=PATH"),
            ("nbds+unix://h/x?socket=/a&tls-hostname=a", "three slashes"),
            ("nbds+unix:///x?socket=/a&tls-hostname=a&also=b", "\"also\""),
            ("nbd+unix:///x?socket=/a&tls-hostname=a", "\"tls-hostname\""),
            ("nbd://h/x?tls-hostname=a", "\"tls-hostname\""),
            ("nbds://h/x?tls-hostname=a%20b", "no certificate"),
            ("nbds://h/x?tls-hostname=a&tls-hostname=b", "not known"),
            ("nbd+unix:///x?socket=/a&also=b", "\"also\""),
            ("nbd://h/x?also=", "also=HOST"),
            ("nbd://h/x?also=a/b", "also=HOST"),
            ("nbd://h/x?also=me@a", "also=HOST"),
            ("nbd://h/x?also=a:99999", "also=HOST"),
            ("nbd://h/x?also=a%23b", "also=HOST"),
            ("nbd://h/x?also=:pw@a", "also=HOST"),
            ("nbd://h/x?also=a%3Fb%3Dc", "also=HOST"),
            ("nbd://h/x?also=1&also=2&also=3&also=4&also=5&also=6&also=7&also=8&also=9", "not known"),
            ("nbd://h/%00", "NUL"),
            ("nbd://h/%ff", "UTF-8"),
            ("nbd://h:99999/x", "port"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
