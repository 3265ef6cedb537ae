//! A port of an 82599 with virtual functions, for a QEMU with `vfio-user-pci` and e2e/tests/ixgbevf.rs:
//!
//! ```text
//! silicon CABLE REPORT SOCKET[=ADDRESS]...    CABLE: a TAP interface; REPORT: a socket, which tells each that comes what is known of the
//!                                             functions, in JSON; a function for each SOCKET, with ADDRESS set by the port's administrator
//! ```
//!
//! Says `serving` when all of them listen. Runs until it is killed.
//!
//! An IOMMU of a machine maps what a guest in it has page by page: 4 KiB each below 2 MiB, where memory has holes, 2 MiB each above. That is more than
//! the quota of maps of a client, which is for VMMs that have memory in regions. So there is none here.

use std::error::Error;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;

use ioplane_cores::Pool;
use ioplane_device::Quiescent;
use ioplane_device::mutation::{self, Invariant};
use ioplane_host::vfio_user::{Options, serve};
use ioplane_nic::vf82599::Vf82599;
use ioplane_nic::vf82599::spec::API_1_5;
use ioplane_testkit::silicon::{SiliconFunction, SiliconPort};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Counters begin close to their ends, so that they wrap.
const COUNTED: u32 = 0xffff_ff00;
/// As many queues as the port deals out.
const QUEUES: u8 = 4;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("silicon: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [cable, report, functions @ ..] = &words[..] else {
        return Err("usage: silicon CABLE REPORT SOCKET[=ADDRESS]...".into());
    };
    let (mut sockets, mut chips) = (Vec::new(), Vec::new());
    for (number, word) in (1u8..).zip(functions) {
        let (socket, fixed) = word.split_once('=').map_or((word.as_str(), None), |(s, mac)| (s, Some(mac)));
        let own = [2, 0, 0, 0x59, 0x90, number];
        let mut chip = Vf82599::with_queues(own, COUNTED, QUEUES);
        chip.set_newest_api(API_1_5);
        if let Some(mac) = fixed {
            chip.set_mac(address(mac).ok_or_else(|| format!("{mac} is no address"))?);
        }
        sockets.push(socket);
        chips.push(chip);
    }
    mutation::remove(Some(Invariant::KeepsQuotas));
    // Each map holds a descriptor.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    let port = SiliconPort::start(chips, cable)?;
    let nowhere = Arc::new(Pool::new());
    let mut served = Vec::new();
    for (number, socket) in sockets.into_iter().enumerate() {
        let function = SiliconFunction::of(&port, number)?;
        let running = Quiescent::new(function).resume(&*nowhere).map_err(|refused| refused.error)?;
        served.push(serve(running, nowhere.clone(), Options::new(socket))?);
    }
    let listener = UnixListener::bind(report)?;
    println!("serving");
    for stream in listener.incoming() {
        // Whoever asks and leaves is nobody's concern.
        let _ = stream.and_then(|mut stream| writeln!(stream, "{}", serde_json::json!(port.read())));
    }
    Ok(())
}

fn address(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}
