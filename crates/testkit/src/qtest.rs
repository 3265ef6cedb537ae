//! A card that QEMU emulates, driven register by register over qtest: what our own chips are held against.
//!
//! ```text
//!   test --qtest lines over pipes--> qemu-system-x86_64 (a CPU that halts, one card)
//!     |--- datagrams, one a frame --> -netdev dgram
//!     '--- a file of guest memory, mapped by both
//! ```
//!
//! The processor runs a firmware that halts, so the machine runs (QEMU moves no frames while it is stopped) and nobody but the test
//! touches the card. QEMU handles registers and frames on one thread: a frame has been delivered when it has left the socket and the
//! next command is answered.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::{Access, RegisterAddress};
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, Mapping, MemoryRegion, RegionSpec};
use ioplane_network::Mac;
use ioplane_pci::{Bar, BarMap, Identity, Irq, Irqs, Space, Wire, WireError, spec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::nic::Reach;

pub const PROGRAM: &str = "qemu-system-x86_64";
/// Bytes of guest memory, from address 0.
pub const MEMORY: u64 = 16 << 20;
/// PCI slot of the card.
const SLOT: u32 = 4;
/// Where its BARs are put: ports, and memory outside of RAM.
const PORTS: u32 = 0xc000;
const REGISTERS: u32 = 0xfe00_0000;
const CONFIG_ADDRESS: u32 = 0xcf8;
const CONFIG_DATA: u32 = 0xcfc;
/// How long QEMU may take for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whether the program is there to be run.
pub fn installed() -> bool {
    let run = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

/// QEMU with one card.
pub struct Qemu {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// Our end of the wire, and a descriptor of QEMU's end, to see whether it has read.
    wire: UnixDatagram,
    theirs: UnixDatagram,
    map: Arc<GuestMap>,
    _memory: Mapping,
    _firmware: File,
}

fn failed(doing: &str, error: impl std::fmt::Display) -> String {
    format!("{PROGRAM}: {doing}: {error}")
}

impl Qemu {
    /// Starts QEMU with a card of that model (`ne2k_pci`, `rtl8139`) and address, its BARs assigned and its decoding off.
    pub fn start(model: &str, mac: Mac) -> Result<Self, String> {
        let firmware = rustix::fs::memfd_create("firmware", rustix::fs::MemfdFlags::CLOEXEC);
        let mut firmware = File::from(firmware.map_err(|error| failed("a file for the firmware", error))?);
        // cli; hlt; and once more if anything wakes it.
        let halts = [0xfa, 0xf4, 0xeb, 0xfc].repeat(0x4000);
        firmware.write_all(&halts).map_err(|error| failed("writing the firmware", error))?;
        let ours = |fd: i32| format!("/proc/{}/fd/{fd}", std::process::id());
        let memory = Mapping::anonymous("guest", MEMORY).map_err(|error| failed("memory", error))?;
        let file = memory.file().try_clone_to_owned().map_err(|error| failed("memory", error))?;
        let path = ours(file.as_raw_fd());
        let (wire, theirs) = UnixDatagram::pair().map_err(|error| failed("a wire", error))?;
        wire.set_nonblocking(true).map_err(|error| failed("a wire", error))?;
        // It is to be inherited.
        fcntl_setfd(&theirs, FdFlags::empty()).map_err(|error| failed("a wire", error))?;
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let mut child = Command::new(PROGRAM)
            .args(["-accel", "tcg", "-nodefaults", "-display", "none"])
            .args(["-machine", "pc,memory-backend=ram", "-m", &format!("{}M", MEMORY >> 20)])
            .args(["-object", &format!("memory-backend-file,id=ram,size={MEMORY},share=on,mem-path={path}")])
            .args(["-bios", &ours(firmware.as_raw_fd())])
            .args(["-qtest", "stdio", "-qtest-log", "none"])
            .args(["-netdev", &format!("dgram,id=wire,local.type=fd,local.str={}", theirs.as_raw_fd())])
            .args(["-device", &format!("{model},netdev=wire,addr={SLOT},mac={mac},romfile=")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed("starting it", error))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let Some((to, from)) = pipes else { return Err(failed("starting it", "no pipes")) };
        let region = MemoryRegion::map(RegionSpec { gpa: 0, len: MEMORY, user: 0, offset: 0, file })
            .map_err(|error| failed("memory", error))?;
        let map = GuestMap::new(vec![region]).map_err(|error| failed("memory", error))?;
        let from = BufReader::new(from);
        let (map, _memory, _firmware) = (Arc::new(map), memory, firmware);
        let mut qemu = Qemu { child, to, from, wire, theirs, map, _memory, _firmware };
        qemu.write(RegisterAddress::Config(0x10), 4, PORTS)?;
        qemu.write(RegisterAddress::Config(0x14), 4, REGISTERS)?;
        Ok(qemu)
    }

    pub fn memory(&self) -> &Arc<GuestMap> {
        &self.map
    }

    fn command(&mut self, line: &str) -> Result<String, String> {
        self.to.write_all(format!("{line}\n").as_bytes()).map_err(|error| failed(line, error))?;
        let mut answer = String::new();
        self.from.read_line(&mut answer).map_err(|error| failed(line, error))?;
        match answer.strip_prefix("OK") {
            Some(value) => Ok(value.trim().to_owned()),
            None => Err(failed(line, format!("answers {:?}", answer.trim()))),
        }
    }

    fn value(&mut self, line: &str) -> Result<u32, String> {
        let text = self.command(line)?;
        let digits = text.trim_start_matches("0x");
        let value = u64::from_str_radix(digits, 16).map_err(|error| failed(line, error))?;
        Ok(value as u32)
    }

    fn letter(width: usize) -> Result<char, String> {
        match width {
            1 => Ok('b'),
            2 => Ok('w'),
            4 => Ok('l'),
            _ => Err(format!("no access has {width} bytes")),
        }
    }

    /// The place of an access, in ports or in memory.
    fn place(&mut self, at: RegisterAddress) -> Result<(bool, u32), String> {
        match at {
            RegisterAddress::Bar(0, offset) => Ok((true, PORTS + offset as u32)),
            RegisterAddress::Bar(_, offset) => Ok((false, REGISTERS + offset as u32)),
            RegisterAddress::Config(offset) => {
                let address = 1 << 31 | SLOT << 11 | offset as u32 & 0xfc;
                self.command(&format!("outl {CONFIG_ADDRESS:#x} {address:#x}"))?;
                Ok((true, CONFIG_DATA + (offset as u32 & 3)))
            }
        }
    }

    /// Puts a frame on the wire. When this returns the next command is answered after the card has had it.
    pub fn send(&mut self, frame: &[u8]) -> Result<(), String> {
        self.wire.send(frame).map_err(|error| failed("sending a frame", error))?;
        let deadline = Instant::now() + PATIENCE;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let mut fds = [PollFd::new(&self.theirs, PollFlags::IN)];
            match poll(&mut fds, Some(&now)) {
                Ok(0) => return Ok(()),
                Ok(_) if Instant::now() < deadline => std::thread::yield_now(),
                Ok(_) => return Err(failed("sending a frame", "nobody reads it")),
                Err(error) => return Err(failed("sending a frame", error)),
            }
        }
    }

    /// Frames that the card has sent since.
    pub fn sent(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut room = vec![0; 0x1_0000];
        while let Ok(len) = self.wire.recv(&mut room) {
            frames.push(room[..len].to_vec());
        }
        frames
    }
}

impl Reach for Qemu {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        let (port, address) = self.place(at)?;
        match op {
            Access::Read(out) => {
                let verb = if port { "in" } else { "read" };
                let value = self.value(&format!("{verb}{} {address:#x}", Self::letter(out.len())?))?;
                out.copy_from_slice(&value.to_le_bytes()[..out.len()]);
            }
            Access::Write(bytes) => {
                let verb = if port { "out" } else { "write" };
                let mut value = [0; 4];
                value[..bytes.len()].copy_from_slice(bytes);
                let value = u32::from_le_bytes(value);
                self.command(&format!("{verb}{} {address:#x} {value:#x}", Self::letter(bytes.len())?))?;
            }
        }
        Ok(())
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// QEMU's card as hardware, without an IOMMU: for cards that are never a bus master. Its interrupt is not listened to; who drives it
/// asks for its status.
pub struct Board {
    qemu: Qemu,
    identity: Identity,
    bars: BarMap,
    event: Arc<OwnedFd>,
}

impl Board {
    /// `qemu`'s card, whose port BAR has so many bytes.
    pub fn new(mut qemu: Qemu, ports: u64) -> Result<Self, String> {
        let word = |qemu: &mut Qemu, at: usize| {
            qemu.read(RegisterAddress::Config(at as u64), 2).map(|value| value as u16)
        };
        let class = qemu.read(RegisterAddress::Config(spec::REVISION_ID as u64), 4)?;
        let identity = Identity {
            vendor: word(&mut qemu, spec::VENDOR_ID)?,
            device: word(&mut qemu, spec::DEVICE_ID)?,
            revision: class as u8,
            class: class >> 8,
            subsystem: (word(&mut qemu, spec::SUBSYSTEM_VENDOR_ID)?, word(&mut qemu, spec::SUBSYSTEM_ID)?),
        };
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
        let event = Arc::new(event.map_err(|error| failed("an eventfd", error))?);
        let bars = BarMap::new().with(0, Bar::new(ports, Space::Port));
        Ok(Board { qemu, identity, bars, event })
    }

    fn done(&self, doing: &str, outcome: Result<(), String>) -> Result<(), HardwareError> {
        outcome.map_err(|why| HardwareError::Os {
            function: PROGRAM.to_owned(),
            doing: doing.to_owned(),
            source: std::io::Error::other(why),
        })
    }
}

impl Hardware for Board {
    fn name(&self) -> &str {
        PROGRAM
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        Irqs { intx: 1, msi: 0, msix: 0, error: 0 }
    }

    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        let read = self.qemu.access(RegisterAddress::Bar(bar, offset), Access::Read(out));
        self.done("reading a register", read)
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let wrote = self.qemu.access(RegisterAddress::Bar(bar, offset), Access::Write(bytes));
        self.done("writing a register", wrote)
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        let read = self.qemu.access(RegisterAddress::Config(offset), Access::Read(out));
        self.done("reading the configuration space", read)
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let wrote = self.qemu.access(RegisterAddress::Config(offset), Access::Write(bytes));
        self.done("writing the configuration space", wrote)
    }

    fn map(&mut self, _iova: u64, _region: &MemoryRegion) -> Result<(), HardwareError> {
        self.done("mapping memory", Err("there is no IOMMU".to_owned()))
    }

    fn unmap(&mut self, _iova: u64, _len: u64) -> Result<(), HardwareError> {
        Ok(())
    }

    fn wire(&mut self, irq: Irq, vector: u16, _wire: Wire) -> Result<(), WireError> {
        Err(WireError::NoSuchVector { irq, vector })
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        Some(&self.event)
    }

    fn take_interrupt(&mut self) -> bool {
        false
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        Ok(false)
    }
}
