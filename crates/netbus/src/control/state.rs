//! How a device is, as its host tells it, and what has happened to it from one state to the next.

use serde::{Deserialize, Serialize};

use crate::names::{is_name, printable};

/// Longest name of an incarnation, bytes.
const LONGEST_INCARNATION: usize = 160;
/// Longest text for people, bytes.
const LONGEST_TEXT: usize = 1200;

/// Whether a device is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DevicePresence {
    /// It can be used.
    Served,
    /// It was taken away, by a person.
    Withdrawn,
    /// Its host stops serving everything, and may come back.
    Stopping,
}

/// How a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// What kind of device it is, such as `disk`. Nobody here knows kinds.
    pub kind: String,
    /// Which device this is: whoever used another incarnation used another device, or this one before something was lost.
    pub incarnation: String,
    /// How much it holds, in the unit of its kind.
    pub units: u64,
    /// Whether it is there.
    pub presence: DevicePresence,
    /// What is wrong with the device itself, if anything: a text for people.
    pub trouble: Option<String>,
    /// Who holds it, where only one may use it at a time: a text for people.
    pub holder: Option<String>,
}

/// What has happened to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceEvent {
    /// It can be used, after it could not.
    Served,
    /// It was taken away.
    Withdrawn,
    /// Its host stops.
    Stopping,
    /// It is another one, or has lost what was not made durable.
    Incarnation,
    /// It holds so much.
    Capacity {
        /// Before.
        from: u64,
        /// By now.
        to: u64,
    },
    /// It fails; or does so no more.
    Trouble(Option<String>),
    /// Who holds it; nobody, if there is no name.
    Holder(Option<String>),
}

impl DeviceState {
    /// What is wrong with a state that a peer has told: its texts are shown on terminals.
    pub(super) fn check(&self) -> Result<(), String> {
        if !is_name(&self.kind) {
            return Err("its kind is no name".to_owned());
        }
        let graphic = self.incarnation.bytes().all(|byte| byte.is_ascii_graphic());
        if !graphic || self.incarnation.len() > LONGEST_INCARNATION {
            return Err("its incarnation has characters that cannot be shown, or too many".to_owned());
        }
        let texts = [("trouble", &self.trouble), ("holder", &self.holder)];
        for (what, text) in texts {
            let text = text.as_deref().unwrap_or_default();
            if text.len() > LONGEST_TEXT || text.chars().any(char::is_control) {
                return Err(format!("its {what} has characters that cannot be shown, or too many"));
            }
        }
        Ok(())
    }

    /// With texts that a subscriber takes.
    pub(super) fn sendable(mut self) -> DeviceState {
        for text in [&mut self.trouble, &mut self.holder].into_iter().flatten() {
            *text = printable(text);
        }
        self
    }

    /// What has happened since it was as `before`; without that, what is not as a good device is.
    pub fn since(&self, before: Option<&DeviceState>) -> Vec<DeviceEvent> {
        let mut events = Vec::new();
        let was = before.map_or(DevicePresence::Served, |before| before.presence);
        if self.presence != was {
            events.push(match self.presence {
                DevicePresence::Served => DeviceEvent::Served,
                DevicePresence::Withdrawn => DeviceEvent::Withdrawn,
                DevicePresence::Stopping => DeviceEvent::Stopping,
            });
        }
        if let Some(before) = before {
            if self.incarnation != before.incarnation {
                events.push(DeviceEvent::Incarnation);
            }
            if self.units != before.units {
                events.push(DeviceEvent::Capacity { from: before.units, to: self.units });
            }
            if self.holder != before.holder {
                events.push(DeviceEvent::Holder(self.holder.clone()));
            }
        }
        if self.trouble != before.and_then(|before| before.trouble.clone()) {
            events.push(DeviceEvent::Trouble(self.trouble.clone()));
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> DeviceState {
        DeviceState {
            kind: "byte-stream".to_owned(),
            incarnation: "7@boot".to_owned(),
            units: 100,
            presence: DevicePresence::Served,
            trouble: None,
            holder: None,
        }
    }

    #[test]
    fn what_happened_is_what_differs() {
        let before = stream();
        assert_eq!(before.since(Some(&before)), []);
        assert_eq!(before.since(None), [], "there is nothing to tell of a good device");
        let after = DeviceState {
            units: 300,
            presence: DevicePresence::Withdrawn,
            trouble: Some("cable cut".to_owned()),
            holder: Some("host-b".to_owned()),
            incarnation: "8@boot".to_owned(),
            ..stream()
        };
        let trouble = DeviceEvent::Trouble(Some("cable cut".to_owned()));
        assert_eq!(
            after.since(Some(&before)),
            [
                DeviceEvent::Withdrawn,
                DeviceEvent::Incarnation,
                DeviceEvent::Capacity { from: 100, to: 300 },
                DeviceEvent::Holder(Some("host-b".to_owned())),
                trouble.clone(),
            ]
        );
        assert_eq!(after.since(None), [DeviceEvent::Withdrawn, trouble]);
        assert!(before.since(Some(&after)).contains(&DeviceEvent::Trouble(None)));
        assert!(before.since(Some(&after)).contains(&DeviceEvent::Served));
    }

    #[test]
    fn what_a_terminal_would_suffer_from_is_refused_and_never_sent() {
        let text = |text: &str| Some(text.to_owned());
        for bad in [
            DeviceState { kind: "a b".to_owned(), ..stream() },
            DeviceState { incarnation: "x\n".to_owned(), ..stream() },
            DeviceState { incarnation: "x".repeat(LONGEST_INCARNATION + 1), ..stream() },
            DeviceState { trouble: text("\u{1b}[2J"), ..stream() },
            DeviceState { holder: text(&"x".repeat(LONGEST_TEXT + 1)), ..stream() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        let odd = DeviceState {
            trouble: text("\u{1b}[2J\u{e9}"),
            holder: text(&"\u{10348}".repeat(2000)),
            ..stream()
        };
        odd.sendable().check().unwrap();
        stream().check().unwrap();
    }
}
