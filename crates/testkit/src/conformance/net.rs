//! Virtio-net under test: data queues at a port of a switch, with a neighbour at each.
//!
//! ```text
//!   vCPU 0: room in the receive ring   <-- NIC <-- switch <-- source: one frame for each buffer, sent when it is asked for
//!   vCPU 1: frames in the transmit ring --> NIC --> switch --> sink: looks at what has arrived when a frame is used
//! ```
//!
//! Frames that have been sent and not received wait with the port, which outlives the instances here, so that none may be
//! lost: what is sent comes once, in its order, whatever is done to the device. There is nothing to stall: what a
//! NIC has in flight between two polls it takes back by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::{Access, DeviceError, Parked, Poller, QuiescenceProof, RegisterAddress};
use ioplane_network::{HEAD, Mac, Offload, Port, PortOptions, PortRx, PortTx, Sent, Switch, SwitchSettings};
use ioplane_virtio::net::spec::*;
use ioplane_virtio::net::{Net, NetOptions};
use ioplane_virtio::spec::mmio::CONFIG;
use ioplane_virtio::{QueueStart, RingState, VirtioDevice, VirtioInfo};

use super::virtio::{ConfigTouch, DeviceUnderTest, Fixture, Program, Request};
use super::{Bus, Dice};
use crate::driver::net::NetHeader;
use crate::toy::mix;

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const HEADER: usize = NetHeader::LONG as usize;
/// Room for any frame of these programs.
const ROOM: u32 = HEADER as u32 + 1514;
/// How long a frame may take to its sink: a poll that is under way, on a core that may be starved.
const SOON: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy)]
pub struct Nics;

impl DeviceUnderTest for Nics {
    type Model = Instance;

    fn fixture(&self) -> Fixture<Instance> {
        let switch = Switch::new("lan", SwitchSettings::default());
        let plug = |name: &str, mac| {
            let options = PortOptions { mac: Some(mac), ..PortOptions::new(name) };
            switch.plug(options).expect("room for a port")
        };
        let port = Arc::new(plug("nic", OWN));
        let (instances, newest) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
        let model = move || {
            let options = NetOptions {
                name: "nic".into(),
                mac: OWN,
                pairs: 1,
                queue_size: 256,
                mtu: 1500,
                control: false,
            };
            let number = 1 + instances.fetch_add(1, Ordering::Relaxed);
            Instance { net: Net::new(options, port.clone()), number, newest: newest.clone() }
        };
        let neighbours = AtomicU64::new(0);
        let switch = switch.clone();
        let program = move |queue| {
            let number = neighbours.fetch_add(1, Ordering::Relaxed) as u8;
            let mac = [2, 0, 0, 0, 1, number];
            let name = format!("neighbour{number}");
            let options = PortOptions { mac: Some(mac), ..PortOptions::new(&name) };
            let port = switch.plug(options).expect("room for a port");
            port.set_up(true);
            if queue == 0 {
                Box::new(Source { port_tx: port.tx(0), mac, expected: 0, sent: 0, _port: port })
                    as Box<dyn Program>
            } else {
                Box::new(Sink { port_rx: port.rx(0), mac, expected: 0, sent: 0, _port: port })
            }
        };
        Fixture { model: Box::new(model), valve: None, program: Box::new(program) }
    }

    fn features(&self) -> u64 {
        VIRTIO_NET_F_MAC | VIRTIO_NET_F_STATUS | VIRTIO_NET_F_MTU
    }

    fn touch(&self) -> ConfigTouch {
        look_at_address
    }
}

/// Both vCPUs look at the configuration.
fn look_at_address(bus: &Bus, _vcpu: usize, _dice: &mut Dice) -> Result<u64, String> {
    let mut bytes = [0; 8];
    bus.access(RegisterAddress::Bar(0, CONFIG), Access::Read(&mut bytes))?;
    if bytes[..6] != OWN {
        return Err(format!("transcript: the address {:02x?}", &bytes[..6]));
    }
    Ok(u64::from_le_bytes(bytes))
}

/// One instance of the NIC. They share a port, which belongs to the one that has started last: the reset of a predecessor
/// must not take the link down.
pub struct Instance {
    net: Net,
    number: u64,
    newest: Arc<AtomicU64>,
}

impl VirtioDevice for Instance {
    fn info(&self) -> &VirtioInfo {
        self.net.info()
    }

    fn features(&self) -> u64 {
        self.net.features()
    }

    fn accept(&mut self, features: u64) {
        self.net.accept(features);
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        self.net.read_config(offset, out);
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        self.net.write_config(offset, bytes);
    }

    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError> {
        self.newest.fetch_max(self.number, Ordering::AcqRel);
        self.net.start_queue(start)
    }

