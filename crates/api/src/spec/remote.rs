//! Disks of other machines: the one list of what can be said of them beside where they are.
//!
//! From the list come the fields of what is stored, of the forms that make and change, their options and help on the command line, and the keys
//! of the configuration.

use std::path::PathBuf;

use super::lost::timeout_flaws;
use super::{DoubtWord, Flaw, LimitsSpec, NbdUri, TimeoutWord, spec};
use crate::size::Size;

/// What a queue of a disk of another machine may keep of its writes: below it flushes all the time, above it takes the host's memory.
const RETAIN: std::ops::RangeInclusive<u64> = 1 << 20..=256 << 20;

/// What all of them together may: it is taken whether or not anything is written.
const RETAIN_IN_ALL: u64 = 1 << 30;

/// Seconds without an answer. Less than a second is what disks take at times; more than minutes nobody waits to learn of a dead host.
const SILENCE: std::ops::RangeInclusive<u64> = 1..=300;

/// Hands the list to the macro that asks for it, behind what that macro has given it: `[FIELD: TYPE = VALUE, WHICH OTHER OPTION IT NEEDS, HELP, WHAT IT IS IN A BODY
/// THAT CHANGES A DISK]`. The order is that of the help.
macro_rules! remote_options {
    ($to:ident! $($given:tt)*) => {
        $to! { $($given)*
            [timeout_s: u64 = "SECONDS", "remote",
                "Fail requests when the server has not been reachable for so many seconds, or do what --on-timeout says [default: never, they wait]",
                "Of that export: fail requests when its server has not been reachable for so many seconds, or do what `on_timeout` says; without `remote` of the export which the disk has. 0 for never."]
            [on_timeout: $crate::spec::TimeoutWord = "WHAT", "timeout_s",
                "What happens then: error (requests fail), pause (the VM is paused by --qmp until the server is back), or wait [default: error]",
                "What happens then, likewise."]
            [qmp: std::path::PathBuf = "SOCKET", "remote",
                "A QMP socket of the VM that uses the disk: -qmp unix:SOCKET,server=on,wait=off. It is connected to only when the VM is to be paused, to go on, or to move",
                "The QMP socket of the VM, likewise; an empty path for none."]
            [reserve_iops: u64 = "N", "remote",
                "Have the exporter keep so many requests per second for it; refused if they are not free there [default: what others leave]",
                "Requests per second that the server of that export is to keep for the disk; without `remote` that of the export which the disk has. 0 for none."]
            [reserve_bandwidth: $crate::size::Size = "SIZE", "remote",
                "Have the exporter keep so many bytes per second for it; refused if they are not free there [default: what others leave]",
                "Bytes per second that it is to keep for the disk, likewise."]
            [retain: $crate::size::Size = "SIZE", "remote",
                "Keep up to so many bytes of each queue's writes until its server has made them durable, 1M to 256M; flushed when a half is full [default: 16M]",
                "Bytes of each queue's writes that are kept until the server of that export has made them durable."]
            [silence_s: u64 = "SECONDS", "remote",
                "Count the connection as lost when the server has not answered for so many seconds, 1 to 300; longer than its disk may take [default: 10]",
                "Seconds without an answer of the server of that export after which the connection counts as lost."]
            [in_doubt: $crate::spec::DoubtWord = "WHAT", "remote",
                "Writes and flushes without an answer when the connection to a server other than ioplane is lost: fail, or resend. Resend only to a server that finishes or forgets the requests of a lost connection before it serves the next one: otherwise old data overwrite newer ones [default: fail]",
                "What becomes of writes and flushes without an answer when the connection to the server of that export is lost, if it is none of ioplane's."]
        }
    };
}

pub(crate) use remote_options;

/// The value of an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionValue {
    /// A number.
    Number(u64),
    /// Bytes.
    Size(Size),
    /// A word or a path.
    Text(String),
}

macro_rules! option_values {
    ($($kind:ty: $value:ident => $made:expr;)*) => {$(
        impl From<&$kind> for OptionValue {
            fn from($value: &$kind) -> Self {
                $made
            }
        }
    )*};
}

