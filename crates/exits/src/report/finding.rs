//! What could be better, as it stands in a report: the rules are in `advice`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::RunStart;
use crate::event::Detail;
use crate::reason::Kind;

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Certainty {
    /// Worth a try; measure.
    Low,
    /// Usually so.
    Fair,
    /// The exits say so themselves.
    High,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Certainty::Low => "not very sure, measure it",
            Certainty::Fair => "fairly sure",
            Certainty::High => "sure",
        })
    }
}

/// What `guest/tune` can do and undo in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Another clock source.
    Clocksource,
    /// No chatter of the kernel on the console.
    Console,
    /// No I/O scheduler on virtio, IDE, SATA and SCSI disks.
    Scheduler,
    /// NICs' interrupts are turned on again later.
    Napi,
}

impl Action {
    /// The script's word for it.
    pub fn word(self) -> &'static str {
        match self {
            Action::Clocksource => "clocksource",
            Action::Console => "console",
            Action::Scheduler => "scheduler",
            Action::Napi => "napi",
        }
    }
}

/// Something that could be better.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// For the command line.
    pub id: String,
    /// In a few words.
    pub title: String,
    /// What was seen.
    pub evidence: String,
    /// The exits in question: of which sort, about what.
    pub about: Vec<(Kind, Detail)>,
    /// So many exits a second fewer, if the remedy is applied. Zero where it makes exits cheaper rather than fewer, or where nothing
    /// that was seen says how many.
    pub gain: f64,
    /// What to do.
    pub remedy: String,
    /// How sure it is.
    pub certainty: Certainty,
    /// What can be done by `ioplane exits apply`.
    pub action: Option<Action>,
    /// It is about runs of device accesses that begin there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<RunStart>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { id, title, evidence, remedy, certainty, action, .. } = self;
        writeln!(f, "{id}: {title}")?;
        writeln!(f, "    seen      {evidence}")?;
        writeln!(f, "    expected  {} ({certainty})", self.expected())?;
        writeln!(f, "    remedy    {remedy}")?;
        if action.is_some() {
            writeln!(f, "    apply     ioplane exits apply {id} --ssh GUEST")?;
        }
        Ok(())
    }
}

impl Finding {
    /// What the remedy is worth, in words.
    pub fn expected(&self) -> String {
        if self.gain > 0.0 {
            format!("{:.0} exits a second fewer", self.gain)
        } else {
            "no number of exits can be promised".into()
        }
    }
}
