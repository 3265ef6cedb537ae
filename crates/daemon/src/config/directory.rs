//! `[directory]`: where the directory of published devices is.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ioplane_api::spec::{FieldSource, HostList, ListenAddress};
use ioplane_netbus::DirectoryAddress;

use super::reader::{Place, TableReader};

/// Most addresses of this host that others are told.
const MOST_ADDRESSES: usize = 4;

/// A directory, and how this host speaks with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectorySpec {
    pub place: DirectoryPlace,
    /// In plain text, under this name.
    pub plain: Option<String>,
    /// Where others reach exports that listen at every address of this host, in the order in which they try.
    pub addresses: Vec<IpAddr>,
}

/// Who serves the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectoryPlace {
    /// This daemon; by default the file is in its state directory.
    Own { listen: SocketAddr, file: Option<PathBuf> },
    /// Another one.
    At(DirectoryAddress),
}

/// `None` if there is a problem.
pub fn directory(mut reader: TableReader<'_, '_>) -> (Option<DirectorySpec>, Place) {
    let listen: Option<ListenAddress> = reader.parsed("listen");
    let file = reader.path("file");
    let at = reader.text("at").and_then(|text| match text.parse::<DirectoryAddress>() {
        Ok(address) => Some(address),
        Err(_) => {
            let reason = format!("at = {text:?} is no place of a directory");
            reader.note("at", reason, "write a host and perhaps a port, as in \"host-a:10808\"".to_owned());
            None
        }
    });
    let tls_hostname = name(&mut reader, "tls_hostname");
    let (plain, host) = (reader.switch("plain").unwrap_or(false), name(&mut reader, "host"));
    let addresses = reader.text("address").map(|text| {
        let address = |text: &str| text.trim().parse::<IpAddr>().ok().filter(|address| !address.is_unspecified());
        let addresses: Option<Vec<IpAddr>> = text.split(',').map(address).collect();
        let addresses = addresses.filter(|addresses| addresses.len() <= MOST_ADDRESSES);
        if addresses.is_none() {
            let reason = format!("address = {text:?} is no address of this host");
            let remedy = "write it in numbers, as in \"10.0.0.1\", or up to four of them, as in \"10.0.0.1, 10.1.0.1\"";
            reader.note("address", reason, remedy.to_owned());
        }
        addresses.unwrap_or_default()
    });
    let addresses = addresses.unwrap_or_default();
    let alone = [
        ("file", file.is_some() && listen.is_none(), "it is of the host that has `listen`"),
        ("tls_hostname", tls_hostname.is_some() && (at.is_none() || plain), "it goes with `at` and TLS"),
        ("host", host.is_some() && !plain, "with TLS a host is called as its certificate says"),
    ];
    for (field, _, why) in alone.iter().filter(|(_, wrong, _)| *wrong) {
        reader.note(field, format!("{field} has no meaning here"), format!("leave it out: {why}"));
    }
    let place = match (listen, at) {
        (Some(listen), None) => Some(DirectoryPlace::Own { listen: listen.address(), file }),
        (None, Some(at)) => {
            Some(DirectoryPlace::At(DirectoryAddress { tls_hostname: tls_hostname.filter(|_| !plain), ..at }))
        }
        (None, None) if reader.has("listen") || reader.has("at") => None,
        (listen, _) => {
            let reason = if listen.is_some() { "both listen and at" } else { "neither listen nor at" };
            let remedy = "write listen = \"ADDRESS:PORT\" on the host that has the directory, at = \"HOST:PORT\" on the others";
            reader.note("listen", reason.to_owned(), remedy.to_owned());
            None
        }
    };
    let plain = plain.then(|| host.unwrap_or_else(own_name));
    let spec = place.map(|place| DirectorySpec { place, plain, addresses });
    (spec, reader.finish())
}

/// One host.
fn name(reader: &mut TableReader<'_, '_>, field: &'static str) -> Option<String> {
    let text = reader.text(field)?;
    match text.parse::<HostList>() {
        Ok(list) if !text.contains(',') => Some(list.to_string()),
        _ => {
            let reason = format!("{field} = {text:?} is no name of a host");
            reader.note(field, reason, "write letters, digits, '-' and '.'".to_owned());
            None
        }
    }
}

/// As the system calls this host, if others may call it so.
fn own_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
    if name.parse::<HostList>().is_ok() && !name.contains(',') { name } else { "localhost".to_owned() }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn read(text: &str) -> Result<DirectorySpec, String> {
        let text = format!("[directory]\n{text}\n");
        let config =
            Config::parse(Path::new("/etc/ioplane.toml"), &text).map_err(|error| error.to_string())?;
        Ok(config.directory.unwrap().0)
    }

    #[test]
    fn a_directory_is_here_or_there() {
        let own = read("listen = \"0.0.0.0:10808\"\naddress = \"10.0.0.1\"").unwrap();
        assert_eq!(own.place, DirectoryPlace::Own { listen: "0.0.0.0:10808".parse().unwrap(), file: None });
        assert_eq!((own.plain, own.addresses), (None, vec!["10.0.0.1".parse::<IpAddr>().unwrap()]));
        let two = read("at = \"host-a\"\naddress = \"10.0.0.1, ::1\"").unwrap();
        assert_eq!(two.addresses, ["10.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap()));
        let there = read("at = \"10.0.0.1\"\ntls_hostname = \"Host-A\"").unwrap();
        let DirectoryPlace::At(address) = there.place else { panic!() };
        assert_eq!((address.port, address.tls_hostname.as_deref()), (10808, Some("host-a")));
        let plain = read("at = \"host-a:1\"\nplain = true\nhost = \"host-b\"").unwrap();
        assert_eq!(plain.plain.as_deref(), Some("host-b"));
        assert!(read("at = \"host-a\"\nplain = true").unwrap().plain.is_some());
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_its_line() {
        for (text, said) in [
            ("", "neither listen nor at"),
            ("listen = \"0.0.0.0:1\"\nat = \"host-a\"", "both listen and at"),
            ("at = \"http://host-a\"", "is no place of a directory"),
            ("at = \"host-a\"\nfile = \"/x\"", "file has no meaning here"),
            ("at = \"host-a\"\nhost = \"b\"", "host has no meaning here"),
            ("at = \"host-a\"\nplain = true\ntls_hostname = \"b\"", "tls_hostname has no meaning here"),
            ("at = \"host-a\"\nplain = true\nhost = \"a,b\"", "is no name of a host"),
            ("at = \"host-a\"\naddress = \"0.0.0.0\"", "is no address of this host"),
            ("at = \"host-a\"\naddress = \"10.0.0.1,\"", "is no address of this host"),
            ("at = \"host-a\"\naddress = \"::1,::2,::3,::4,::5\"", "is no address of this host"),
            ("at = \"host-a\"\nprot = 1", "[directory] has no \"prot\""),
        ] {
            let problem = read(text).unwrap_err();
            assert!(problem.contains(said), "{text}: {problem}");
        }
    }
}
