//! NICs in software, and what they are plugged into.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_api::spec::{CableSpec, ChipWord, MacAddress};
use ioplane_device::Quiescent;
use ioplane_memory::GuestMap;
use ioplane_network::{PortOptions, Switch, SwitchSettings, Tap};
use ioplane_nic::NicError;
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};

use super::Opened;
use super::body::Body;
use crate::context::DaemonContext;
use crate::cores::CorePlacement;
use crate::refusal::Refusal;
use crate::switches::{self, Switches};
use crate::taps;

fn options(name: &str, mac: MacAddress) -> PortOptions {
    PortOptions { mac: Some(mac.0), ..PortOptions::new(name) }
}

/// Makes a NIC and plugs it in. May block.
pub fn open(
    name: &str,
    chip: ChipWord,
    cable: &CableSpec,
    mac: MacAddress,
    context: &DaemonContext,
    switches: &Switches,
) -> Result<Opened, Refusal> {
    let (switch, uplink) = match cable {
        CableSpec::Switch(switch) => (switches.switch(switch)?, None),
        CableSpec::Tap(tap) => {
            // A switch for the two of them.
            let switch = Switch::new(name, SwitchSettings::default());
            let name = tap;
            let tap = Tap::open(name, &switch, PortOptions::new(name))?;
            taps::keep(name, &tap, &context.state_file)?;
            let placement =
                CorePlacement { pool: context.cores.pool().clone(), core: None, moved: BTreeMap::new() };
            let running = Quiescent::new(tap).resume(&placement).map_err(|refused| {
                Refusal::failed(
                    format!("the TAP interface {name}: {}", refused.error),
                    "see `ioplane core list`",
                )
            })?;
            (switch, Some(running))
        }
    };
    let port = switch.plug(options(name, mac))?;
    let failed =
        |error: NicError| Refusal::failed(format!("{name}: {error}"), "raise the limit on open files");
    let body = match chip {
        ChipWord::Rtl8139 => {
            let options = Rtl8139Options { name: name.to_owned(), mac: mac.0 };
            Body::Rtl8139(Box::new(
                Rtl8139::new(options, Arc::new(GuestMap::default()), port).map_err(failed)?,
            ))
        }
        ChipWord::Ne2000 => {
            let options = Ne2000Options { name: name.to_owned(), mac: mac.0 };
            Body::Ne2000(Box::new(Ne2000::new(options, port).map_err(failed)?))
        }
    };
    let mut opened = Opened { body, after: Vec::new() };
    if let Some(uplink) = uplink {
        opened.after.push(Box::new(move || switches::end_tap(uplink)));
    }
    Ok(opened)
}
