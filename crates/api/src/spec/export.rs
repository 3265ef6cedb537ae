//! What exports are to be: disks of this host that other machines use.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::checks::{CountField, checked, path_flaw};
use super::disk::backing_form;
use super::{
    BackingForm, BackingSpec, DirectWord, EngineWord, Flaw, FormatWord, HostList, LimitFields, LimitsSpec,
    ListenAddress, MemoryWord, NbdUri, ServedSpec, TimeoutWord, backing_fields, form, group_flaw,
    limit_names, limited, limits_of, named, set_limits, spec, with_limits,
};
use crate::size::Size;

/// Connections of one export: a client has one for each of its queues.
const CONNECTIONS: CountField =
    CountField { name: "connections", range: 1..=1024, power_of_two: false, usual: 16 };

limited! { spec! spec [export_limits]
    {
        /// An export, complete and checked.
        ExportSpec
    } {
        /// Unique among everything that the daemon serves; what clients ask for.
        name: String,
        /// What is behind it.
        backing: BackingSpec => BackingSpec::differing,
        /// Writes are refused.
        read_only: bool,
        /// Where clients of other machines connect.
        listen: Option<ListenAddress>,
        /// It was said that plain text will do.
        plain: bool,
        /// Clients of other machines have to show a certificate of this host's authority, and all is encrypted.
        #[serde(default)]
        tls: bool,
        /// Which hosts may connect with TLS; all that the authority knows if there is no list.
        #[serde(default)]
        allow: Option<HostList>,
        /// Most clients' connections at a time.
        connections: u16,
        /// Where clients of this host connect, if it is not `RUN_DIR/NAME.sock`.
        socket: Option<PathBuf>,
        /// The core that its connections prefer.
        core: Option<u32>,
        /// The group it is in, if any.
        group: Option<String>,
    }
}

/// A [`backing_form`] that may also name a disk that is in use.
macro_rules! published_form {
    ($($form:tt)*) => {
        backing_form! { @ ["memory", "remote", "disk"] $($form)* }
    };
}

limited! { published_form! form [export_limits]
    {
        /// An export as somebody asks for it. See [`ExportForm::spec`] for what is left out.
        ExportForm {
            /// The image of this disk of the daemon, which goes on using it as the first client: before a VM moves to another host
            [long, value_name = "DISK", conflicts_with_all = ["memory", "remote", "read_only", "format", "direct", "engine"]]
            disk: String,
            /// Refuse writes: many hosts can read it, and nobody writes, this host included
            [long, visible_alias = "share", num_args = 0, default_missing_value = "true", overrides_with = "read_only"]
            read_only: bool,
            /// Let other machines connect to this address by TCP [default: with --tls or --allow port 10809 of all addresses, [::]:10809; otherwise only clients of
            /// this host can connect, by the export's socket]
            [long, value_name = "ADDRESS:PORT"]
            listen: ListenAddress,
            /// Accept that whoever can reach --listen is let in unasked, and that nothing is encrypted
            [long, num_args = 0, default_missing_value = "true"]
            plain: bool,
            /// Let in only hosts with a certificate of this host's authority (`ioplane identity`), and encrypt all
            [long, num_args = 0, default_missing_value = "true", conflicts_with = "plain"]
            tls: bool,
            /// Which hosts may connect, such as host-b,host-c, with --tls, which need not be given then [default: all with a certificate of the authority]
            [long, value_name = "HOSTS", conflicts_with = "plain"]
            allow: HostList,
            /// Most connections of clients at a time [default: 16]
            [long, value_name = "N"]
            connections: u64,
        }
    } {
        /// The I/O core that its connections prefer [default: whichever has time]
        [long, value_name = "ID"]
        core: u32,
        /// Its socket for clients of this host [default: NAME.sock in the run directory]
        [id = "nbd_socket", long = "nbd-socket", value_name = "PATH"]
        socket: PathBuf,
        /// The group it is in: its weight is the group's [default: none]
        [long, value_name = "NAME"]
        group: String,
    }
}

