//! An emulated NIC for any VMM: `emulated rtl8139|ne2000 SOCKET TAP` serves it by vfio-user, its wire the TAP interface. For trying it
//! with real drivers. Each line on standard input is answered by its counts, one line of JSON; `round` first saves it, wipes it, loads it
//! and goes on. Ends with its input.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Pool};
use ioplane_device::{OnMiss, QuiescePolicy, Quiescent};
use ioplane_host::vfio_user::{Handle, Options, serve};
use ioplane_memory::GuestMap;
use ioplane_network::{PortOptions, Switch, SwitchSettings, Tap};
use ioplane_nic::ChipCounts;
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_pci::Function;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [chip, socket, tap] = &words[..] else { return Err("emulated rtl8139|ne2000 SOCKET TAP".into()) };
    let pool = Arc::new(Pool::with([CoreSettings::default()])?);
    let switch = Switch::new("wire", SwitchSettings::default());
    let wire = Tap::open(tap, &switch, PortOptions::new(tap))?;
    let running = Quiescent::new(wire).resume(&*pool).map_err(|refused| refused.error)?;
    let mac = [2, 0, 0, 0, 0x81, 0x39];
    let port = Arc::new(switch.plug(PortOptions { mac: Some(mac), ..PortOptions::new("card") })?);
    let name = "card".to_owned();
    match chip.as_str() {
        "rtl8139" => {
            let card = Rtl8139::new(Rtl8139Options { name, mac }, Arc::new(GuestMap::default()), port)?;
            show(card, socket, Rtl8139::counts)?;
        }
        "ne2000" => show(Ne2000::new(Ne2000Options { name, mac }, port)?, socket, Ne2000::counts)?,
        other => return Err(format!("{other} is neither rtl8139 nor ne2000").into()),
    }
    drop(running);
    Ok(())
}

fn show<F: Function>(card: F, socket: &str, counts: fn(&F) -> ChipCounts) -> Result<(), Failure> {
    let nowhere = Arc::new(Pool::new());
    let running = Quiescent::new(card).resume(&*nowhere).map_err(|refused| refused.error)?;
    let handle = serve(running, nowhere, Options::new(socket))?;
    for line in std::io::stdin().lines() {
        if line? == "round" {
            round(&handle)?;
        }
        let counts = handle.with(move |device| device.look().map(counts)).wait()?;
        println!("{}", serde_json::json!(counts));
    }
    handle.stop(true)?;
    Ok(())
}

/// Saves the card, wipes it, and brings it back, under its guest.
fn round<F: Function>(handle: &Handle<F>) -> Result<(), Failure> {
    let deadline = Instant::now() + Duration::from_secs(1);
    let policy = QuiescePolicy { deadline, on_miss: OnMiss::Undrain };
    handle.hold(policy, Duration::from_secs(60)).wait()??;
    let state = handle
        .at_quiescence(policy, |quiescent| {
            let state = quiescent.save();
            quiescent.reset();
            state
        })
        .wait()???;
    handle.load(policy, state).wait()???;
    Ok(())
}
