//! The ways into a guest: ssh or another command, QEMU's guest agent, a shared directory. What comes back was written by the guest: it is
//! bounded, and nothing in it reaches the terminal as it is.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ioplane_cli::args::{ReachArgs, VmArgs};
use ioplane_qemu::{Chardev, Endpoint};

use super::agent;
use super::script::{Done, PATIENCE, STARTED};
use super::{chosen, usage};

/// A script says a few lines.
const WORDS: u64 = 64 << 10;
/// How often the directory is looked at: a file system that two kernels share tells nobody of changes.
const LOOK: Duration = Duration::from_millis(50);

/// How often a command that has closed its pipes is looked at.
const SOON: Duration = Duration::from_millis(5);

/// How the guest is reached.
#[derive(Debug)]
pub(super) enum Reach {
    /// A command that runs its further arguments in the guest and passes its standard input on.
    Command(Vec<String>),
    /// The agent's socket.
    Agent(Endpoint),
    /// A directory that the guest shares and watches: `guest/tune/folder.sh`.
    Directory(PathBuf),
}

impl Reach {
    /// The way that was asked for, if there is one.
    pub fn given(args: &ReachArgs, which: &VmArgs) -> Result<Option<Reach>> {
        let ReachArgs { ssh, ssh_config: _, agent, directory, via } = args;
        let given = ssh.is_some() || agent.is_some() || directory.is_some() || via.is_some();
        given.then(|| Reach::new(args, which)).transpose()
    }

    /// The way that was asked for; what cannot be is refused before anything happens.
    pub fn new(args: &ReachArgs, which: &VmArgs) -> Result<Reach> {
        if let Some(destination) = &args.ssh {
            // A name, not an option of ssh.
            ensure!(
                !destination.starts_with('-'),
                usage(format!("{destination:?} is no destination for ssh"))
            );
            let mut words: Vec<String> =
                ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"].map(String::from).into();
            if let Some(file) = &args.ssh_config {
                words.extend(["-F".into(), file.display().to_string()]);
            }
            words.extend(["--".into(), destination.clone()]);
            return Ok(Reach::Command(words));
        }
        if let Some(command) = &args.via {
            let words: Vec<String> = command.split_whitespace().map(String::from).collect();
            ensure!(!words.is_empty(), usage("--via needs a command"));
            return Ok(Reach::Command(words));
        }
        if let Some(directory) = &args.directory {
            ensure!(directory.is_dir(), usage(format!("{} is not a directory", directory.display())));
            return Ok(Reach::Directory(directory.clone()));
        }
        let Some(socket) = &args.agent else {
            bail!(usage("say how to reach the guest: --ssh, --agent, --directory or --via"))
        };
        if socket != Path::new("auto") {
            return Ok(Reach::Agent(Endpoint::here(socket)));
        }
        let vm = chosen(which)?;
        match Chardev::agent(&vm.command) {
            Some(Chardev::Path(socket)) => Ok(Reach::Agent(vm.socket(&socket))),
            Some(Chardev::Inherited) => bail!(
                "the agent's socket of {} is a descriptor that QEMU was given (libvirt does so) and has no path on its \
                 command line; use --ssh, --directory or --via",
                vm.name
            ),
            None => {
                bail!("{} has no agent's socket on its command line; give it: --agent SOCKET", vm.name)
            }
        }
    }

    /// Runs a POSIX script with two words as its arguments.
    pub fn run(&self, script: &str, words: [&str; 2]) -> Result<Done> {
        self.run_up_to(script, words, WORDS)
    }

    /// The same of a script that says up to so many bytes; the rest is left out.
    pub fn run_up_to(&self, script: &str, words: [&str; 2], limit: u64) -> Result<Done> {
        let done = match self {
            Reach::Command(command) => by_command(command, script, words, PATIENCE, limit),
            Reach::Agent(socket) => agent::run(socket, script, words, limit),
            Reach::Directory(directory) => by_directory(directory, script, words, PATIENCE, limit),
        }?;
        Ok(Done { said: plain(cut(&done.said, limit)), error: plain(cut(&done.error, WORDS)), ..done })
    }
}

/// As much as a script says, whichever way it comes.
fn cut(text: &str, limit: u64) -> &str {
    &text[..text.floor_char_boundary(limit as usize)]
}

/// Without what would move a terminal's cursor.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '?' } else { c }).collect()
}