limited! { form! change [export_limits]
    {
        /// Another capacity of an export. What is left out stays as it is.
        ExportChangeForm
    } {}
}

impl ExportChangeForm {
    /// What it changes.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(export_limits of self)
    }
}

impl ExportForm {
    /// The complete export. Left out: no limits, writable, for clients of this host, 16 connections, in no group, and whatever core has time. Who names hosts
    /// means TLS, and what has TLS is for other machines: at [`ListenAddress::usual`].
    pub fn spec(self, name: &str) -> Result<ExportSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        if self.disk.is_some() {
            let reason = "a disk that is in use is published by a command";
            flaws.push(Flaw::new("disk", reason, "ioplane publish disk NAME --disk DISK"));
        }
        let backing = backing_fields!(BackingForm of self).spec(&mut flaws);
        let connections = CONNECTIONS.read(&mut flaws, self.connections);
        let limits = limits_of!(export_limits of self).asked();
        let plain = self.plain.unwrap_or(false);
        let tls = self.tls.unwrap_or(self.allow.is_some() && !plain);
        let spec = with_limits!(
            ExportSpec {
                name: name.to_owned(),
                backing: backing.unwrap_or(BackingSpec::Memory { bytes: 1 << 20 }),
                read_only: self.read_only.unwrap_or(false),
                listen: self.listen.or_else(|| tls.then(ListenAddress::usual)),
                plain,
                tls,
                allow: self.allow,
                connections,
                socket: self.socket,
                core: self.core,
                group: named(self.group),
            },
            export_limits = limits
        );
        flaws.extend(spec.limit_flaws());
        checked(spec, flaws)
    }
}

impl ServedSpec for ExportSpec {
    fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> Option<&std::path::Path> {
        self.socket.as_deref()
    }

    fn core(&self) -> Option<u32> {
        self.core
    }

    /// No client shares memory.
    fn guest_memory(&self) -> MemoryWord {
        MemoryWord::default()
    }

    fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    fn queues(&self) -> u16 {
        self.connections
    }

    fn own_flaws(&self) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        match &self.backing {
            BackingSpec::File { path, .. } => flaws.extend(path_flaw("path", path)),
            BackingSpec::Memory { bytes } if *bytes == 0 || bytes % 512 != 0 => {
                let reason = format!("{bytes} bytes is no size for a disk");
                flaws.push(Flaw::new("memory", reason, "give a multiple of 512, and not zero"));
            }
            BackingSpec::Remote(spec) if spec.on_timeout == Some(TimeoutWord::Pause) => {
                let reason = "an export has no VM that could be paused";
                flaws.push(Flaw::new("on_timeout", reason, "write \"error\" or \"wait\""));
            }
            BackingSpec::Remote(spec) => flaws.extend(spec.flaws(self.connections, "connection")),
            BackingSpec::Memory { .. } => {}
        }
        match &self.listen {
            Some(_) if self.tls && self.plain => {
                let reason = "tls = true and plain = true contradict each other";
                flaws.push(Flaw::new("plain", reason, "leave out one of them"));
            }
            Some(listen) if !self.tls && !self.plain => {
                let reason = format!("listen = \"{listen}\" lets in whoever can reach it, in plain text");
                let remedy = "write tls = true or allow = \"HOST\", or plain = true if that is so intended";
                flaws.push(Flaw::new("plain", reason, remedy));
            }
            None if self.tls => {
                let reason = "tls = true, and no other machine can connect";
                flaws.push(Flaw::new("tls", reason, "write listen = \"ADDRESS:PORT\" as well"));
            }
            _ => {}
        }
        if self.allow.is_some() && !self.tls {
            let reason = "allow names hosts, and without TLS nobody is asked who it is";
            flaws.push(Flaw::new("allow", reason, "leave out plain = true or tls = false"));
        }
        flaws.extend(self.limits().flaws(Self::LIMITS));
        flaws.extend(CONNECTIONS.flaw(self.connections));
        flaws.extend(group_flaw(self.group.as_deref()));
        flaws
    }

    fn same_content(one: &Self, other: &Self) -> bool {
        one.backing.same_content(&other.backing)
    }
}