option_values! {
    u64: number => OptionValue::Number(*number);
    Size: size => OptionValue::Size(*size);
    PathBuf: path => OptionValue::Text(path.display().to_string());
    TimeoutWord: word => OptionValue::Text(word.word().to_owned());
    DoubtWord: word => OptionValue::Text(word.word().to_owned());
}

macro_rules! remote_spec {
    ($([$option:ident: $kind:ty = $value:literal, $needs:literal, $help:literal, $change:literal])*) => {
        spec! {
            /// A disk of another machine. What is left out is as usual: so is what has the usual value.
            RemoteSpec {
                /// Where it is.
                remote: NbdUri,
                $(
                    #[doc = $help]
                    #[serde(default, skip_serializing_if = "Option::is_none")]
                    $option: Option<$kind>,
                )*
            }
        }

        impl RemoteSpec {
            /// The names of its options.
            pub const OPTIONS: &[&str] = &[$(stringify!($option)),*];

            /// One of which nothing else is said.
            pub fn new(remote: NbdUri) -> Self {
                RemoteSpec { remote, $($option: None,)* }
            }

            /// The options that have been said, in the order of the list.
            pub fn options(&self) -> Vec<(&'static str, OptionValue)> {
                let options = [$((stringify!($option), self.$option.as_ref().map(OptionValue::from)),)*];
                options.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
            }
        }
    };
}

remote_options! { remote_spec! }

impl RemoteSpec {
    /// Bytes of each queue's writes that are kept, if nobody says.
    pub const RETAIN: u64 = 16 << 20;
    /// Seconds of silence, if nobody says.
    pub const SILENCE_S: u64 = 10;

    /// What somebody asks for, without what would be so anyway.
    pub(super) fn without_the_usual(mut self) -> Self {
        // 0 is no reservation, as it is no limit.
        self.reserve_iops = self.reserve_iops.filter(|iops| *iops > 0);
        self.reserve_bandwidth = self.reserve_bandwidth.filter(|bandwidth| bandwidth.0 > 0);
        self.on_timeout = self.on_timeout.filter(|word| !word.is_usual());
        self.silence_s = self.silence_s.filter(|seconds| *seconds != Self::SILENCE_S);
        self.in_doubt = self.in_doubt.filter(|word| *word != DoubtWord::default());
        self
    }

    /// What is to be kept for it of an exporter's capacity: rates without bursts.
    pub fn reserved(&self) -> LimitsSpec {
        LimitsSpec { rate: self.reserve_iops, bandwidth: self.reserve_bandwidth, ..LimitsSpec::default() }
    }

    /// Seconds without an answer after which a connection counts as lost.
    pub fn silence_s(&self) -> u64 {
        self.silence_s.unwrap_or(Self::SILENCE_S)
    }

    /// What is wrong with it, for a disk or an export with so many of what `each` names.
    pub(super) fn flaws(&self, count: u16, each: &str) -> Vec<Flaw> {
        let word = self.on_timeout.unwrap_or_default();
        let mut flaws = timeout_flaws(self.timeout_s, word, self.qmp.as_deref());
        flaws.extend(retain_flaw(self.retain, count, each));
        flaws.extend(self.reserved().flaws(["reserve_iops", "", "reserve_bandwidth", ""]));
        flaws.extend(self.silence_s.filter(|seconds| !SILENCE.contains(seconds)).map(|seconds| {
            let remedy = format!(
                "give {} to {}, or leave it out for {}",
                SILENCE.start(),
                SILENCE.end(),
                Self::SILENCE_S
            );
            Flaw::new("silence_s", format!("silence_s = {seconds}"), remedy)
        }));
        flaws
    }
}

