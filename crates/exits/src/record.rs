//! A report as a file, with what has to be known of the machine that it is from.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_plain::{file_bytes, file_text, plain};
use serde::{Deserialize, Serialize};

use crate::error::{ExitsError, Result};
use crate::report::{ExitRow, Report};

/// The word by which a file says that it is a recording.
const FORMAT: &str = "ioplane-exits";
/// It grows when an older program would misread a file. Keys that are added do not count.
const VERSION: u32 = 1;
/// A report of a thousand sites has about a megabyte.
const LIMIT: u64 = 16 << 20;
/// `/proc/cpuinfo` has one to two KiB per processor.
const CPUINFO: u64 = 16 << 20;
/// No machine takes so many exits a second, and no exit lasts so many nanoseconds: sums of such numbers stay finite.
const MOST: f64 = 1e18;

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExitRecording {
    /// Always the same word.
    format: String,
    /// Of the format.
    version: u32,
    /// When the recording ended: seconds since 1970.
    pub recorded: u64,
    /// The host.
    pub machine: RecordedMachine,
    /// VM, seconds, and everything that was counted.
    pub report: Report,
}

/// The host on which a VM was watched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedMachine {
    /// Its host name.
    pub name: String,
    /// The model of its processors.
    pub processor: String,
    /// How many processors Linux has.
    pub processors: usize,
    /// Linux' release.
    pub kernel: String,
}

impl RecordedMachine {
    /// This one.
    pub fn read() -> RecordedMachine {
        RecordedMachine::of(Path::new("/proc"))
    }

    fn of(proc: &Path) -> RecordedMachine {
        let word = |path: &str| {
            let text = file_text(&proc.join("sys/kernel").join(path), 4096).unwrap_or_default();
            plain(text.trim())
        };
        let cpuinfo = file_text(&proc.join("cpuinfo"), CPUINFO).unwrap_or_default();
        let value = |line: &str| line.split_once(':').map(|(_, value)| plain(value.trim()));
        RecordedMachine {
            name: word("hostname"),
            kernel: word("osrelease"),
            processor: cpuinfo
                .lines()
                .find(|line| line.starts_with("model name"))
                .and_then(value)
                .unwrap_or_default(),
            processors: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        }
    }
}

/// What tells a recording from other JSON before the rest is read.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    format: Option<String>,
    #[serde(default)]
    version: Option<u32>,
    /// A report without a header has them at its top.
    #[serde(default)]
    sites: Option<serde::de::IgnoredAny>,
}

impl ExitRecording {
    /// Of a report that was made on this host just now.
    pub fn new(report: Report) -> ExitRecording {
        let recorded = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let format = FORMAT.to_owned();
        ExitRecording { format, version: VERSION, recorded, machine: RecordedMachine::read(), report }
    }

    /// As it is written to a file.
    pub fn text(&self) -> Result<String> {
        let error = |error: serde_json::Error| ExitsError::os("writing a recording")(error.into());
        Ok(serde_json::to_string_pretty(self).map_err(error)? + "\n")
    }

    /// Reads a file. One that is not a recording, is too new, or has numbers that cannot be is refused.
    pub fn read(path: &Path) -> Result<ExitRecording> {
        let bytes = file_bytes(path, LIMIT)?;
        let wrong = |what: String| ExitsError::malformed(path, what);
        let head: Head = serde_json::from_slice(&bytes)
            .map_err(|error| wrong(format!("is not a recording of `ioplane exits record`: {error}")))?;
        match (head.format.as_deref(), head.version) {
            (Some(FORMAT), Some(VERSION)) => {}
            (Some(FORMAT), Some(version)) if version > VERSION => {
                return Err(wrong(format!(
                    "is a recording of a newer ioplane (format {version}; this one reads format {VERSION})"
                )));
            }
            (Some(FORMAT), _) => {
                return Err(wrong("is a recording of no format that this ioplane reads".into()));
            }
            (None, _) if head.sites.is_some() => {
                return Err(wrong(
                    "is a report of `ioplane exits --json`, which does not say which machine it is from; record it with \
                     `ioplane exits record FILE`"
                        .into(),
                ));
            }
            _ => return Err(wrong("is not a recording of `ioplane exits record`".into())),
        }
        let recording: ExitRecording =
            serde_json::from_slice(&bytes).map_err(|error| wrong(format!("is damaged: {error}")))?;
        recording.check().map_err(|what| wrong(format!("is damaged: {what}")))?;
        Ok(recording)
    }

