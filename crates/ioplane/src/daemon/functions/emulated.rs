//! NICs in software, and what they are plugged into.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_device::Quiescent;
use ioplane_memory::GuestMap;
use ioplane_network::{Port, PortOptions, Switch, SwitchSettings, Tap};
use ioplane_nic::NicError;
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_pci::AnyFunction;

use super::{Insight, Opened};
use crate::daemon::cores::Seating;
use crate::daemon::ground::Ground;
use crate::daemon::switches::{self, Switches};
use crate::refusal::Refusal;
use crate::report::PortReport;
use crate::spec::{CableSpec, ChipWord, Mac};

/// What is seen of it: its port.
struct Plug(Arc<Port>);

impl Insight for Plug {
    fn port(&self) -> Option<PortReport> {
        Some(self.0.reading().into())
    }
}

fn options(name: &str, mac: Mac) -> PortOptions {
    PortOptions { mac: Some(mac.0), ..PortOptions::new(name) }
}

/// Makes a NIC and plugs it in. May block.
pub fn open(
    name: &str,
    chip: ChipWord,
    cable: &CableSpec,
    mac: Mac,
    ground: &Ground,
    switches: &Switches,
) -> Result<Opened, Refusal> {
    let (switch, uplink) = match cable {
        CableSpec::Switch(switch) => (switches.switch(switch)?, None),
        CableSpec::Tap(tap) => {
            // A switch for the two of them.
            let switch = Switch::new(name, SwitchSettings::default());
            let tap = Tap::open(tap, &switch, PortOptions::new(tap))?;
            let seating = Seating { pool: ground.cores.pool().clone(), core: None, moved: BTreeMap::new() };
            let running = Quiescent::new(tap).resume(&seating).map_err(|refused| {
                Refusal::failed(
                    format!("the TAP interface of {name}: {}", refused.error),
                    "see `ioplane core list`",
                )
            })?;
            (switch, Some(running))
        }
    };
    let port = Arc::new(switch.plug(options(name, mac))?);
    let failed =
        |error: NicError| Refusal::failed(format!("{name}: {error}"), "raise the limit on open files");
    let function: AnyFunction = match chip {
        ChipWord::Rtl8139 => {
            let options = Rtl8139Options { name: name.to_owned(), mac: mac.0 };
            Box::new(Rtl8139::new(options, Arc::new(GuestMap::default()), port.clone()).map_err(failed)?)
        }
        ChipWord::Ne2000 => {
            return Err(Refusal::failed("later", "wait"));
        }
    };
    let mut opened = Opened { function, insight: Arc::new(Plug(port)), after: Vec::new() };
    if let Some(uplink) = uplink {
        opened.after.push(Box::new(move || switches::end_tap(uplink)));
    }
    Ok(opened)
}