fn by_command(
    command: &[String],
    script: &str,
    words: [&str; 2],
    patience: Duration,
    limit: u64,
) -> Result<Done> {
    let end = Instant::now() + patience;
    let (program, first) = command.split_first().context("a command has a program")?;
    let mut child = Command::new(program)
        .args(first)
        .args(["sh", "-s", "--"])
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let done = talk(&mut child, script, end, limit);
    if done.is_none() {
        let seconds = patience.as_secs();
        bail!("{program} has not ended within {seconds} s; it is ended now, but {STARTED}");
    }
    done.context("it has ended")
}

/// Gives a child its script and takes what it says, all at once: one that talks much and reads late would wait for us, and we for
/// it. Nothing if it goes on for longer; then it is killed.
pub(super) fn talk(child: &mut Child, script: &str, end: Instant, limit: u64) -> Option<Done> {
    let done = talk_until(child, script, end, limit);
    if done.is_none() {
        // Its threads end with its pipes; whatever it has started may hold them, and is not waited for.
        let _ = child.kill();
        let _ = child.wait();
    }
    done
}

fn talk_until(child: &mut Child, script: &str, end: Instant, limit: u64) -> Option<Done> {
    let (said_to, said) = mpsc::channel();
    let (error_to, error) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        std::thread::spawn(move || said_to.send(bounded(output, limit)));
    }
    if let Some(output) = child.stderr.take() {
        std::thread::spawn(move || error_to.send(bounded(output, WORDS)));
    }
    if let Some(mut input) = child.stdin.take() {
        let script = script.to_owned();
        // Whoever does not read it says why.
        std::thread::spawn(move || input.write_all(script.as_bytes()));
    }
    let left = || end.saturating_duration_since(Instant::now());
    let (said, error) = (said.recv_timeout(left()).ok()?, error.recv_timeout(left()).ok()?);
    loop {
        // One that closes its pipes has ended, or will at once.
        if let Some(status) = child.try_wait().ok()? {
            return Some(Done { status: status.code().map_or(-1, i64::from), said, error });
        }
        if left().is_zero() {
            return None;
        }
        std::thread::sleep(SOON);
    }
}

/// The first so many bytes; the rest is read, so that nobody waits, and forgotten.
fn bounded(mut from: impl Read, limit: u64) -> String {
    let mut bytes = Vec::new();
    let _ = from.by_ref().take(limit).read_to_end(&mut bytes);
    let _ = std::io::copy(&mut from, &mut std::io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

fn by_directory(
    directory: &Path,
    script: &str,
    words: [&str; 2],
    patience: Duration,
    limit: u64,
) -> Result<Done> {
    let mut number = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut number)?;
    let name = format!("ioplane-{:016x}", u64::from_ne_bytes(number));
    let at = |ending: &str| directory.join(format!("{name}.{ending}"));
    let (half, job) = (at("new"), at("tune"));
    // The guest must not see half of it, and may have left anything there: a new file, never one that it has made.
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&half)
        .with_context(|| format!("write to {}", directory.display()))?;
    file.write_all(format!("set -- {} {}\n{script}", words[0], words[1]).as_bytes())?;
    drop(file);
    fs::rename(&half, &job)?;
    let end = Instant::now() + patience;
    let done = loop {
        if let Some(status) = read(&at("status"), WORDS) {
            let status = status.trim().parse().with_context(|| format!("{status:?} is no exit status"))?;
            let text = |ending, limit| read(&at(ending), limit).unwrap_or_default();
            break Ok(Done { status, said: text("said", limit), error: text("error", WORDS) });
        }
        if Instant::now() >= end {
            // The guest takes a job before it runs it: one that could be taken back does not run.
            let back = fs::remove_file(&job).is_ok() && fs::symlink_metadata(at("said")).is_err();
            let (directory, seconds) = (directory.display(), patience.as_secs());
            break Err(if back {
                anyhow::anyhow!(
                    "nothing has happened in {directory} for {seconds} s, and nothing will: the job is taken back; does \
                     `sh folder.sh` of guest/tune run in the guest, on this directory?"
                )
            } else {
                anyhow::anyhow!(
                    "the guest has taken the job from {directory}, and it has not ended within {seconds} s; {}",
                    STARTED
                )
            });
        }
        std::thread::sleep(LOOK);
    };
    for ending in ["tune", "said", "error", "status"] {
        let _ = fs::remove_file(at(ending));
    }
    done
}

