//! Three hosts that share nothing but cables: each has a network, a mount and a UTS namespace, a folder that the others do not see, an identity of
//! one authority, and a daemon. Between each two is a relay, which delays, loses and drops packets and never closes a connection.
//!
//! ```text
//!   host-a 10.79.0.1 ---relay--- host-b 10.79.0.2        host-a: the authority, and the directory (or a member of etcd, as the others)
//!          \---relay--- host-c 10.79.0.3 ---relay---/
//! ```

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};
use ioplane_e2e::daemon::{Daemon, Said, binary};
use ioplane_e2e::place::HostPlace;
use ioplane_e2e::process::{Process, scratch};
use ioplane_e2e::stage::until;
use ioplane_testkit::relay::{BOTH, Relay};
use ioplane_testkit::space::{NetworkSpace, or_skip};
use serde_json::Value;
use tempfile::TempDir;

pub const NAMES: [&str; 3] = ["host-a", "host-b", "host-c"];
/// Pairs of hosts, by their place in [`NAMES`]; each has a relay.
pub const LINKS: [(usize, usize); 3] = [(0, 1), (0, 2), (1, 2)];

/// Who keeps the names of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// The daemon of host-a.
    Embedded,
    /// Three members of etcd, one on each host.
    Etcd,
}

/// A host and its daemon.
pub struct Host {
    pub name: &'static str,
    pub place: HostPlace,
    pub daemon: Daemon,
    base: PathBuf,
}

/// See the module. Fields are dropped in this order.
pub struct Three {
    pub hosts: [Host; 3],
    _members: Vec<Process>,
    _authority: Process,
    pub relays: Vec<Relay>,
    _bases: Vec<TempDir>,
    _spaces: Vec<NetworkSpace>,
}

fn address(host: usize) -> Ipv4Addr {
    [10, 79, 0, host as u8 + 1].into()
}

impl Host {
    /// A file of this host.
    pub fn file(&self, name: &str) -> PathBuf {
        self.base.join(name)
    }

    /// A device of the directory, as this host sees it; `null` if it does not.
    pub fn device(&self, name: &str) -> Result<Value> {
        let report = self.daemon.cli(&["devices"])?;
        let devices = report["devices"].as_array().context("devices without a list")?;
        Ok(devices.iter().find(|device| device["name"] == name).cloned().unwrap_or_default())
    }
}

impl Three {
    /// Lays the cables, has all hosts join, and starts what keeps names and the daemons. `seed` decides what relays lose. `None`, which is said aloud,
    /// where there are no namespaces or no TAP devices.
    pub fn new(names: Names, seed: u64) -> Result<Option<Three>> {
        let Some((relays, spaces)) = or_skip(wires(seed)) else { return Ok(None) };
        let bases = NAMES.map(scratch).into_iter().collect::<Result<Vec<_>>>()?;
        let lines: String = (0..3).map(|host| format!("{} {}\n", address(host), NAMES[host])).collect();
        let place = |host: usize| -> Result<HostPlace> {
            let (base, hosts) = (bases[host].path(), bases[host].path().join("hosts"));
            std::fs::write(&hosts, format!("127.0.0.1 localhost\n{lines}"))?;
            let hidden: Vec<&Path> = bases.iter().map(TempDir::path).filter(|other| *other != base).collect();
            Ok(HostPlace::host(spaces[host].name(), NAMES[host], base, &hosts, &hidden))
        };
        let places = [place(0)?, place(1)?, place(2)?];
        let joining = places.iter().zip(&bases).map(|(place, base)| Joining { place, base: base.path() });
        let joining: Vec<Joining<'_>> = joining.collect();
        let authority = join(&joining)?;
        let members = match names {
            Names::Embedded => Vec::new(),
            Names::Etcd => joining.iter().enumerate().map(member).collect::<Result<Vec<_>>>()?,
        };
        let host = |at: usize| -> Result<Host> {
            let base = bases[at].path().to_owned();
            let daemon = Daemon::start_at(&places[at], &config(names, at, &base))?;
            Ok(Host { name: NAMES[at], place: places[at].clone(), daemon, base })
        };
        let hosts = [host(0)?, host(1)?, host(2)?];
        for host in &hosts {
            until("a host has its directory", || Ok(host.daemon.said(&["devices"])?.code == Some(0)))?;
        }
        let three =
            Three { hosts, _members: members, _authority: authority, relays, _bases: bases, _spaces: spaces };
        Ok(Some(three))
    }

    /// The relay between two hosts.
    pub fn between(&self, link: (usize, usize)) -> Result<&Relay> {
        let at = LINKS.iter().position(|other| *other == link).context("no such cable")?;
        Ok(&self.relays[at])
    }

    /// From now on nothing reaches this host, and nothing comes from it.
    pub fn cut_off(&self, host: usize) {
        let relays = self.relays.iter().zip(LINKS);
        relays
            .filter(|(_, (one, other))| *one == host || *other == host)
            .for_each(|(relay, _)| relay.cut(&BOTH));
    }

    /// The last lines of all daemons.
    pub fn last_words(&self) -> String {
        self.hosts.iter().map(|host| format!("--- {}\n{}\n", host.name, host.daemon.log())).collect()
    }
}

