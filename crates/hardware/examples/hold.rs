//! Takes a network card from the host, looks at it through VFIO, and gives it back; for e2e/tests/passthrough.rs and for people.
//!
//! ```text
//! hold list                          this host's functions as JSON
//! hold ADDRESS FOLDER [forced]       take it, use it, give it back
//! hold ADDRESS FOLDER [forced] wait  take it and keep it until killed; `bound`: without opening it, for another program
//! hold recover FOLDER                give back what the dead have left
//! ```

use std::error::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::Interrupt;
use ioplane_hardware::lease::{Accepted, recover};
use ioplane_hardware::{Hardware, Lease, PciAddress, Vfio, inventory};
use ioplane_memory::GuestMap;
use ioplane_pci::{Irq, Wire, spec};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const SYS: &str = "/sys";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hold: {error}");
            ExitCode::FAILURE
        }
    }
}

fn park(said: &str) -> ! {
    println!("{said}");
    loop {
        std::thread::park();
    }
}

fn run() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match &words[..] {
        ["list"] => {
            let all = inventory::list(Path::new(SYS), |_| None)?;
            println!("{}", serde_json::to_string_pretty(&all)?);
            Ok(())
        }
        ["recover", folder] => {
            for one in recover(Path::new(SYS), Path::new(folder)) {
                one.outcome?;
                println!("recovered {}", one.address);
            }
            Ok(())
        }
        [address, folder, options @ ..] => hold(address.parse()?, Path::new(folder), options),
        _ => Err("usage: hold list | hold ADDRESS FOLDER [forced] [wait|bound] | hold recover FOLDER".into()),
    }
}

fn hold(address: PciAddress, folder: &Path, options: &[&str]) -> Outcome {
    let accepted = Accepted { in_use: options.contains(&"forced"), unsafe_interrupts: false };
    let lease = Lease::take(Path::new(SYS), address, folder, accepted)?;
    println!("taken from {}", lease.driver().unwrap_or("nobody"));
    if options.contains(&"bound") {
        park("bound");
    }
    let mut card = Vfio::open(Path::new(SYS), address)?;
    card.keep(lease);
    if options.contains(&"wait") {
        park("held");
    }
    let id = card.identity();
    println!("id {:04x}:{:04x} class {:06x}", id.vendor, id.device, id.class);
    for (index, bar) in card.bars().iter() {
        let pages: Vec<_> = bar.pages().iter().map(|p| format!("{:#x}+{:#x}", p.offset, p.len)).collect();
        println!("BAR {index}: {:#x} bytes, {:?}, mapped {pages:?}", bar.size, bar.space);
    }
    println!("{:?}", card.irqs());
    memory(&mut card)?;
    // What the kernel resets it by (Linux, ABI/testing/sysfs-bus-pci); nothing if it cannot.
    let ways = std::fs::read_to_string(format!("{SYS}/bus/pci/devices/{address}/reset_method"));
    println!("reset {} by {:?}", card.reset()?, ways.unwrap_or_default().trim());
    let mac = match (id.vendor, id.device) {
        (0x10ec, 0x8139) => rtl8139(&mut card)?,
        (0x10ec, 0x8029) => ne2000(&mut card)?,
        (0x8086, 0x10d3) => i82574(&mut card)?,
        (0x1af4, 0x1041) => virtio(&mut card)?,
        _ => return Err("no idea how to talk to this card".into()),
    };
    let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("mac {}", mac.join(":"));
    card.release()?;
    println!("given back");
    Ok(())
}

/// Maps memory low and high, and where it cannot be.
fn memory(card: &mut Vfio) -> Outcome {
    let map = GuestMap::anonymous(2 << 20)?;
    let region = &map.regions()[0];
    for iova in [0, 60 << 30, 64 << 30] {
        card.map(iova, region)?;
    }
    for iova in [0, 60 << 30, 64 << 30] {
        card.unmap(iova, region.len())?;
    }
    match card.unmap(0, region.len()) {
        Err(error) => println!("not mapped: {error}"),
        Ok(()) => return Err("unmapped twice".into()),
    }
    match card.map(1 << 60, region) {
        Err(error) => println!("out of reach: {error}"),
        Ok(()) => return Err("bus address 1 << 60 is mapped".into()),
    }
    // Left mapped: the drop takes it away.
    Ok(card.map(1 << 32, region)?)
}

fn wait_for(file: BorrowedFd<'_>, what: &str) -> Outcome {
    let second = Timespec { tv_sec: 5, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&second))? {
        0 => Err(format!("{what} has not come").into()),
        _ => Ok(()),
    }
}