impl ExportSpec {
    /// The fields of its limits.
    pub const LIMITS: LimitFields = limit_names!(export_limits);

    /// Its capacity: what all clients may do together.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(export_limits of self)
    }

    /// What is wrong with limits that somebody asks for, beside what may be stored.
    pub fn limit_flaws(&self) -> Vec<Flaw> {
        self.limits().lonely(Self::LIMITS)
    }

    /// Other limits.
    pub fn set_limits(&mut self, limits: LimitsSpec) {
        set_limits!(export_limits of self = limits);
    }

    /// Where clients of other machines connect.
    pub fn listen(&self) -> Option<SocketAddr> {
        self.listen.as_ref().map(ListenAddress::address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form() -> ExportForm {
        ExportForm { path: Some("/srv/data.img".into()), ..ExportForm::default() }
    }

    #[test]
    fn plain_text_has_to_be_asked_for() {
        let spec = form().spec("data").unwrap();
        assert_eq!((spec.listen(), spec.connections), (None, 16));
        let listen = Some("0.0.0.0:10809".parse().unwrap());
        let flaws = ExportForm { listen, ..form() }.spec("data").unwrap_err();
        assert_eq!(flaws[0].field, "plain");
        let spec = ExportForm { listen, plain: Some(true), ..form() }.spec("data").unwrap();
        assert_eq!(spec.listen().unwrap().port(), 10809);
    }

    #[test]
    fn who_names_hosts_means_tls_at_the_usual_address() {
        let (listen, tls) = (Some("127.0.0.1:1".parse().unwrap()), Some(true));
        let allow: Option<HostList> = Some("host-b".parse().unwrap());
        for (form, at) in [
            (ExportForm { allow: allow.clone(), ..form() }, "[::]:10809"),
            (ExportForm { tls, ..form() }, "[::]:10809"),
            (ExportForm { listen, allow: allow.clone(), ..form() }, "127.0.0.1:1"),
            (ExportForm { listen, tls, allow: allow.clone(), ..form() }, "127.0.0.1:1"),
        ] {
            let named = form.allow.clone();
            let spec = form.spec("data").unwrap();
            assert_eq!((spec.tls, spec.plain, spec.allow), (true, false, named));
            assert_eq!(spec.listen.unwrap().to_string(), at);
        }
        let plain = Some(true);
        for (wrong, field) in [
            (ExportForm { tls, plain, ..form() }, "plain"),
            (ExportForm { listen, tls, plain, ..form() }, "plain"),
            (ExportForm { plain, allow: allow.clone(), ..form() }, "allow"),
            (ExportForm { listen, plain, allow: allow.clone(), ..form() }, "allow"),
            (ExportForm { listen, tls: Some(false), plain, allow, ..form() }, "allow"),
        ] {
            assert_eq!(wrong.spec("data").unwrap_err()[0].field, field);
        }
        // What is stored says all of it.
        let spec = ExportForm { tls, ..form() }.spec("data").unwrap();
        assert_eq!(ExportSpec { listen: None, ..spec }.own_flaws()[0].field, "tls");
    }

    #[test]
    fn flaws_name_their_field() {
        let flaws = ExportForm { connections: Some(0), ..form() }.spec("data").unwrap_err();
        assert_eq!(flaws[0].field, "connections");
        let flaws = ExportForm { memory: Some(Size(512)), ..form() }.spec("data").unwrap_err();
        assert_eq!(flaws[0].field, "memory");
        assert_eq!(ExportForm::default().spec("data").unwrap_err()[0].field, "path");
        for (wrong, field) in [
            (ExportForm { iops_burst: Some(5), ..form() }, "iops_burst"),
            (ExportForm { bandwidth_limit: Some(Size(1)), ..form() }, "bandwidth_limit"),
        ] {
            assert_eq!(wrong.spec("data").unwrap_err()[0].field, field);
        }
    }
}