/// Each host has one address, which the others reach over the cable to it.
fn wires(seed: u64) -> std::io::Result<(Vec<Relay>, Vec<NetworkSpace>)> {
    let spaces = [NetworkSpace::new()?, NetworkSpace::new()?, NetworkSpace::new()?];
    for (at, space) in spaces.iter().enumerate() {
        space.ip(&format!("address add {}/32 dev lo", address(at)))?;
    }
    let mut relays = Vec::new();
    for (link, (one, other)) in LINKS.into_iter().enumerate() {
        let ends = [1, 2].map(|end| Ipv4Addr::from([10, 78, link as u8, end]));
        relays.push(Relay::join([(&spaces[one], ends[0]), (&spaces[other], ends[1])], seed + link as u64)?);
        for (from, to, via) in [(one, other, ends[1]), (other, one, ends[0])] {
            spaces[from].ip(&format!("route add {} via {via} src {}", address(to), address(from)))?;
        }
    }
    Ok((relays, spaces.into()))
}

/// What a daemon of host `at` is told.
fn config(names: Names, at: usize, base: &Path) -> String {
    let directory = match (names, at) {
        (Names::Embedded, 0) => "listen = \"0.0.0.0:10808\"".to_owned(),
        (Names::Embedded, _) => format!("at = \"{}\"", NAMES[0]),
        (Names::Etcd, _) => {
            format!("etcd = \"{}\"", NAMES.map(|name| format!("https://{name}:2379")).join(", "))
        }
    };
    format!(
        "[daemon]\nrun_dir = \"{{folder}}/run\"\nidentity = \"{}\"\nclaim_wait_s = 120\n[directory]\n{directory}\naddress = \"{}\"\n[[core]]\nspin_us = 200\n",
        identity(base).display(),
        address(at)
    )
}

fn identity(base: &Path) -> PathBuf {
    base.join("identity")
}

/// A host whose daemon does not run yet.
struct Joining<'a> {
    place: &'a HostPlace,
    base: &'a Path,
}

impl Joining<'_> {
    fn words(&self, args: &[&str]) -> Vec<OsString> {
        let head = [OsString::from("identity"), "--dir".into(), identity(self.base).into()];
        head.into_iter().chain(args.iter().map(OsString::from)).collect()
    }

    /// Runs `ioplane identity` there, which hears `input`.
    fn identity(&self, args: &[&str], input: &str) -> Result<String> {
        let mut command = self.place.command(binary()?);
        command.args(self.words(args)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("run ioplane identity")?;
        let mut stdin = child.stdin.take().context("no input")?;
        // It may have ended already: what it says is looked at.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        let said = Said::from(child.wait_with_output()?);
        ensure!(said.code == Some(0), "ioplane identity {}: {said}", args.join(" "));
        Ok(said.out)
    }
}

/// The first host has the authority; the others join by tokens, over the network. Returns what answers for the authority.
fn join(hosts: &[Joining<'_>]) -> Result<Process> {
    let authority = &hosts[0];
    authority.identity(&["create", NAMES[0]], "")?;
    let log = authority.base.join("authority.log");
    let serve = authority.words(&["serve", "--listen", "0.0.0.0:10807"]);
    let mut answers = authority.place.start(binary()?, &serve, &log)?;
    until("the authority answers", || {
        answers.still_runs()?;
        Ok(answers.said().contains("answering hosts"))
    })?;
    for (host, name) in hosts.iter().zip(NAMES).skip(1) {
        let token = authority.identity(&["token", "--name", name, "--at", NAMES[0]], "")?;
        host.identity(&["join", "-"], &token)?;
    }
    Ok(answers)
}

/// Starts a member of etcd as docs/guide/etcd.md says.
fn member((at, host): (usize, &Joining<'_>)) -> Result<Process> {
    let (tls, data) = (host.base.join("etcd-tls"), host.base.join("etcd"));
    host.identity(&["export", &tls.display().to_string()], "")?;
    let (name, own) = (NAMES[at], address(at));
    let cluster = NAMES.map(|name| format!("{name}=https://{name}:2380")).join(",");
    let line = format!(
        "--name {name} --listen-client-urls https://{own}:2379 --advertise-client-urls https://{name}:2379 \
         --listen-peer-urls https://{own}:2380 --initial-advertise-peer-urls https://{name}:2380 --initial-cluster {cluster} \
         --client-cert-auth --peer-client-cert-auth"
    );
    let mut args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    args.extend(["--data-dir".into(), data.into()]);
    for (option, file) in [
        ("--cert-file", "server-cert"),
        ("--key-file", "server-key"),
        ("--trusted-ca-file", "ca-cert"),
        ("--peer-cert-file", "server-cert"),
        ("--peer-key-file", "server-key"),
        ("--peer-trusted-ca-file", "ca-cert"),
    ] {
        args.extend([option.into(), tls.join(format!("{file}.pem")).into()]);
    }
    host.place.start("etcd", &args, &host.base.join("etcd.log"))
}

/// A socket of one host that leads to one of another, as `ssh -L` makes it. It ends with the value.
pub struct Forward {
    at: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Forward {
    pub fn new(at: PathBuf, to: PathBuf) -> Result<Forward> {
        let listener = UnixListener::bind(&at).with_context(|| format!("listen at {}", at.display()))?;
        let ended = Arc::new(AtomicBool::new(false));
        let of_thread = ended.clone();
        let thread = std::thread::spawn(move || {
            for here in listener.incoming().map_while(Result::ok) {
                if of_thread.load(Ordering::Acquire) {
                    return;
                }
                // Who cannot be reached is a connection that closes at once.
                let _ = UnixStream::connect(&to).map_err(|error| anyhow!(error)).and_then(|there| {
                    carry(here.try_clone()?, there.try_clone()?);
                    carry(there, here);
                    Ok(())
                });
            }
        });
        Ok(Forward { at, ended, thread: Some(thread) })
    }

    pub fn socket(&self) -> &Path {
        &self.at
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if UnixStream::connect(&self.at).is_ok() {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// One direction, until its end.
fn carry(mut from: UnixStream, mut to: UnixStream) {
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
