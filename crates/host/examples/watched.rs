//! A NIC that no machine has, mediated, for any VMM: `watched CHIP SOCKET TAP` serves a simulated `rtl8139` or `ne2000` under the monitor by
//! vfio-user, its wire the TAP interface. For trying models and monitors with real drivers where there is no VFIO.
//!
//! Each line on standard input is answered by one line of JSON:
//!
//! ```text
//!   counts           what the monitor has counted
//!   events           the last events
//!   round MILLIS     quiesce within that time, by force at its end; save; wipe the card; load; resume
//!   end              (or the end of the input)
//! ```

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Pool};
use ioplane_device::{OnMiss, QuiescePolicy, Quiescent, Stop};
use ioplane_host::vfio_user::{Handle, Options, serve};
use ioplane_memory::GuestMap;
use ioplane_network::{PortOptions, Switch, SwitchSettings, Tap};
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_passthrough::monitor::{Monitor, MonitorOptions};
use ioplane_pci::Function;
use ioplane_testkit::simulated::{Bench, Simulated};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [chip, socket, tap] = &words[..] else { return Err("watched rtl8139|ne2000 SOCKET TAP".into()) };
    let pool = Arc::new(Pool::with([CoreSettings::default()])?);
    let switch = Switch::new("wire", SwitchSettings::default());
    let wire = Tap::open(tap, &switch, PortOptions::new(tap))?;
    let running = Quiescent::new(wire).resume(&*pool).map_err(|refused| refused.error)?;
    let mac = [2, 0, 0, 0, 0x81, 0x39];
    let port = Arc::new(switch.plug(PortOptions { mac: Some(mac), ..PortOptions::new("card") })?);
    match chip.as_str() {
        "rtl8139" => {
            let options = Rtl8139Options { name: "card".into(), mac };
            let card = Rtl8139::new(options, Arc::new(GuestMap::default()), port)?;
            watch(card, socket)?;
        }
        "ne2000" => watch(Ne2000::new(Ne2000Options { name: "card".into(), mac }, port)?, socket)?,
        other => return Err(format!("{other} is neither rtl8139 nor ne2000").into()),
    }
    drop(running);
    Ok(())
}

/// Lets the card do what is to be done as soon as there is something: what electricity does for others.
fn power<F: Function>(bench: Bench<F>) {
    std::thread::spawn(move || {
        loop {
            let attention = bench.with(|card| card.attention().cloned());
            if let Some(file) = attention {
                let mut files = [rustix::event::PollFd::new(&file, rustix::event::PollFlags::IN)];
                let _ = rustix::event::poll(&mut files, None);
            }
            bench.tick();
        }
    });
}

fn watch<F: Function>(card: F, socket: &str) -> Result<(), Failure> {
    let (hardware, bench) = Simulated::new("simulated", card)?;
    power(bench);
    let identity = ioplane_hardware::Hardware::identity(&hardware);
    let model = ioplane_passthrough::catalog::find(identity.vendor, identity.device, identity.revision)
        .ok_or("no model fits this card")?;
    let monitor = Monitor::new(hardware, model, MonitorOptions::new("card"))?;
    let nowhere = Arc::new(Pool::new());
    let running = Quiescent::new(monitor).resume(&*nowhere).map_err(|refused| refused.error)?;
    let handle = serve(running, nowhere, Options::new(socket))?;
    eprintln!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let said = match (words.next(), words.next()) {
            (Some("counts"), _) => {
                let looked =
                    handle.with(|device| device.look().map(|monitor| serde_json::json!(monitor.reading())));
                looked.wait()?.unwrap_or_default()
            }
            (Some("events"), _) => {
                let looked =
                    handle.with(|device| device.look().map(|monitor| serde_json::json!(monitor.events(0))));
                looked.wait()?.unwrap_or_default()
            }
            (Some("round"), Some(millis)) => round(&handle, Duration::from_millis(millis.parse()?)),
            (Some("end"), _) => break,
            _ => serde_json::json!({"error": "counts, events, round MILLIS or end"}),
        };
        println!("{said}");
        std::io::stdout().flush()?;
    }
    handle.stop(true)?;
    Ok(())
}

/// Saves the card, wipes it, and brings it back, under its guest.
fn round<H: ioplane_hardware::Hardware>(
    handle: &Handle<Monitor<H>>,
    patience: Duration,
) -> serde_json::Value {
    let begun = Instant::now();
    let went = || -> Result<(&str, usize, Duration), Failure> {
        let policy =
            QuiescePolicy { deadline: begun + patience, on_miss: OnMiss::Suspend { timeout: patience } };
        let held = handle.hold(policy, Duration::from_secs(60)).wait()??;
        let how = if held.stop == Stop::Drained { "recognised" } else { "forced" };
        let settled = begun.elapsed();
        let state = handle
            .at_quiescence(policy, |quiescent| {
                let state = quiescent.save();
                quiescent.reset();
                state
            })
            .wait()???;
        let bytes = state.body.len();
        handle.load(policy, state).wait()???;
        Ok((how, bytes, settled))
    };
    match went() {
        Ok((how, bytes, settled)) => serde_json::json!({
            "stop": how, "bytes": bytes, "settled_us": settled.as_micros() as u64,
            "away_us": begun.elapsed().saturating_sub(settled).as_micros() as u64,
        }),
        Err(error) => serde_json::json!({"error": error.to_string()}),
    }
}
