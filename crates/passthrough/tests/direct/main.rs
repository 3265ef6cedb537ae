//! Hardware passed through as it is, over hardware that writes down what is done to it.

mod card;
mod reset;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ioplane_device::{
    Access, AfterStop, CoreSender, Device, Effect, Interrupt, Placement, QueueSet, Quiescence, Quiescent,
    RegisterAddress, Running,
};
use ioplane_memory::{GuestMap, Mapping, MemoryRegion, RegionSpec};
use ioplane_passthrough::{DirectFaults, Passthrough};
use ioplane_pci::{Function, Irq, PAGE, Wire, spec};

use card::{Card, Log, MSI};

/// No queues, so that nobody is placed.
struct Nowhere;
impl Placement for Nowhere {
    fn place(&self, _: &str, _: u16) -> Arc<dyn CoreSender> {
        unreachable!("it has no queues")
    }
}

fn running(resettable: bool) -> (Running<Passthrough<Card>>, Arc<Mutex<Log>>, Arc<AtomicBool>) {
    let (card, log, full) = Card::new(resettable);
    let direct = Passthrough::new("nic1", card, None).expect("passed through");
    (Quiescent::new(direct).resume(&Nowhere).expect("runs"), log, full)
}

fn read(device: &mut Running<Passthrough<Card>>, at: RegisterAddress) -> u32 {
    let mut out = [0; 4];
    assert_eq!(device.access(at, Access::Read(&mut out)), Effect::None);
    u32::from_le_bytes(out)
}

fn write(device: &mut Running<Passthrough<Card>>, at: RegisterAddress, bytes: &[u8]) -> Effect {
    device.access(at, Access::Write(bytes))
}

fn region(gpa: u64, pages: u64) -> MemoryRegion {
    let mapping = Mapping::anonymous("test", pages * PAGE).expect("memory");
    let file = mapping.file().try_clone_to_owned().expect("a file");
    MemoryRegion::map(RegionSpec { gpa, len: pages * PAGE, user: 0, offset: 0, file }).expect("a region")
}

const COMMAND: RegisterAddress = RegisterAddress::Config(spec::COMMAND as u64);

#[test]
fn registers_go_straight_through() {
    let (mut device, log, _) = running(true);
    write(&mut device, RegisterAddress::Bar(0, 0x37), &[0x0c]);
    assert_eq!(read(&mut device, RegisterAddress::Bar(1, 0x34)), 0x0c00_0000);
    assert_eq!(read(&mut device, RegisterAddress::Bar(1, 0xffe)), u32::MAX, "beyond the end");
    assert_eq!(read(&mut device, RegisterAddress::Bar(9, 0)), u32::MAX);
    write(&mut device, RegisterAddress::Bar(1, u64::MAX), &[1; 8]);
    assert_eq!(device.device().faults(), DirectFaults { accesses: 3, resets: 0 });
    assert_eq!(device.device().bars().bar(1).expect("a BAR").pages().len(), 1);
    assert!(log.lock().expect("no panic").config_writes.len() <= 1, "the command register");
}

#[test]
fn the_guest_has_a_header_of_its_own() {
    let (mut device, log, _) = running(true);
    let command = || log.lock().expect("no panic").command;
    let decoding = spec::COMMAND_IO | spec::COMMAND_MEMORY;
    assert_eq!(command(), decoding, "switched on before the guest asks");
    assert_eq!(read(&mut device, RegisterAddress::Config(0)), 0x8139_10ec);
    write(&mut device, RegisterAddress::Config(0), &[0; 4]);
    assert_eq!(read(&mut device, RegisterAddress::Config(0)), 0x8139_10ec);
    write(&mut device, RegisterAddress::Config(0x14), &0xfebd_0000u32.to_le_bytes());
    assert_eq!(read(&mut device, RegisterAddress::Config(0x14)), 0xfebd_0000);
    write(&mut device, RegisterAddress::Config(0x10), &[0xff; 4]);
    assert_eq!(read(&mut device, RegisterAddress::Config(0x10)), 0xffff_ff01);
    let touched = |log: &Log| log.config_writes.iter().any(|(at, _)| (0x10..0x28).contains(at));
    assert!(!touched(&log.lock().expect("no panic")), "where the hardware is is the host's affair");
    write(&mut device, COMMAND, &spec::COMMAND_MASTER.to_le_bytes());
    assert_eq!(command(), decoding | spec::COMMAND_MASTER);
    assert_eq!(read(&mut device, COMMAND) as u16, spec::COMMAND_MASTER, "the guest sees its own");
    write(&mut device, COMMAND, &spec::COMMAND_INTX_DISABLE.to_le_bytes());
    assert_eq!(command(), decoding | spec::COMMAND_INTX_DISABLE);
    write(&mut device, RegisterAddress::Config(u64::MAX), &[1; 8]);
    assert_eq!(read(&mut device, RegisterAddress::Config(0xfe)) >> 16, 0xffff);
}

