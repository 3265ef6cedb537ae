//! Who has an image: looked up in `/proc`, for a message that helps.
//!
//! `/proc/PID/fdinfo/FD` has a line `lock:` for each lock of that open file description; `/proc/PID/fd/FD` says whether it is our
//! image. Best effort: other users' processes and other PID namespaces cannot be seen.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that holds a lock on an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// What it is called.
    pub command: String,
    /// The VM that its command line names (`-name guest=NAME`).
    pub vm: Option<String>,
    /// It has been killed or is ending: what it still holds, its last I/O holds.
    pub(crate) ending: bool,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pid == std::process::id() {
            return write!(f, "another disk of this daemon (pid {})", self.pid);
        }
        write!(f, "{} (pid {}", self.command, self.pid)?;
        match &self.vm {
            Some(vm) => write!(f, ", VM {vm})"),
            None => f.write_str(")"),
        }
    }
}

/// A lock that stands in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// A `flock`.
    Whole,
    /// A record lock on this byte.
    Byte(u64),
}

/// Every process that holds `held` on the file with this device and inode number, by way of any descriptor but `ours`.
pub(crate) fn holders(dev: u64, ino: u64, held: Held, ours: u32) -> Vec<Holder> {
    let mut found = Vec::new();
    let Ok(processes) = std::fs::read_dir("/proc") else { return found };
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let path = process.path();
        let Ok(descriptors) = std::fs::read_dir(path.join("fdinfo")) else { continue };
        let holds = descriptors.flatten().any(|descriptor| {
            let number = descriptor.file_name();
            if pid == std::process::id() && number.to_str() == Some(ours.to_string().as_str()) {
                return false;
            }
            // The text first: only what holds a lock is worth a stat, which may have to ask a file server.
            std::fs::read_to_string(descriptor.path())
                .is_ok_and(|info| info.lines().any(|line| is(line, held)))
                && std::fs::metadata(path.join("fd").join(&number))
                    .is_ok_and(|file| (file.dev(), file.ino()) == (dev, ino))
        });
        if holds {
            found.push(describe(pid, &path));
        }
    }
    found
}

/// Whether a line of `fdinfo` is about this lock: `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 100`.
fn is(line: &str, held: Held) -> bool {
    let mut words = line.split_whitespace();
    if words.next() != Some("lock:") {
        return false;
    }
    let kind = words.nth(1);
    let (start, end) = (words.nth(4), words.next());
    match held {
        Held::Whole => kind == Some("FLOCK"),
        Held::Byte(byte) => {
            let number = |word: Option<&str>| word.and_then(|w| w.parse::<u64>().ok());
            matches!(kind, Some("OFDLCK" | "POSIX"))
                && number(start).is_some_and(|start| start <= byte)
                && (end == Some("EOF") || number(end).is_some_and(|end| byte <= end))
        }
    }
}

fn describe(pid: u32, path: &Path) -> Holder {
    let text = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
    let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
    let arguments: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let command = text("comm").trim().to_owned();
    Holder {
        pid,
        command: if command.is_empty() { "a process".into() } else { command },
        vm: vm_name(&arguments),
        ending: is_ending(&text("stat"), &text("status")),
    }
}

/// The name that QEMU was given: `-name web`, `-name guest=web,debug-threads=on`.
fn vm_name(arguments: &[String]) -> Option<String> {
    let at = arguments.iter().position(|word| word == "-name" || word == "--name")?;
    let parts: Vec<&str> = arguments.get(at + 1)?.split(',').collect();
    let named = parts.iter().find_map(|part| part.strip_prefix("guest="));
    let bare = parts.first().filter(|part| !part.contains('='));
    named.or(bare.copied()).filter(|name| !name.is_empty()).map(str::to_owned)
}

/// A zombie, about to exit, or with a pending SIGKILL.
fn is_ending(stat: &str, status: &str) -> bool {
    const PF_EXITING: u64 = 4;
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    let killed = status.lines().any(|line| {
        let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        pending
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask & (1 << 8) != 0)
    });
    matches!(state, Some("Z" | "X" | "x")) || flags & PF_EXITING != 0 || killed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_lines_are_read() {
        let ofd = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(is(ofd, Held::Byte(100)) && is(ofd, Held::Byte(101)) && !is(ofd, Held::Byte(102)));
        assert!(!is(ofd, Held::Whole));
        let whole = "lock:\t2: FLOCK  ADVISORY  WRITE 77 fe:00:1234 0 EOF";
        assert!(is(whole, Held::Whole) && !is(whole, Held::Byte(100)));
        assert!(is("lock:\t1: POSIX  ADVISORY  WRITE 77 fe:00:1234 0 EOF", Held::Byte(203)));
        assert!(!is("pos:\t0", Held::Whole));
    }

    #[test]
    fn vm_names_are_read() {
        let name = |words: &[&str]| vm_name(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        assert_eq!(name(&["qemu", "-name", "web", "-m", "1"]).as_deref(), Some("web"));
        assert_eq!(name(&["qemu", "-name", "debug-threads=on,guest=web"]).as_deref(), Some("web"));
        assert_eq!(name(&["qemu", "-name", "web,process=x"]).as_deref(), Some("web"));
        assert_eq!(name(&["qemu", "-name"]), None);
        assert_eq!(name(&["qemu"]), None);
    }

    #[test]
    fn the_dying_are_told_from_the_living() {
        let stat = |state: &str, flags: u32| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 0 0");
        assert!(is_ending(&stat("Z", 0), "") && is_ending(&stat("S", 4_194_308), ""));
        assert!(is_ending(&stat("D", 0), "SigPnd:\t0000000000000100\n"));
        assert!(!is_ending(&stat("S", 4_194_304), "SigPnd:\t0000000000000001\nShdPnd:\t0000000000000000\n"));
    }
}
