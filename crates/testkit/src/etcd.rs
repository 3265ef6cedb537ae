//! Members of etcd on loopback, which a test kills, stops and starts again.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal, kill_process};

/// For what takes a second on a machine that has time.
const LIMIT: Duration = Duration::from_secs(120);
/// How often other ports are tried: between looking for free ones and using them somebody else may take one.
const ATTEMPTS: usize = 5;

/// Members of one etcd. Dropped, all of them are killed.
pub struct EtcdCluster {
    folder: PathBuf,
    members: Vec<Member>,
    /// More arguments of each member.
    more: Vec<String>,
}

struct Member {
    client: u16,
    peer: u16,
    child: Option<Child>,
}

fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

impl EtcdCluster {
    /// Starts so many members and waits until they answer. `None`, which is said aloud, where there is no etcd.
    pub fn start(folder: &Path, members: usize) -> Option<EtcdCluster> {
        EtcdCluster::start_with(folder, members, &[])
    }

    /// The same with more arguments for each member. `--tls=DIR` is for this function: each member also listens with TLS, with the files that
    /// `ioplane identity export` has put there, at [`EtcdCluster::tls_url`].
    pub fn start_with(folder: &Path, members: usize, more: &[String]) -> Option<EtcdCluster> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            let why = "SKIPPED: directories in etcd were NOT tested: install etcd-server";
            let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
            return None;
        }
        for attempt in 0..ATTEMPTS {
            let folder = folder.join(format!("etcd-{attempt}"));
            std::fs::create_dir_all(&folder).unwrap();
            let ports = free_ports(2 * members);
            let member = |ports: &[u16]| Member { client: ports[0], peer: ports[1], child: None };
            let members = ports.chunks(2).map(member).collect();
            let mut cluster = EtcdCluster { folder, members, more: more.to_vec() };
            (0..cluster.members.len()).for_each(|at| cluster.spawn(at));
            if cluster.answers() {
                return Some(cluster);
            }
        }
        panic!("etcd does not start: see {}", folder.display());
    }

    /// Where its members take clients in plain text.
    pub fn urls(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("http://127.0.0.1:{}", member.client)).collect()
    }

    /// SIGKILL.
    pub fn kill(&mut self, at: usize) {
        if let Some(mut child) = self.members[at].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a member that was killed.
    pub fn start_again(&mut self, at: usize) {
        self.spawn(at);
    }

    /// SIGSTOP: its connections stay open, and nothing answers.
    pub fn stop(&self, at: usize) {
        self.signal(at, Signal::STOP);
    }

    /// SIGCONT.
    pub fn go_on(&self, at: usize) {
        self.signal(at, Signal::CONT);
    }

    fn signal(&self, at: usize, signal: Signal) {
        let child = self.members[at].child.as_ref().unwrap();
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    /// Writes a key, as somebody who is not ioplane.
    pub fn put(&self, key: &str, value: &[u8]) {
        let body =
            format!("{{\"key\":\"{}\",\"value\":\"{}\"}}", STANDARD.encode(key), STANDARD.encode(value));
        assert_eq!(self.post(0, "kv/put", &body), Some(200));
    }

    /// Removes a key, as somebody who is not ioplane.
    pub fn delete(&self, key: &str) {
        let body = format!("{{\"key\":\"{}\"}}", STANDARD.encode(key));
        assert_eq!(self.post(0, "kv/deleterange", &body), Some(200));
    }

    /// Asks a member in plain text; the status of its answer.
    fn post(&self, at: usize, what: &str, body: &str) -> Option<u16> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.members[at].client)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        write!(
            stream,
            "POST /v3/{what} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .ok()?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text).ok()?;
        String::from_utf8_lossy(&text).split(' ').nth(1)?.parse().ok()
    }

    /// Whether all members answer a read that needs a majority, before one of them ends.
    fn answers(&mut self) -> bool {
        let end = Instant::now() + LIMIT;
        let mut at = 0;
        while at < self.members.len() {
            if self.post(at, "kv/range", "{\"key\":\"eA==\"}") == Some(200) {
                at += 1;
                continue;
            }
            let ended = |member: &mut Member| {
                member
                    .child
                    .as_mut()
                    .is_none_or(|child| child.try_wait().is_ok_and(|status| status.is_some()))
            };
            if self.members.iter_mut().any(ended) {
                return false;
            }
            assert!(Instant::now() < end, "etcd does not answer: see {}", self.folder.display());
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    fn spawn(&mut self, at: usize) {
        let name = |at: usize| format!("m{at}");
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let all: Vec<String> = self
            .members
            .iter()
            .enumerate()
            .map(|(at, member)| format!("{}={}", name(at), url(member.peer)))
            .collect();
        let member = &self.members[at];
        let log = self.folder.join(name(at) + ".log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut listen = url(member.client);
        let mut command = Command::new("etcd");
        for more in &self.more {
            match more.strip_prefix("--tls=") {
                None => {
                    command.arg(more);
                }
                Some(files) => {
                    listen += &format!(",{}", self.tls_url(at));
                    for (option, file) in [
                        ("--cert-file", "server-cert"),
                        ("--key-file", "server-key"),
                        ("--trusted-ca-file", "ca-cert"),
                    ] {
                        command.arg(format!("{option}={files}/{file}.pem"));
                    }
                    command.arg("--client-cert-auth");
                }
            }
        }
        command
            .args(["--name", &name(at)])
            .arg("--data-dir")
            .arg(self.folder.join(name(at)))
            .args(["--listen-client-urls", &listen, "--advertise-client-urls", &url(member.client)])
            .args([
                "--listen-peer-urls",
                &url(member.peer),
                "--initial-advertise-peer-urls",
                &url(member.peer),
            ])
            .args(["--initial-cluster", &all.join(",")]);
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        self.members[at].child = Some(child.unwrap());
    }

    /// Where a member that was started with `--tls=DIR` takes clients with TLS: the same port of another address of loopback.
    pub fn tls_url(&self, at: usize) -> String {
        format!("https://127.0.0.2:{}", self.members[at].client)
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|at| self.kill(at));
    }
}