/// A plain file that the guest has written; never what a link of its making points to, and not for ever.
fn read(path: &Path, limit: u64) -> Option<String> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).ok()?;
    file.metadata().ok()?.is_file().then(|| bounded(file.take(limit), limit))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const SCRIPT: &str = "echo \"$1 and $2\"; echo bad >&2; exit 3";

    #[test]
    fn one_way_and_no_more() {
        use clap::Parser;
        let parse = |words: &[&str]| {
            let first = ["ioplane", "exits", "apply", "pm-timer"];
            ioplane_cli::args::Cli::try_parse_from(first.into_iter().chain(words.iter().copied())).is_ok()
        };
        for good in [
            &["--agent"][..],
            &["--agent", "--for", "2s"],
            &["--agent", "/run/a"],
            &["--ssh", "a"],
            &["--directory", "/"],
        ] {
            assert!(parse(good), "{good:?}");
        }
        for bad in
            [&[][..], &["--agent", "--ssh", "a"], &["--ssh-config", "a"], &["--via", "a", "--directory", "/"]]
        {
            assert!(!parse(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_command_passes_the_script_on() {
        let done = Reach::Command(vec!["env".into()]).run(SCRIPT, ["apply", "clocksource"]).unwrap();
        assert_eq!(
            (done.status, done.said.as_str(), done.error.as_str()),
            (3, "apply and clocksource\n", "bad\n")
        );
        let error = Reach::Command(vec!["/nowhere/ssh".into()]).run(SCRIPT, ["a", "b"]).unwrap_err();
        assert!(error.to_string().contains("/nowhere/ssh"), "{error}");
    }

    #[test]
    fn endless_words_are_cut_and_do_not_reach_the_terminal() {
        let script = "printf '\\033[2J'; head -c 1000000 /dev/zero | tr '\\0' x; cat >/dev/null";
        let long = script.to_owned() + &"\n#".repeat(200_000);
        let done = Reach::Command(vec!["env".into()]).run(&long, ["a", "b"]).unwrap();
        assert_eq!((done.status, done.said.len()), (0, WORDS as usize));
        assert!(done.said.starts_with("?[2J"));
    }

    #[test]
    fn a_directory_is_watched_by_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = watcher(folder.path());
        let done = Reach::Directory(folder.path().into()).run(SCRIPT, ["undo", "console"]);
        child.kill().unwrap();
        child.wait().unwrap();
        let done = done.unwrap();
        assert_eq!(
            (done.status, done.said.as_str(), done.error.as_str()),
            (3, "undo and console\n", "bad\n")
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_directory_that_nobody_watches_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error =
            by_directory(folder.path(), SCRIPT, ["a", "b"], Duration::from_millis(20), WORDS).unwrap_err();
        assert!(error.to_string().contains("folder.sh"), "{error}");
        assert!(error.to_string().contains("nothing will"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// It may have changed something, and may yet.
    #[test]
    fn a_slow_script_is_not_called_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = watcher(folder.path());
        let mark = folder.path().join("mark");
        let script = format!("echo begun >{}; sleep 2", mark.display());
        let error =
            by_directory(folder.path(), &script, ["a", "b"], Duration::from_secs(1), WORDS).unwrap_err();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(mark.exists(), "it has begun");
        assert!(error.to_string().contains("may still change the guest"), "{error}");
    }

    #[test]
    fn a_guest_that_talks_for_ever_is_left() {
        let begun = Instant::now();
        for script in ["yes", "exec >/dev/null 2>&1; sleep 20", "sleep 20 & sleep 20"] {
            let error = by_command(&["env".into()], script, ["a", "b"], Duration::from_millis(200), WORDS)
                .unwrap_err();
            assert!(error.to_string().contains("may still change the guest"), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    fn watcher(folder: &Path) -> Child {
        let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/tune/folder.sh");
        Command::new("sh").arg(guest).arg(folder).env("IOPLANE_TUNE_PERIOD", "0.02").spawn().unwrap()
    }

    #[test]
    fn links_of_the_guest_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("status");
        symlink("/etc/passwd", &link).unwrap();
        assert_eq!(read(&link, WORDS), None);
        assert_eq!(read(Path::new("/dev/null"), WORDS), None);
    }
}
