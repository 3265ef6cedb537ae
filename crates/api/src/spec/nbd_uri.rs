//! Where an NBD server's export is.

use std::fmt;
use std::str::FromStr;

use super::address::{as_text, from_text};
use super::checks::name_flaw;

/// Longest URI: a name has up to 4096 bytes in the protocol, and each may take three characters here.
const LONGEST: usize = 3 * 4096 + 512;
/// How the URIs begin that are understood (the NBD URI specification, "NBD URI scheme").
const SCHEMES: [&str; 4] = ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"];

/// An NBD URI: `nbd://HOST[:PORT]/EXPORT`, with TLS `nbds://HOST[:PORT]/EXPORT`, or `nbd+unix:///EXPORT?socket=PATH` (`nbds+unix` with TLS). Whoever connects reads the rest of it.
/// Or the name of a device, as the directory has it: whoever connects asks the directory where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri(String);

/// A text that is no such URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is neither the name of a device nor an NBD URI: write NAME as `ioplane devices` has it, nbds://HOST/EXPORT, nbd://HOST/EXPORT without TLS, or nbd+unix:///EXPORT?socket=PATH (with TLS nbds+unix:///EXPORT?socket=PATH&tls-hostname=HOST)"
)]
pub struct NotAnNbdUri(String);

impl NbdUri {
    /// Where other hosts find an export of TCP: at the first of `places`, each `HOST:PORT`, or else at the others; nothing without a place. `tls`: the name in the
    /// certificate of the host that has it, if it is served by TLS only.
    pub fn of_export(
        export: &str,
        places: impl IntoIterator<Item = String>,
        tls: Option<&str>,
    ) -> Option<Result<NbdUri, NotAnNbdUri>> {
        let mut places = places.into_iter();
        let first = places.next()?;
        let scheme = if tls.is_some() { "nbds" } else { "nbd" };
        let name = tls.map(|host| format!("tls-hostname={host}"));
        let also = places.map(|place| format!("also={place}"));
        let parameters: Vec<String> = name.into_iter().chain(also).collect();
        let query = if parameters.is_empty() { String::new() } else { format!("?{}", parameters.join("&")) };
        Some(format!("{scheme}://{first}/{export}{query}").parse())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The same without further places of the server (`also=`): what names the export, wherever it is reached.
    pub fn export(&self) -> String {
        let Some((place, query)) = self.0.split_once('?') else { return self.0.clone() };
        let named: Vec<&str> = query.split('&').filter(|parameter| !parameter.starts_with("also=")).collect();
        if named.is_empty() { place.to_owned() } else { format!("{place}?{}", named.join("&")) }
    }

    /// The name of a device, if it is no URI.
    pub fn device(&self) -> Option<&str> {
        (!self.0.contains("://")).then_some(self.as_str())
    }
}

impl FromStr for NbdUri {
    type Err = NotAnNbdUri;

    fn from_str(text: &str) -> Result<Self, NotAnNbdUri> {
        let rest = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme));
        let graphic = text.bytes().all(|byte| byte.is_ascii_graphic());
        let good = graphic && text.len() <= LONGEST && rest.is_some_and(|rest| !rest.is_empty());
        let good = good || name_flaw(text).is_none();
        if good { Ok(NbdUri(text.to_owned())) } else { Err(NotAnNbdUri(text.chars().take(60).collect())) }
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

as_text!(NbdUri, {
    "type": "string",
    "description": "An NBD URI, as nbds://host-a/data, or the name of a device in the directory, as data.",
    "pattern": "^(nbds?(\\+unix)?://.|[0-9A-Za-z][0-9A-Za-z._-]{0,39}$)",
});
from_text!(NbdUri);
super::values!(NbdUri: parsed | "remote" => NbdUri("nbd://localhost/".to_owned()););

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_the_same_wherever_it_is_reached() {
        let export = |text: &str| text.parse::<NbdUri>().unwrap().export();
        for text in ["data", "nbd://h/x", "nbds://1.2.3.4/x?tls-hostname=h", "nbd+unix:///x?socket=/a"] {
            assert_eq!(export(text), text);
        }
        assert_eq!(export("nbd://h/x?also=i"), "nbd://h/x");
        assert_eq!(export("nbds://h/x?also=i&tls-hostname=h&also=j:7"), "nbds://h/x?tls-hostname=h");
    }

    #[test]
    fn what_is_no_nbd_uri_is_refused() {
        for good in [
            "nbd://host-a/data",
            "nbd://[::1]:10810/",
            "nbds://host-a/data",
            "nbd+unix:///data?socket=/run/x.sock",
            "nbds+unix:///data?socket=/run/x.sock&tls-hostname=host-a",
        ] {
            assert_eq!(good.parse::<NbdUri>().unwrap().to_string(), good);
        }
        assert_eq!("data-1".parse::<NbdUri>().unwrap().device(), Some("data-1"));
        assert_eq!("nbds://host-a/data".parse::<NbdUri>().unwrap().device(), None);
        for bad in [
            "",
            "-data",
            "data/x",
            "nbd://",
            "nbds+unix://",
            "nbds+tcp://host/data",
            "http://host/data",
            "nbd://host/da ta",
            "nbd://h/\n",
        ] {
            assert!(bad.parse::<NbdUri>().is_err(), "{bad:?}");
        }
        assert!(format!("nbd://host/{}", "x".repeat(LONGEST)).parse::<NbdUri>().is_err());
    }
}
