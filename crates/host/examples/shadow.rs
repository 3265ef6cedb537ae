//! What reading from a shadow page is worth: `shadow [PINGS]` has a vCPU of a KVM make the register accesses that Linux's 8139cp makes for
//! pings, and counts those that leave the guest: with the page of registers trapped, and with it mapped for reading. Prints JSON.
//!
//! ```text
//!   testkit's 8139cp --each access--> vCPU: mov [bx], al | mov al, [bx]
//!                                       | KVM_EXIT_MMIO, counted --> SharedDevice --> Monitor --> Simulated<Rtl8139> --> a neighbour that answers
//!                                       ' no exit: the page (KVM_MEM_READONLY)
//! ```
//!
//! Stock QEMU cannot map such a page (docs/decisions/0014-mediated-hardware.md); this is what a VMM that can would have.

#![allow(unsafe_code)]
// UNSAFETY: memory is registered with KVM by address.

use std::sync::Arc;

use ioplane_device::{Access, Interrupt, RegisterAddress};
use ioplane_embed::SharedDevice;
use ioplane_memory::{GuestMap, GuestView};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_passthrough::monitor::{Monitor, MonitorOptions};
use ioplane_passthrough::rtl8139::MODEL;
use ioplane_pci::{Function, Irq, Touch, Wire};
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::nic::{Cp, Cut, Lan, Reach, frame, readable};
use ioplane_testkit::simulated::{Bench, Simulated};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags};

/// Where the program is, and where the card's registers are.
const PROGRAM: u64 = 0x1000;
const MEMORY: usize = 0x1_0000;
const REGISTERS: u64 = 0xd_0000;
const PAGE: usize = 4096;
/// Apart by this: read 8, 16, 32 bits at BX, then write them from AX.
const STEP: usize = 16;
const INSTRUCTIONS: [&[u8]; 6] = [
    &[0x8a, 0x07, 0xf4],
    &[0x8b, 0x07, 0xf4],
    &[0x66, 0x8b, 0x07, 0xf4],
    &[0x88, 0x07, 0xf4],
    &[0x89, 0x07, 0xf4],
    &[0x66, 0x89, 0x07, 0xf4],
];
const OWN: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

type Failure = Box<dyn std::error::Error>;
type Mediated = Monitor<Simulated<Rtl8139>>;

#[derive(Debug)]
struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn signal(&self) {}
}

/// The guest's processor, with its way to the card.
struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    front: SharedDevice<Mediated>,
    bench: Bench<Rtl8139>,
    exits: u64,
    accesses: u64,
}

fn page(len: usize, file: Option<&std::os::fd::OwnedFd>, at: u64) -> Result<*mut u8, Failure> {
    // SAFETY: a new mapping at an address of the kernel's choice; it is never unmapped.
    let start = unsafe {
        match file {
            Some(file) => {
                rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, at)?
            }
            None => {
                let both = ProtFlags::READ | ProtFlags::WRITE;
                rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, both, MapFlags::PRIVATE)?
            }
        }
    };
    Ok(start.cast())
}

fn register(vm: &VmFd, slot: u32, flags: u32, gpa: u64, len: usize, start: *mut u8) -> Result<(), Failure> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: len as u64,
        userspace_addr: start as u64,
    };
    // SAFETY: the memory stays mapped until the process ends.
    unsafe { vm.set_user_memory_region(region)? };
    Ok(())
}

impl Guest {
    fn new(shadow: bool, map: &Arc<GuestMap>, lan: &Lan) -> Result<Self, Failure> {
        let options = Rtl8139Options { name: "card".into(), mac: OWN };
        let card = Rtl8139::new(options, Arc::new(GuestMap::default()), lan.port.clone())?;
        let (hardware, bench) = Simulated::new("simulated", card)?;
        let mut monitor = Monitor::new(hardware, &MODEL, MonitorOptions::new("card"))?;
        monitor.grow_memory(map.clone())?;
        monitor.wire(Irq::Intx, 0, Wire::Call(Some(Arc::new(NoInterrupt))))?;
        let vm = Kvm::new()?.create_vm()?;
        let memory = page(MEMORY, None, 0)?;
        for (instruction, at) in INSTRUCTIONS.iter().zip((PROGRAM as usize..).step_by(STEP)) {
            // SAFETY: inside the mapping, which nobody else refers to yet.
            unsafe { memory.add(at).copy_from_nonoverlapping(instruction.as_ptr(), instruction.len()) };
        }
        register(&vm, 0, 0, 0, MEMORY, memory)?;
        if shadow {
            let bar = monitor.bars().bar(1).ok_or("no BAR 1")?;
            let pages =
                bar.pages().iter().find(|pages| pages.touch == Touch::Shadow).ok_or("no shadow page")?;
            let start = page(PAGE, Some(&pages.file), pages.at)?;
            register(&vm, 1, KVM_MEM_READONLY, REGISTERS + pages.offset, PAGE, start)?;
            monitor.use_shadows(true);
        }
        let vcpu = vm.create_vcpu(0)?;
        let mut special = vcpu.get_sregs()?;
        (special.cs.base, special.cs.selector) = (0, 0);
        (special.ds.base, special.ds.selector) = (REGISTERS, (REGISTERS >> 4) as u16);
        vcpu.set_sregs(&special)?;
        let front =
            SharedDevice::new(monitor, Arc::new(HandCore::default())).map_err(|refused| refused.error)?;
        Ok(Guest { vcpu, _vm: vm, front, bench, exits: 0, accesses: 0 })
    }

