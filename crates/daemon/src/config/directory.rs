//! `[directory]`: where the directory of published devices is.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ioplane_api::spec::{FieldSource, HostList, ListenAddress};
use ioplane_netbus::{DirectoryAddress, EtcdEndpoint};

use super::reader::{Place, TableReader};

/// Most addresses of this host that others are told.
const MOST_ADDRESSES: usize = 4;
/// Most members of etcd. Each may take 3 s before the next one is tried.
const MOST_MEMBERS: usize = 7;

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
    /// Nobody: each host asks the members of etcd, in this order.
    Etcd(Vec<EtcdEndpoint>),
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
    let etcd = members(&mut reader, plain);
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
    let said: Vec<&str> = ["listen", "at", "etcd"].into_iter().filter(|field| reader.has(field)).collect();
    let place = match (listen, at, etcd) {
        _ if said.len() != 1 => {
            let reason = match said.len() {
                0 => "neither listen nor at nor etcd".to_owned(),
                _ => format!("both {}", said.join(" and ")),
            };
            let remedy = "write listen = \"ADDRESS:PORT\" on the host that has the directory, at = \"HOST:PORT\" on the others; \
                          or on all of them etcd = \"https://HOST:2379, ...\"";
            reader.note(said.first().unwrap_or(&"listen"), reason, remedy.to_owned());
            None
        }
        (Some(listen), _, _) => Some(DirectoryPlace::Own { listen: listen.address(), file }),
        (_, Some(at), _) => {
            Some(DirectoryPlace::At(DirectoryAddress { tls_hostname: tls_hostname.filter(|_| !plain), ..at }))
        }
        (_, _, etcd) => etcd.map(DirectoryPlace::Etcd),
    };
    let plain = plain.then(|| host.unwrap_or_else(own_name));
    let spec = place.map(|place| DirectorySpec { place, plain, addresses });
    (spec, reader.finish())
}

/// The members of etcd; `None` if there is a problem, too. `plain` has to be said for plain text, as for other directories.
fn members(reader: &mut TableReader<'_, '_>, plain: bool) -> Option<Vec<EtcdEndpoint>> {
    let text = reader.text("etcd")?;
    let members: Result<Vec<EtcdEndpoint>, _> = text.split(',').map(|text| text.trim().parse()).collect();
    let (reason, remedy) = match members {
        Err(error) => (
            format!("etcd: {error}"),
            "write https://HOST:PORT for each member, with commas between; HOST may be an address with ?tls-hostname=NAME after its port",
        ),
        Ok(members) if members.len() > MOST_MEMBERS => {
            (format!("etcd names {} members", members.len()), "write seven of them at most")
        }
        Ok(members) if !plain && members.iter().any(|member| !member.tls()) => (
            "etcd has http://, which is plain text".to_owned(),
            "write https://; or plain = true beside it, in a network of your own",
        ),
        Ok(members) if plain && members.iter().any(EtcdEndpoint::tls) => (
            "etcd has https://, and plain = true".to_owned(),
            "write http:// for all members, or leave plain out",
        ),
        Ok(members) => return Some(members),
    };
    reader.note("etcd", reason, remedy.to_owned());
    None
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
        let etcd = read("etcd = \"https://host-a, https://10.0.0.2:7?tls-hostname=host-b\"").unwrap();
        let DirectoryPlace::Etcd(members) = etcd.place else { panic!() };
        let members: Vec<String> = members.iter().map(EtcdEndpoint::to_string).collect();
        assert_eq!(members, ["https://host-a:2379", "https://10.0.0.2:7?tls-hostname=host-b"]);
        let plain = read("etcd = \"http://[::1]\"\nplain = true\nhost = \"host-b\"").unwrap();
        assert_eq!(plain.plain.as_deref(), Some("host-b"));
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_its_line() {
        for (text, said) in [
            ("", "neither listen nor at nor etcd"),
            ("listen = \"0.0.0.0:1\"\nat = \"host-a\"", "both listen and at"),
            ("at = \"host-a\"\netcd = \"https://host-a\"", "both at and etcd"),
            ("etcd = \"host-a\"", "\"host-a\" is no URL of a member of etcd"),
            ("etcd = \"\"", "is no URL of a member of etcd"),
            ("etcd = [\"https://host-a\"]", "etcd is an array"),
            ("etcd = \"https://host-a, http://host-b\"", "http://, which is plain text"),
            ("etcd = \"https://host-a\"\nplain = true", "https://, and plain = true"),
            (
                "etcd = \"https://a,https://b,https://c,https://d,https://e,https://f,https://g,https://h\"",
                "8 members",
            ),
            ("etcd = \"https://host-a\"\nfile = \"/x\"", "file has no meaning here"),
            ("etcd = \"https://host-a\"\ntls_hostname = \"b\"", "tls_hostname has no meaning here"),
            ("etcd = \"https://host-a\"\nhost = \"b\"", "host has no meaning here"),
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
