//! A card that writes down what is done to it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::MemoryRegion;
use ioplane_pci::{
    Bar, BarMap, Capability, ConfigSpace, Identity, Irq, Irqs, PAGE, Pages, Space, Touch, Wire, WireError,
};

/// How a card resets by its registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Chip {
    /// Its registers only remember.
    #[default]
    None,
    /// By writing RST of CR, which it clears.
    Rtl8139,
    /// By reading RESET, until that is written. The page stays as it was chosen.
    Ne2000,
}

#[derive(Debug, Default)]
pub struct Log {
    pub mapped: Vec<(u64, u64)>,
    pub wires: Vec<(Irq, u16)>,
    pub resets: u32,
    pub command: u16,
    pub config_writes: Vec<(u64, Vec<u8>)>,
    pub chip: Chip,
    /// It never comes out of a reset.
    pub stuck: bool,
    /// Unplugged: all ones, as a slot without a card has them.
    pub gone: bool,
    /// Every access to a register of one byte: written or not, where, what.
    pub touched: Vec<(bool, u64, u8)>,
}

pub struct Card {
    log: Arc<Mutex<Log>>,
    bars: BarMap,
    config: ConfigSpace,
    pub registers: [u8; 256],
    /// ISR of an NE2000, of which only RST is there.
    in_reset: u8,
    resettable: bool,
    full: Arc<AtomicBool>,
}

pub const MSI: u64 = 0x40;

impl Card {
    pub fn new(resettable: bool) -> (Card, Arc<Mutex<Log>>, Arc<AtomicBool>) {
        let file = Arc::new(std::fs::File::open("/dev/null").expect("/dev/null").into());
        let pages = Pages { offset: 0, len: PAGE, touch: Touch::Mapped, file, at: 0x10_0000 };
        let memory = Bar::new(PAGE, Space::Memory32).with_pages(pages).expect("a page");
        let bars = BarMap::new().with(0, Bar::new(256, Space::Port)).with(1, memory);
        let identity =
            Identity { vendor: 0x10ec, device: 0x8139, revision: 0x20, class: 0x020000, subsystem: (1, 2) };
        let irqs = Irqs { intx: 1, msi: 1, ..Irqs::default() };
        let mut config = ConfigSpace::new(&identity, &bars, irqs);
        assert_eq!(config.add(&Capability::Msi { vectors: 1, masking: true }), Some(MSI as usize));
        config.add(&Capability::Express).expect("room");
        let (log, full) = (Arc::<Mutex<Log>>::default(), Arc::<AtomicBool>::default());
        let (registers, in_reset) = ([0; 256], 0);
        let card =
            Card { log: log.clone(), bars, config, registers, in_reset, resettable, full: full.clone() };
        (card, log, full)
    }

    fn place(&self, bar: u8, offset: u64, len: usize) -> Result<usize, HardwareError> {
        let inside = bar < 2 && offset.checked_add(len as u64).is_some_and(|end| end <= 256);
        let no = || HardwareError::NoSuchRegister { function: "card".into(), bar, offset, len };
        inside.then_some(offset as usize).ok_or_else(no)
    }
}

impl Hardware for Card {
    fn name(&self) -> &str {
        "0000:00:05.0"
    }
    fn identity(&self) -> Identity {
        Identity { vendor: 0x10ec, device: 0x8139, revision: 0x20, class: 0x020000, subsystem: (1, 2) }
    }
    fn bars(&self) -> &BarMap {
        &self.bars
    }
    fn irqs(&self) -> Irqs {
        Irqs { intx: 1, msi: 1, ..Irqs::default() }
    }
    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        let at = self.place(bar, offset, out.len())?;
        out.copy_from_slice(&self.registers[at..at + out.len()]);
        let mut log = self.log.lock().expect("no panic");
        if log.gone {
            out.fill(0xff);
        } else if log.chip == Chip::Ne2000 && offset == 0x07 && self.registers[0] >> 6 == 0 {
            out.fill(self.in_reset);
        }
        if let [byte] = out {
            log.touched.push((false, offset, *byte));
        }
        Ok(())
    }
    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let at = self.place(bar, offset, bytes.len())?;
        let mut log = self.log.lock().expect("no panic");
        if let [byte] = bytes {
            log.touched.push((true, offset, *byte));
        }
        if log.gone {
            return Ok(());
        }
        self.registers[at..at + bytes.len()].copy_from_slice(bytes);
        match (log.chip, offset) {
            (Chip::Rtl8139, 0x37) if !log.stuck => self.registers[at] &= !0x10,
            (Chip::Ne2000, 0x1f) if !log.stuck => self.in_reset = 0x80,
            _ => {}
        }
        Ok(())
    }
    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.config.read(offset, out);
        if self.log.lock().expect("no panic").gone {
            out.fill(0xff);
        }
        Ok(())
    }
    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let mut log = self.log.lock().expect("no panic");
        log.config_writes.push((offset, bytes.to_vec()));
        self.config.write(offset, bytes);
        log.command = self.config.command();
        Ok(())
    }
    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        if self.full.load(Ordering::Relaxed) {
            let source = std::io::Error::other("no room");
            return Err(HardwareError::Os { function: "card".into(), doing: "map".into(), source });
        }
        self.log.lock().expect("no panic").mapped.push((iova, region.len()));
        Ok(())
    }
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        let mut log = self.log.lock().expect("no panic");
        let at = log.mapped.iter().position(|m| *m == (iova, len)).expect("it was mapped exactly so");
        log.mapped.remove(at);
        Ok(())
    }
    fn wire(&mut self, irq: Irq, vector: u16, _: Wire) -> Result<(), WireError> {
        self.log.lock().expect("no panic").wires.push((irq, vector));
        Ok(())
    }
    fn listen(&mut self) -> Result<(), HardwareError> {
        unreachable!("no monitor")
    }
    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        None
    }
    fn take_interrupt(&mut self) -> bool {
        false
    }
    fn unmask(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<bool, HardwareError> {
        self.log.lock().expect("no panic").resets += u32::from(self.resettable);
        Ok(self.resettable)
    }
}
