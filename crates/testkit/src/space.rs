//! A network namespace that stands for another host. Needs root.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::geteuid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs a program with these words; what it says is in the error.
pub fn run(program: &str, words: &str) -> io::Result<()> {
    let output = Command::new(program).args(words.split(' ')).output();
    let output = output.map_err(|error| io::Error::new(error.kind(), format!("{program}: {error}")))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("{program} {words}: {said}")))
        }
    }
}

/// Runs `ip` with these words.
pub fn ip(words: &str) -> io::Result<()> {
    run("ip", words)
}

/// A namespace with nothing but loopback. It goes with the value, once no process is in it any more.
#[derive(Debug)]
pub struct NetworkSpace {
    name: String,
}

impl NetworkSpace {
    /// Makes one of that name.
    pub fn named(name: &str) -> io::Result<NetworkSpace> {
        ip(&format!("netns add {name}"))?;
        let space = NetworkSpace { name: name.to_owned() };
        space.ip("link set lo up")?;
        Ok(space)
    }

    /// Makes one that no other test has. What processes that were killed have left behind goes before the first.
    pub fn new() -> io::Result<NetworkSpace> {
        static TIDY: Once = Once::new();
        TIDY.call_once(remove_stale);
        NetworkSpace::named(&own_name(OWN))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` in it.
    pub fn ip(&self, words: &str) -> io::Result<()> {
        ip(&format!("-n {} {words}", self.name))
    }

    /// Runs `work` on a thread that is in it; sockets that it opens are there for good.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        use std::os::fd::AsFd;
        let there = File::open(format!("/run/netns/{}", self.name))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| -> io::Result<T> {
                move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok(work())
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Words before those of a command that is to run in it, in a mount namespace of its own.
    pub fn within(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }
}

impl Drop for NetworkSpace {
    fn drop(&mut self) {
        let _ = ip(&format!("netns delete {}", self.name));
    }
}

/// What a test needs namespaces for. `None`, which is said past the capture of the test harness, without root or `/dev/net/tun`; with `IOPLANE_NO_SKIP` set
/// that is a failure, and where both are there an error always is.
pub fn or_skip<T>(made: io::Result<T>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(why) => {
            let able = geteuid().is_root() && Path::new("/dev/net/tun").exists();
            assert!(!able, "no hosts in namespaces of their own, and there is root and /dev/net/tun: {why}");
            let why = format!(
                "SKIPPED: hosts in namespaces of their own were NOT tested (no root, or no /dev/net/tun): {why}"
            );
            let _ = writeln!(io::stderr(), "\n*** {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
            None
        }
    }
}

/// What names of namespaces of tests begin with.
const OWN: &str = "iot";

/// Removes the namespaces of processes that are gone, and of one that had the number of this one.
fn remove_stale() {
    for space in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = space.file_name().to_string_lossy().into_owned();
        let numbers = name.strip_prefix(OWN).and_then(|numbers| numbers.split_once('x'));
        let Some((Ok(pid), Ok(_))) = numbers.map(|(pid, nth)| (pid.parse::<u32>(), nth.parse::<u32>()))
        else {
            continue;
        };
        if pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists() {
            // Somebody else may have done it.
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

/// A name of at most 15 characters, as interfaces have, that nobody else on this host has.
pub(crate) fn own_name(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}{}x{}", std::process::id() % 10_000_000, NEXT.fetch_add(1, Ordering::Relaxed))
}