    fn stop_queue(&mut self, parked: Parked) -> RingState {
        self.net.stop_queue(parked)
    }

    fn save_own(&self, proof: &QuiescenceProof) -> Vec<u8> {
        self.net.save_own(proof)
    }

    fn load_own(&mut self, proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String> {
        self.net.load_own(proof, bytes)
    }

    fn reset_own(&mut self) {
        if self.newest.load(Ordering::Acquire) == self.number {
            self.net.reset_own();
        }
    }
}

/// The `number`th frame, of a length that goes with it.
fn frame(to: Mac, from: Mac, number: u64) -> Vec<u8> {
    let len = 60 + Dice::new(number).below(1455) as usize;
    let mut bytes = [&to[..], &from, &[0x88, 0xb5], &number.to_le_bytes()].concat();
    bytes.extend((bytes.len()..len).map(|at| ((at as u64 * number) >> 3) as u8));
    bytes
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, byte| mix(sum, u64::from(*byte)))
}

/// Room for frames: each time the driver makes some, one frame is sent to it.
struct Source {
    port_tx: PortTx,
    mac: Mac,
    sent: u64,
    expected: u64,
    _port: Port,
}

impl Program for Source {
    fn ask(&mut self, _slot: u16, dice: &mut Dice) -> Result<Request, String> {
        let bytes = frame(OWN, self.mac, self.sent);
        self.sent += 1;
        let sent =
            self.port_tx.send(&bytes[..bytes.len().min(HEAD)], bytes.len(), Offload::NONE, &mut |out| {
                out.copy_from_slice(&bytes);
                true
            });
        // A check that has ended takes the device away from a guest that goes on.
        if sent != Sent::Delivered(1) {
            return Err(format!("transcript: the switch lost a frame: {sent:?}"));
        }
        self.port_tx.flush();
        // Cut anywhere but in the header, now and then into many.
        let writable = match dice.below(4) {
            0 => [vec![HEADER as u32 + 2], vec![(ROOM - HEADER as u32 - 2) / 8; 8]].concat(),
            1 => vec![100, ROOM - 100],
            _ => vec![ROOM],
        };
        Ok(Request { bytes: Vec::new(), readable: Vec::new(), writable })
    }

    fn answer(&mut self, bytes: &[u8], written: u32) -> Result<u64, String> {
        let expected = frame(OWN, self.mac, self.expected);
        let number = self.expected;
        self.expected += 1;
        let came = bytes.get(..written as usize).ok_or("transcript: more written than there is room")?;
        let (header, came) = came.split_first_chunk().ok_or("transcript: a frame without a header")?;
        if NetHeader::from_bytes(*header) != (NetHeader { num_buffers: 1, ..NetHeader::default() }) {
            return Err(format!("transcript: the header {header:02x?}"));
        }
        if came != expected {
            return Err(format!(
                "transcript: frame {number} has {} bytes, not the {} sent",
                came.len(),
                expected.len()
            ));
        }
        Ok(sum(came))
    }
}

/// Frames to send: each has arrived soon after it is used.
struct Sink {
    port_rx: PortRx,
    mac: Mac,
    sent: u64,
    expected: u64,
    _port: Port,
}

impl Program for Sink {
    fn ask(&mut self, _slot: u16, dice: &mut Dice) -> Result<Request, String> {
        let frame = frame(self.mac, OWN, self.sent);
        self.sent += 1;
        let len = frame.len() as u32;
        let readable = match dice.below(4) {
            0 => vec![5, HEADER as u32 - 5, 20, len - 20],
            1 => vec![HEADER as u32, 6, 6, 1, 1, len - 14],
            _ => vec![HEADER as u32 + len],
        };
        let bytes = [&NetHeader::default().to_bytes()[..], &frame].concat();
        Ok(Request { bytes, readable, writable: Vec::new() })
    }

    fn answer(&mut self, _bytes: &[u8], written: u32) -> Result<u64, String> {
        let expected = frame(self.mac, OWN, self.expected);
        let number = self.expected;
        self.expected += 1;
        if written != 0 {
            return Err(format!("transcript: {written} bytes written to a frame that was sent"));
        }
        // Used frames are shown to the driver before the batch is handed over.
        let deadline = Instant::now() + SOON;
        while self.port_rx.front().is_none() {
            if Instant::now() >= deadline {
                return Err(format!("transcript: frame {number} was used and does not arrive"));
            }
            std::thread::yield_now();
        }
        let came = self.port_rx.front().map(|frame| frame.bytes().to_vec()).unwrap_or_default();
        self.port_rx.pop();
        if came != expected {
            return Err(format!(
                "transcript: frame {number} arrives with {} bytes, not {}",
                came.len(),
                expected.len()
            ));
        }
        Ok(sum(&came))
    }
}