/// Makes the card interrupt twice by `cause`, and takes it back by `quiet`; INTA# has to be masked in between.
fn interrupts(
    card: &mut Vfio,
    cause: impl Fn(&mut Vfio) -> Outcome,
    quiet: impl Fn(&mut Vfio) -> Outcome,
) -> Outcome {
    card.listen()?;
    for round in ["first", "second"] {
        cause(card)?;
        wait_for(card.interrupt().ok_or("no descriptor")?.as_fd(), round)?;
        if !card.take_interrupt() || card.take_interrupt() {
            return Err("an interrupt is heard once".into());
        }
        // The line is still up, and masked: nothing must come.
        std::thread::sleep(Duration::from_millis(50));
        if card.take_interrupt() {
            return Err("it was not masked".into());
        }
        // Unmasked while it is up, it comes again.
        card.unmask()?;
        wait_for(card.interrupt().ok_or("no descriptor")?.as_fd(), "unmasked")?;
        card.take_interrupt();
        quiet(card)?;
        card.unmask()?;
        if card.take_interrupt() {
            return Err("an interrupt out of nothing".into());
        }
    }
    println!("INTA# heard, masked, unmasked");
    Ok(())
}

/// By its timer (RTL8139C(L)+ data sheet: Cmd 37, IMR 3C, ISR 3E, TCTR 48, TimerInt 54).
fn rtl8139(card: &mut Vfio) -> Outcome<Vec<u8>> {
    const TIMEOUT: [u8; 2] = 0x4000u16.to_le_bytes();
    card.write(1, 0x37, &[0x10])?;
    let cause = |card: &mut Vfio| -> Outcome {
        card.write(0, 0x54, &1000u32.to_le_bytes())?;
        card.write(0, 0x3c, &TIMEOUT)?;
        Ok(card.write(0, 0x48, &[0; 4])?)
    };
    let quiet = |card: &mut Vfio| -> Outcome {
        card.write(1, 0x3c, &[0; 2])?;
        card.write(0, 0x54, &[0; 4])?;
        Ok(card.write(1, 0x3e, &[0xff; 2])?)
    };
    interrupts(card, cause, quiet)?;
    // The same registers by ports and by memory.
    let (mut by_port, mut by_memory) = (vec![0; 6], vec![0; 6]);
    for at in 0..6 {
        card.read(0, at as u64, &mut by_port[at..=at])?;
        card.read(1, at as u64, &mut by_memory[at..=at])?;
    }
    if by_port != by_memory {
        return Err(format!("{by_port:x?} by ports, {by_memory:x?} by memory").into());
    }
    Ok(by_port)
}

/// By the end of a remote DMA (DP8390 data sheet: CR 0, ISR 7, RSAR 8, RBCR A, DCR E, IMR F; the data port is 10).
fn ne2000(card: &mut Vfio) -> Outcome<Vec<u8>> {
    let write = |card: &mut Vfio, at: u64, value: u8| card.write(0, at, &[value]);
    let cause = |card: &mut Vfio| -> Outcome {
        for (at, value) in
            [(0, 0x21), (0xe, 0x48), (7, 0xff), (0xf, 0x40), (0xa, 32), (0xb, 0), (8, 0), (9, 0), (0, 0x0a)]
        {
            write(card, at, value)?;
        }
        for _ in 0..32 {
            card.read(0, 0x10, &mut [0])?;
        }
        Ok(())
    };
    let quiet = |card: &mut Vfio| -> Outcome {
        write(card, 0xf, 0)?;
        Ok(write(card, 7, 0xff)?)
    };
    interrupts(card, cause, quiet)?;
    for (at, value) in [(0xa, 32), (0xb, 0), (8, 0), (9, 0), (0, 0x0a)] {
        write(card, at, value)?;
    }
    let mut prom = [0; 32];
    for byte in prom.chunks_mut(1) {
        card.read(0, 0x10, byte)?;
    }
    // Each byte twice.
    Ok(prom.iter().step_by(2).take(6).copied().collect())
}