/// What is wrong with how much is kept, for each of so many of what `each` names.
fn retain_flaw(retain: Option<Size>, count: u16, each: &str) -> Option<Flaw> {
    let retain = retain?;
    let (least, most) = (*RETAIN.start(), *RETAIN.end());
    if !RETAIN.contains(&retain.0) {
        let remedy = format!("give {} to {}, or leave it out for 16M", Size(least), Size(most));
        return Some(Flaw::new("retain", format!("retain = \"{retain}\" for each {each}"), remedy));
    }
    let all = retain.0 * u64::from(count);
    let fits = (RETAIN_IN_ALL / u64::from(count.max(1))).min(most);
    // A whole number of MiB is what a person would write.
    let remedy = format!("give {} at most, or fewer {each}s", Size(fits - fits % least));
    (all > RETAIN_IN_ALL).then(|| {
        let limit = Size(RETAIN_IN_ALL);
        let reason = format!(
            "retain = \"{retain}\" for each of {count} {each}s is {} of memory, more than {limit}",
            Size(all)
        );
        Flaw::new("retain", reason, remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{BackingSpec, DiskForm, ServedSpec, SpecFields};

    fn disk(form: DiskForm) -> Result<RemoteSpec, Vec<&'static str>> {
        let form = DiskForm { remote: Some("nbd://host-a/data".parse().unwrap()), ..form };
        let spec = form.spec("a").map_err(|flaws| flaws.iter().map(|flaw| flaw.field).collect::<Vec<_>>())?;
        match spec.backing {
            BackingSpec::Remote(remote) => Ok(remote),
            _ => panic!("it is of another machine"),
        }
    }

    #[test]
    fn silence_has_bounds() {
        let silence = |seconds| disk(DiskForm { silence_s: Some(seconds), ..DiskForm::default() });
        for seconds in [0, 301, u64::MAX] {
            assert_eq!(silence(seconds), Err(vec!["silence_s"]), "{seconds}");
        }
        for seconds in [1, 300] {
            assert_eq!(silence(seconds).unwrap().silence_s(), seconds);
        }
        assert_eq!(disk(DiskForm::default()).unwrap().silence_s(), 10);
    }

    /// What is stored is the same whether the usual is said or not, and is read again.
    #[test]
    fn the_usual_is_not_stored() {
        let usual = DiskForm {
            on_timeout: Some(TimeoutWord::Error),
            in_doubt: Some(DoubtWord::Fail),
            reserve_iops: Some(0),
            ..DiskForm::default()
        };
        let plain = disk(DiskForm::default()).unwrap();
        assert_eq!(disk(usual).unwrap(), plain);
        assert!(plain.options().is_empty());
        let other = disk(DiskForm {
            in_doubt: Some(DoubtWord::Resend),
            silence_s: Some(3),
            retain: Some(Size(1 << 20)),
            ..DiskForm::default()
        })
        .unwrap();
        let names: Vec<_> = other.options().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["retain", "silence_s", "in_doubt"]);
        assert_eq!(other.differing(&plain), names);
        let stored = serde_json::to_value(BackingSpec::Remote(other.clone())).unwrap();
        let expected = serde_json::json!({
            "kind": "remote", "remote": "nbd://host-a/data", "retain": 1 << 20, "silence_s": 3, "in_doubt": "resend"
        });
        assert_eq!(stored, expected);
        assert_eq!(serde_json::from_value::<BackingSpec>(stored).unwrap(), BackingSpec::Remote(other));
        let unknown = serde_json::json!({ "kind": "remote", "remote": "data", "colour": 1 });
        assert!(serde_json::from_value::<BackingSpec>(unknown).is_err());
    }

    #[test]
    fn options_say_nothing_about_a_disk_of_this_host() {
        let form = DiskForm {
            path: Some("/a".into()),
            in_doubt: Some(DoubtWord::Resend),
            silence_s: Some(3),
            ..DiskForm::default()
        };
        let flaws = form.spec("a").unwrap_err();
        assert_eq!(flaws.iter().map(|flaw| flaw.field).collect::<Vec<_>>(), ["silence_s", "in_doubt"]);
        let spec = DiskForm { path: Some("/a".into()), ..DiskForm::default() }.spec("a").unwrap();
        assert!(spec.own_flaws().is_empty());
    }
}