    /// Whether its numbers can be what was counted.
    fn check(&self) -> std::result::Result<(), String> {
        let Report { seconds, reasons, functions, registers, devices, sites, .. } = &self.report;
        if !(*seconds > 0.0 && *seconds < MOST) {
            return Err(format!("it lasted {seconds} seconds"));
        }
        let rows = reasons.iter().chain(functions).chain(registers).chain(devices);
        let rows = rows.chain(sites.iter().map(|site| &site.row));
        let possible = |row: &ExitRow| {
            (0.0..MOST).contains(&row.rate)
                && [row.count, row.host_ns, row.user].iter().all(|n| (*n as f64) < MOST)
        };
        match rows.into_iter().find(|row| !possible(row)) {
            Some(row) => Err(format!("{:?} has numbers that cannot be", row.name)),
            None if self.report.exits as f64 >= MOST => Err("it has more exits than can be".into()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::report::tests::a_report;

    fn written(recording: &Value) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, serde_json::to_vec(recording).unwrap()).unwrap();
        (folder, path)
    }

    fn refusal(recording: &Value) -> String {
        let (_folder, path) = written(recording);
        ExitRecording::read(&path).unwrap_err().to_string()
    }

    fn recording() -> Value {
        serde_json::to_value(ExitRecording::new(a_report())).unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let recording = ExitRecording::new(a_report());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, recording.text().unwrap()).unwrap();
        assert_eq!(ExitRecording::read(&path).unwrap(), recording);
        assert!(recording.recorded > 1_700_000_000 && !recording.machine.kernel.is_empty());
    }

    #[test]
    fn keys_of_a_later_version_are_passed_over() {
        let mut later = recording();
        (later["later"], later["report"]["later"], later["machine"]["later"]) =
            (json!(1), json!({}), json!([]));
        let (_folder, path) = written(&later);
        assert!(ExitRecording::read(&path).is_ok());
    }

    #[test]
    fn what_is_no_recording_is_refused_by_what_it_is() {
        let with = |key: &str, value: Value| {
            let mut changed = recording();
            changed[key] = value;
            changed
        };
        assert!(refusal(&recording()["report"]).contains("`ioplane exits --json`"));
        assert!(refusal(&json!({"format": "other"})).contains("is not a recording"));
        assert!(refusal(&json!([1, 2])).contains("is not a recording"));
        assert!(refusal(&with("version", json!(2))).contains("newer ioplane (format 2"));
        assert!(refusal(&with("version", json!(0))).contains("no format that this ioplane reads"));
        assert!(refusal(&with("version", json!(-1))).contains("is not a recording"));
        assert!(refusal(&with("report", json!({}))).contains("damaged: missing field"));
        assert!(refusal(&with("machine", Value::Null)).contains("damaged"));
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        type Change = fn(&mut Value);
        let changes: [(Change, &str); 5] = [
            (|report| report["seconds"] = json!(0.0), "lasted 0 seconds"),
            (|report| report["seconds"] = json!(-3.0), "lasted -3 seconds"),
            (|report| report["reasons"][0]["rate"] = json!(-1.0), "numbers that cannot be"),
            (|report| report["sites"][0]["rate"] = json!(1e300), "numbers that cannot be"),
            (|report| report["registers"][0]["host_ns"] = json!(u64::MAX), "numbers that cannot be"),
        ];
        for (change, wanted) in changes {
            let mut changed = recording();
            change(&mut changed["report"]);
            let error = refusal(&changed);
            assert!(error.contains(wanted), "{wanted:?} in {error:?}");
        }
    }

    #[test]
    fn files_are_bounded_and_their_words_are_plain() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            ExitRecording::read(&path).unwrap_err().to_string()
        };
        assert!(of(&vec![b' '; LIMIT as usize + 1]).contains("more than"));
        assert!(of(&b"[".repeat(100_000)).contains("is not a recording"));
        assert!(of(b"").contains("is not a recording"));
        let mut bad = recording();
        bad["report"]["reasons"][0]["name"] = json!("\u{1b}[2J");
        bad["report"]["reasons"][0]["rate"] = json!(-1.0);
        let error = of(&serde_json::to_vec(&bad).unwrap());
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }

    #[test]
    fn a_machine_is_what_its_kernel_says() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(RecordedMachine::of(proc.path()), RecordedMachine::default());
        std::fs::create_dir_all(proc.path().join("sys/kernel")).unwrap();
        let write = |path: &str, text: &str| std::fs::write(proc.path().join(path), text).unwrap();
        write("sys/kernel/hostname", "a\x1bb\n");
        write("sys/kernel/osrelease", "6.18.0\n");
        write("cpuinfo", "processor\t: 0\nmodel name\t: EPYC 9: x\n\nprocessor\t: 1\nmodel name\t: other\n");
        let machine = RecordedMachine::of(proc.path());
        assert_eq!((machine.name.as_str(), machine.kernel.as_str()), ("a?b", "6.18.0"));
        assert_eq!((machine.processor.as_str(), machine.processors), ("EPYC 9: x", 2));
    }
}