#[derive(Debug)]
struct EventInterrupt(OwnedFd);
impl Interrupt for EventInterrupt {
    fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// By MSI-X (82574 data sheet: ICS C8, IMS D0, IMC D8, IVAR E4, RAL0 5400). The second vector is wired later, masked and unmasked.
fn i82574(card: &mut Vfio) -> Outcome<Vec<u8>> {
    const OTHER: u32 = 1 << 24;
    const LINK: u32 = 1 << 2;
    let long = |card: &mut Vfio, at: u64, value: u32| card.write(0, at, &value.to_le_bytes());
    let interrupt = || -> Outcome<Arc<EventInterrupt>> {
        Ok(Arc::new(EventInterrupt(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    };
    let rang = |interrupt: &EventInterrupt| rustix::io::read(&interrupt.0, &mut [0; 8]).is_ok();
    let (first, third) = (interrupt()?, interrupt()?);
    // A message is a write to memory of others.
    card.master(true)?;
    card.wire(Irq::Msix, 0, Wire::Call(Some(first.clone())))?;
    card.wire(Irq::Msix, 2, Wire::Call(Some(third.clone())))?;
    rang(&first);
    let cause = |card: &mut Vfio, vector: u32| -> Outcome {
        long(card, 0xd8, u32::MAX)?;
        card.read(0, 0xc0, &mut [0; 4])?;
        long(card, 0xe4, (vector | 8) << 16)?;
        long(card, 0xd0, OTHER | LINK)?;
        Ok(long(card, 0xc8, OTHER | LINK)?)
    };
    cause(card, 0)?;
    wait_for(first.0.as_fd(), "MSI-X vector 0")?;
    rang(&first);
    card.wire(Irq::Msix, 2, Wire::Mask)?;
    cause(card, 2)?;
    std::thread::sleep(Duration::from_millis(50));
    if rang(&first) || rang(&third) {
        return Err("the wrong vector, or a masked one".into());
    }
    card.wire(Irq::Msix, 2, Wire::Unmask)?;
    wait_for(third.0.as_fd(), "what was pending")?;
    rang(&third);
    cause(card, 2)?;
    wait_for(third.0.as_fd(), "MSI-X vector 2")?;
    // Quiet again, by IMC and ICR: with MSI-X off, what is pending would come as INTA#.
    long(card, 0xd8, u32::MAX)?;
    card.read(0, 0xc0, &mut [0; 4])?;
    // QEMU 7.2, when it is the hardware, throttles for 128 us after each message whatever EITR says, no reset ends that, and it aborts
    // if MSI-X is switched off before. Its timers run in the order of their deadlines, those by which a sleep ends among them: so a
    // longer sleep is enough, however busy that machine is.
    std::thread::sleep(Duration::from_millis(5));
    card.wire(Irq::Msix, 2, Wire::Call(None))?;
    card.wire(Irq::Msix, 0, Wire::Call(None))?;
    println!("MSI-X comes");
    let mut mac = vec![0; 8];
    card.read(0, 0x5400, &mut mac[..4])?;
    card.read(0, 0x5404, &mut mac[4..])?;
    mac.truncate(6);
    Ok(mac)
}

/// Where a structure of a virtio function is: its BAR, and the offset there (Virtio 1.2, 4.1.4).
fn structure(card: &mut Vfio, kind: u8) -> Outcome<(u8, u64)> {
    let mut at = card.capability(spec::CAP_VENDOR)?.ok_or("no capability of the vendor's")?;
    // As many as there is room for.
    for _ in 0..48 {
        let mut bytes = [0; 12];
        card.read_config(at, &mut bytes)?;
        let [id, next, _, this, bar, _, _, _, offset @ ..] = bytes;
        if (id, this) == (spec::CAP_VENDOR, kind) {
            return Ok((bar, u32::from_le_bytes(offset).into()));
        }
        at = next.into();
    }
    Err(format!("no structure of kind {kind}").into())
}

/// What only a reset takes away: a driver's status, and which queue it has chosen (Virtio 1.2, 2.1, 4.1.4.3: device_status 14,
/// queue_select 16).
fn virtio(card: &mut Vfio) -> Outcome<Vec<u8>> {
    const COMMON: u8 = 1;
    const DEVICE: u8 = 4;
    let (bar, common) = structure(card, COMMON)?;
    let look = |card: &mut Vfio| -> Outcome<(u8, u16)> {
        let (mut status, mut queue) = ([0], [0; 2]);
        card.read(bar, common + 0x14, &mut status)?;
        card.read(bar, common + 0x16, &mut queue)?;
        Ok((status[0], u16::from_le_bytes(queue)))
    };
    // ACKNOWLEDGE and DRIVER; the second queue.
    card.write(bar, common + 0x14, &[3])?;
    card.write(bar, common + 0x16, &1u16.to_le_bytes())?;
    let (before, done, after) = (look(card)?, card.reset()?, look(card)?);
    println!("{before:?}, reset {done}, {after:?}");
    let (bar, own) = structure(card, DEVICE)?;
    let mut mac = vec![0; 6];
    for (at, byte) in mac.chunks_mut(1).enumerate() {
        card.read(bar, own + at as u64, byte)?;
    }
    Ok(mac)
}