    /// One instruction of the guest's.
    fn run(&mut self, offset: u64, mut op: Access<'_>) -> Result<(), Failure> {
        let (kind, width, value) = match &op {
            Access::Read(bytes) => (0, bytes.len(), 0),
            Access::Write(bytes) => {
                let mut value = [0; 8];
                value[..bytes.len()].copy_from_slice(bytes);
                (3, bytes.len(), u64::from_le_bytes(value))
            }
        };
        let mut registers = self.vcpu.get_regs()?;
        registers.rip = PROGRAM + (kind + width.trailing_zeros() as u64) * STEP as u64;
        (registers.rax, registers.rbx, registers.rflags) = (value, offset, 2);
        self.vcpu.set_regs(&registers)?;
        self.accesses += 1;
        loop {
            let exit = match self.vcpu.run() {
                // A signal came, or the kernel wanted the thread for a moment: the guest has not left by itself.
                Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => continue,
                exit => exit?,
            };
            match exit {
                VcpuExit::MmioRead(address, data) => {
                    self.exits += 1;
                    self.front.access(RegisterAddress::Bar(1, address - REGISTERS), Access::Read(data))?;
                }
                VcpuExit::MmioWrite(address, data) => {
                    self.exits += 1;
                    self.front.access(RegisterAddress::Bar(1, address - REGISTERS), Access::Write(data))?;
                }
                VcpuExit::Hlt => break,
                other => return Err(format!("unexpected: {other:?}").into()),
            }
        }
        if let Access::Read(bytes) = &mut op {
            let value = self.vcpu.get_regs()?.rax.to_le_bytes();
            bytes.copy_from_slice(&value[..width]);
        }
        Ok(())
    }

    /// Lets the card and the monitor do all there is to do.
    fn turn(&mut self) {
        loop {
            self.bench.tick();
            let mut busy = false;
            self.front.event(|monitor| {
                busy = readable(monitor);
                monitor.attend();
                let _ = monitor.wire(Irq::Intx, 0, Wire::Unmask);
            });
            if !busy {
                return;
            }
        }
    }
}

impl Reach for Guest {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        match at {
            RegisterAddress::Bar(1, offset) => self.run(offset, op).map_err(|error| error.to_string()),
            _ => self.front.access(at, op).map_err(|error| error.to_string()),
        }
    }
}

/// Accesses and exits of `pings`: a frame out and its answer in, announced by one interrupt.
fn measure(shadow: bool, pings: u32) -> Result<serde_json::Value, Failure> {
    let map = Arc::new(GuestMap::anonymous(1 << 20)?);
    let mut lan = Lan::new(OWN, OTHER);
    let guest = Guest::new(shadow, &map, &lan)?;
    let mut driver = Cp::new(guest, GuestView::new(map.clone()), 0x1_0000);
    driver.open(OWN)?;
    driver.reach.turn();
    (driver.reach.exits, driver.reach.accesses) = (0, 0);
    for n in 0..pings {
        let request = frame(OTHER, OWN, &n.to_le_bytes().repeat(250));
        driver.xmit(&request, Cut::default())?;
        if lan.neighbour.take().as_ref() != Some(&request) {
            return Err(format!("request {n} has not come").into());
        }
        let reply = frame(OWN, OTHER, &n.to_be_bytes().repeat(250));
        lan.neighbour.send(&reply);
        driver.reach.turn();
        let status = driver.interrupt()?;
        let sent = driver.reclaim()?.len();
        let came: Vec<_> = driver.poll()?.into_iter().map(|received| received.bytes).collect();
        if sent != 1 || came != [reply] {
            return Err(format!("ping {n}: status {status:x?}, {sent} sent, {} came", came.len()).into());
        }
    }
    let each = |count: u64| count as f64 / f64::from(pings);
    let Guest { exits, accesses, .. } = driver.reach;
    Ok(serde_json::json!({ "accesses_per_ping": each(accesses), "exits_per_ping": each(exits) }))
}

fn main() -> Result<(), Failure> {
    let pings = std::env::args().nth(1).map_or(Ok(1000), |word| word.parse())?;
    let (trapped, shadow) = (measure(false, pings)?, measure(true, pings)?);
    println!("{}", serde_json::json!({ "pings": pings, "trapped": trapped, "shadow": shadow }));
    Ok(())
}