#[test]
fn message_control_is_not_written_to_hardware() {
    let (mut device, log, _) = running(true);
    write(&mut device, RegisterAddress::Config(MSI + 2), &[0xff; 2]);
    write(&mut device, RegisterAddress::Config(MSI + 4), &[0xff; 8]);
    let control = read(&mut device, RegisterAddress::Config(MSI)) >> 16;
    assert_eq!(control, u32::from(spec::MSI_ENABLE | 7 << 4 | spec::MSI_64 | spec::MSI_MASKING));
    assert_eq!(read(&mut device, RegisterAddress::Config(MSI + 4)), 0xffff_fffc);
    let log = log.lock().expect("no panic");
    assert!(log.config_writes.iter().all(|(at, _)| *at == spec::COMMAND as u64), "{log:?}");
}

#[test]
fn it_is_still_only_without_bus_mastering() {
    let (device, log, _) = running(true);
    let command = || log.lock().expect("no panic").command;
    let held = device.quiesce(Instant::now()).expect("it uses no memory");
    let mut device = held.resume(&Nowhere).expect("runs");
    write(&mut device, COMMAND, &spec::COMMAND_MASTER.to_le_bytes());
    let missed = device.quiesce(Instant::now()).expect_err("busy");
    assert!(missed.reason.contains("without a monitor"), "{}", missed.reason);
    assert_ne!(command() & spec::COMMAND_MASTER, 0);
    let held = missed.suspend().expect("suspended").wait(Instant::now()).expect("held");
    assert_eq!(command() & spec::COMMAND_MASTER, 0, "it reaches nothing now");
    let error = held.save().expect_err("no model").to_string();
    assert!(error.contains("--mode virtual"), "{error}");
    let mut device = held.resume(&Nowhere).expect("runs");
    assert_ne!(command() & spec::COMMAND_MASTER, 0, "and goes on");
    assert_eq!(
        device.device_mut().quiescence(),
        Quiescence::Busy("hardware without a monitor: only a suspension stops it")
    );
}

#[test]
fn memory_is_mapped_where_the_guest_has_it() {
    let (mut device, log, full) = running(true);
    let mapped = || log.lock().expect("no panic").mapped.clone();
    let (low, high) = (region(0, 2), region(0x1_0000_0000, 3));
    let one = Arc::new(GuestMap::new(vec![low.clone()]).expect("a map"));
    let two = Arc::new(one.with(high.clone()).expect("a map"));
    device.device_mut().grow_memory(one.clone()).expect("mapped");
    full.store(true, Ordering::Relaxed);
    assert!(device.device_mut().grow_memory(two.clone()).is_err());
    assert_eq!(mapped(), [(0, 2 * PAGE)], "as before");
    full.store(false, Ordering::Relaxed);
    device.device_mut().grow_memory(two.clone()).expect("mapped");
    assert_eq!(mapped(), [(0, 2 * PAGE), (0x1_0000_0000, 3 * PAGE)]);
    // Other memory at the same address is not the same.
    let other = Arc::new(GuestMap::new(vec![region(0, 2)]).expect("a map"));
    let mut held = device.quiesce(Instant::now()).expect("no bus mastering");
    held.with(|device, proof| device.replace_memory(proof, other.clone())).expect("replaced");
    assert_eq!(mapped(), [(0, 2 * PAGE)]);
    held.with(|device, proof| device.replace_memory(proof, Arc::default())).expect("replaced");
    assert_eq!(mapped(), []);
}

#[test]
fn a_guest_resets_it_by_express_or_not_at_all() {
    for resettable in [true, false] {
        let (mut device, log, _) = running(resettable);
        let mut at = read(&mut device, RegisterAddress::Config(0x34)) as u8;
        while read(&mut device, RegisterAddress::Config(at.into())) as u8 != spec::CAP_EXPRESS {
            at = (read(&mut device, RegisterAddress::Config(at.into())) >> 8) as u8;
        }
        write(&mut device, COMMAND, &spec::COMMAND_MASTER.to_le_bytes());
        let control = RegisterAddress::Config(u64::from(at) + spec::EXPRESS_DEVICE_CONTROL as u64);
        let effect = write(&mut device, control, &[0x10, 0xa8]);
        assert_eq!(effect, Effect::Deactivate(QueueSet::new(), AfterStop::Reset));
        let mut held = device
            .quiesce(Instant::now())
            .expect_err("busy")
            .suspend()
            .expect("suspended")
            .wait(Instant::now())
            .expect("held");
        held.reset();
        let mut device = held.resume(&Nowhere).expect("runs");
        assert_eq!(read(&mut device, COMMAND) as u16, 0, "as at power-on");
        assert_eq!(device.device().faults().resets, u64::from(!resettable));
        let log = log.lock().expect("no panic");
        assert_eq!(log.resets, u32::from(resettable));
        assert_eq!(log.command & spec::COMMAND_MASTER, 0);
    }
}

#[derive(Debug)]
struct FileInterrupt(std::fs::File);
impl Interrupt for FileInterrupt {
    fn signal(&self) {}
    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

#[test]
fn interrupts_are_wired_past_us() {
    let (mut device, log, _) = running(true);
    let interrupt = Arc::new(FileInterrupt(std::fs::File::open("/dev/null").expect("/dev/null")));
    device.device_mut().wire(Irq::Msi, 0, Wire::Call(Some(interrupt))).expect("wired");
    assert_eq!(log.lock().expect("no panic").wires, [(Irq::Msi, 0)]);
}
