//! How a guest has set a function up, of what its state does not contain: the command register, and MSI-X. Its VMM emulates the MSI-X table, for the
//! guest's processors alone; but whoever moves a guest has to set it up at the destination before they run. A read and a write of the function of its
//! own BAR, carried out by the VMM, do so.

use std::time::Instant;

use ioplane_api::report::{MsixReport, SetUpFunctionReport};
use ioplane_api::request::{FunctionStepForm, VectorForm, WriteVectorsForm};
use ioplane_host::vfio_user::DmaWrite;
use ioplane_pci::spec;

use super::Card;
use super::carry::{config_word, patience};
use super::hold::gone;
use crate::refusal::Refusal;

/// Capabilities that are looked at: as many as have room.
const CAPABILITIES: usize = (spec::CONFIG_SIZE - spec::HEADER_END) / 4;

/// Where a function's table is, as the function sees memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Table {
    address: u64,
    entries: usize,
}

/// Where the capability of MSI-X is in a configuration space, whose aligned words `word` reads.
fn msix_of(word: &mut impl FnMut(usize) -> u32) -> Option<usize> {
    let status = (word(spec::COMMAND) >> 16) as u16;
    let mut at = match status & spec::STATUS_CAPABILITIES {
        0 => 0,
        _ => word(spec::CAPABILITIES) as usize & 0xfc,
    };
    let mut left = CAPABILITIES;
    while at >= spec::HEADER_END && left > 0 && word(at) as u8 != spec::CAP_MSIX {
        at = (word(at) >> 8) as usize & 0xfc;
        left -= 1;
    }
    (at >= spec::HEADER_END && left > 0 && at + spec::MSIX_TABLE <= spec::CONFIG_SIZE - 4).then_some(at)
}

/// Finds the table in the same way.
fn table_of(word: &mut impl FnMut(usize) -> u32) -> Result<Table, &'static str> {
    let at = msix_of(word).ok_or("it has no MSI-X")?;
    let command = word(spec::COMMAND) as u16;
    let needed = spec::COMMAND_MEMORY | spec::COMMAND_MASTER;
    if command & needed != needed {
        return Err("its command register lacks memory or bus mastering");
    }
    let entries = usize::from((word(at) >> 16) as u16 & spec::MSIX_TABLE_SIZE) + 1;
    let place = word(at + spec::MSIX_TABLE);
    let bar = (place & spec::MSIX_TABLE_BAR) as usize;
    let low = if bar < 6 { word(spec::BAR0 + 4 * bar) } else { 0 };
    let high = if low & spec::BAR_MEMORY_64 != 0 && bar < 5 { word(spec::BAR0 + 4 * bar + 4) } else { 0 };
    let base = u64::from(high) << 32 | u64::from(low & !0xf);
    if base == 0 || low & spec::BAR_IO != 0 {
        return Err("its BAR with the MSI-X table has no address");
    }
    let address = base.checked_add(u64::from(place & !spec::MSIX_TABLE_BAR));
    let address =
        address.filter(|address| address.checked_add((entries * spec::MSIX_ENTRY) as u64).is_some());
    Ok(Table { address: address.ok_or("its MSI-X table is in no memory")?, entries })
}

/// A word of an entry of the table.
fn word(entry: &[u8], at: usize) -> u32 {
    entry[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn entries_of(bytes: &[u8]) -> Vec<VectorForm> {
    let one = |entry: &[u8]| VectorForm {
        address: u64::from(word(entry, 4)) << 32 | u64::from(word(entry, 0)),
        data: word(entry, 8),
        masked: word(entry, spec::MSIX_VECTOR_CONTROL) & spec::MSIX_MASKED != 0,
    };
    bytes.chunks_exact(spec::MSIX_ENTRY).map(one).collect()
}

/// Whether this may be a table: a client whose layout of messages could not be found out may have read four bytes further. No bit that is reserved is set, and
/// what is not masked goes to processors, as x86 has them (Intel SDM volume 3, 12.11.1), or nowhere.
fn plausible(bytes: &[u8]) -> bool {
    bytes.chunks_exact(spec::MSIX_ENTRY).all(|entry| {
        let control = word(entry, spec::MSIX_VECTOR_CONTROL);
        let goes = match (word(entry, 0), word(entry, 4)) {
            (0, high) => high == 0,
            (low, _) => low >> 20 == 0xfee,
        };
        control & !spec::MSIX_MASKED == 0 && (goes || control & spec::MSIX_MASKED != 0)
    })
}

fn bytes_of(table: &[VectorForm]) -> Vec<u8> {
    let entry = |vector: &VectorForm| {
        let mut bytes = [0; spec::MSIX_ENTRY];
        bytes[..8].copy_from_slice(&vector.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&vector.data.to_le_bytes());
        let control = if vector.masked { spec::MSIX_MASKED } else { 0 };
        bytes[spec::MSIX_VECTOR_CONTROL..].copy_from_slice(&control.to_le_bytes());
        bytes
    };
    table.iter().flat_map(entry).collect()
}

/// What a configuration space says of how a function is set up.
struct Config {
    command: u16,
    pin: bool,
    /// Where MSI-X is, and its message control.
    msix: Option<(u8, u16)>,
    table: Result<Table, &'static str>,
}

impl Config {
    fn of(mut word: impl FnMut(usize) -> u32) -> Config {
        let word = &mut word;
        let msix = msix_of(word).map(|at| (at as u8, (word(at) >> 16) as u16));
        Config {
            command: word(spec::COMMAND) as u16,
            pin: word(spec::INTERRUPT_LINE) >> 8 & 0xff != 0,
            msix,
            table: table_of(word),
        }
    }
}

impl Card {
    /// Its configuration space, as the guest and the VMM have set it up.
    async fn config(&self) -> Result<Config, Refusal> {
        self.on_its_thread(|body| Config::of(|at| config_word(body, at))).await
    }

    /// How it is set up. Its VMM reads the MSI-X table, if that is in use: an access of a guest that runs would wait for that, and the VMM for the access.
    pub async fn set_up(&self, form: FunctionStepForm) -> Result<SetUpFunctionReport, Refusal> {
        let (name, end) = (self.name(), Instant::now() + patience(form.deadline_ms)?);
        self.way()?.stands_still(&name, form.guest_stopped)?;
        self.has_guest()?;
        let Config { command, pin, msix, table } = self.config().await?;
        let msix = match msix {
            None => None,
            Some((at, control)) => {
                let table = match control & spec::MSIX_ENABLE {
                    0 => Vec::new(),
                    _ => {
                        let table = table.map_err(|why| {
                            let text =
                                format!("{name} has MSI-X on, and {why}: nobody could set that up again");
                            Refusal::conflict(
                                text,
                                "load its driver in the guest, or unload it, and try again",
                            )
                        })?;
                        self.read_vectors(&name, table, end).await?
                    }
                };
                Some(MsixReport { at, control, table })
            }
        };
        Ok(SetUpFunctionReport { command, pin, msix })
    }

    async fn read_vectors(&self, name: &str, table: Table, end: Instant) -> Result<Vec<VectorForm>, Refusal> {
        let Table { address, entries } = table;
        let read = self.served.handle.read(address, entries * spec::MSIX_ENTRY, end);
        let bytes = read.await.map_err(|_| gone(name))?.map_err(|error| {
            Refusal::conflict(
                format!("the VMM of {name} does not read its MSI-X table: {error}"),
                "a VMM with an IOMMU for the guest does not; else try again",
            )
        })?;
        let table = plausible(&bytes).then(|| entries_of(&bytes));
        table.ok_or_else(|| {
            Refusal::conflict(
                format!(
                    "what the VMM of {name} reads is no MSI-X table: {}",
                    ioplane_plain::plain(&format!("{bytes:02x?}"))
                ),
                "try again, when the guest has used some of its memory",
            )
        })
    }

    /// Has its VMM write the MSI-X table. Says how many entries that has. Its VMM is served meanwhile.
    pub async fn write_vectors(&self, form: WriteVectorsForm) -> Result<usize, Refusal> {
        let (name, patience) = (self.name(), patience(form.deadline_ms)?);
        self.way()?.stands_still(&name, form.guest_stopped)?;
        let _changing = self.changes()?;
        self.has_guest()?;
        let Table { address, entries } = self.config().await?.table.map_err(|why| {
            let remedy = "write its BARs and its command register by the monitor of its QEMU first";
            Refusal::conflict(format!("{name}: {why}"), remedy)
        })?;
        if form.table.len() != entries {
            let text = format!("{} entries, and the MSI-X table of {name} has {entries}", form.table.len());
            return Err(Refusal::invalid(text, "give all of them").at("table"));
        }
        let writes = vec![DmaWrite::Bytes { address, data: bytes_of(&form.table) }];
        let written = self.served.handle.write(writes, Instant::now() + patience).await;
        written.map_err(|_| gone(&name))?.map_err(|error| {
            Refusal::conflict(
                format!("the VMM of {name} does not write its MSI-X table: {error}"),
                "a VMM with an IOMMU for the guest does not; else try again",
            )
        })?;
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration space with a list of two capabilities, the second of which is MSI-X.
    fn space() -> [u32; 64] {
        let mut words = [0; 64];
        words[1] = 0x0010_0006;
        words[4] = 0xfebc_0000;
        words[7] = 0xfebd_0004;
        words[8] = 0x0000_0038;
        words[13] = 0x40;
        words[16] = 0x0002_5001;
        words[20] = 0x8002_0011;
        words[21] = 0x0000_2003;
        words
    }

    #[test]
    fn the_table_is_found() {
        let of = |change: &dyn Fn(&mut [u32; 64])| {
            let mut words = space();
            change(&mut words);
            Config::of(|at| words[at / 4]).table
        };
        words_at(of(&|words| words[16] = 0x0002_5001), 0x38_febd_2000);
        words_at(of(&|words| words[7] = 0xfebd_0000), 0xfebd_2000);
        assert_eq!(of(&|words| words[1] = 6), Err("it has no MSI-X"));
        // A list without an end.
        assert_eq!(of(&|words| words[16] = 0x0002_4001), Err("it has no MSI-X"));
        assert_eq!(of(&|words| words[13] = 0xfc), Err("it has no MSI-X"));
        let off = Err("its command register lacks memory or bus mastering");
        assert_eq!(of(&|words| words[1] = 0x0010_0002), off);
        let nowhere = Err("its BAR with the MSI-X table has no address");
        assert_eq!(of(&|words| words[21] = 7), nowhere);
        assert_eq!(of(&|words| (words[7], words[8]) = (4, 0)), nowhere);
        let none = Err("its MSI-X table is in no memory");
        assert_eq!(of(&|words| (words[7], words[8], words[21]) = (0xffff_fff4, !0, !4)), none);
    }

    #[test]
    fn what_a_guest_has_set_up_is_read() {
        let of = |words: [u32; 64]| {
            let Config { command, pin, msix, .. } = Config::of(|at| words[at / 4]);
            (command, pin, msix)
        };
        let mut words = space();
        assert_eq!(of(words), (6, false, Some((0x50, 0x8002))));
        (words[1], words[15]) = (0x407, 0x0000_0100);
        assert_eq!(of(words), (0x407, true, None));
        // A line without a pin.
        words[15] = 0x0b;
        assert!(!of(words).1);
    }

    fn words_at(table: Result<Table, &'static str>, address: u64) {
        assert_eq!(table, Ok(Table { address, entries: 3 }));
    }

    #[test]
    fn entries_are_as_the_specification_has_them() {
        let vector = VectorForm { address: 0xfee0_1000, data: 0x4022, masked: true };
        let bytes = bytes_of(&[vector, VectorForm { masked: false, ..vector }]);
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[..16], [0, 0x10, 0xe0, 0xfe, 0, 0, 0, 0, 0x22, 0x40, 0, 0, 1, 0, 0, 0]);
        assert_eq!((bytes[28], &bytes[16..28]), (0, &bytes[..12]));
        assert_eq!(entries_of(&bytes), [vector, VectorForm { masked: false, ..vector }]);
        let high = VectorForm { address: 0x1234_5678_fee0_1000, data: !0, masked: false };
        assert_eq!(entries_of(&bytes_of(&[high])), [high]);
        assert!(entries_of(&bytes[..15]).is_empty());
    }

    #[test]
    fn a_table_that_is_read_at_the_wrong_place_is_none() {
        let vector = |address, data| VectorForm { address, data, masked: false };
        let table = [vector(0xfee0_1004, 0x4022), vector(0xfee0_2004, 0x4023), vector(0, 0)];
        let masked = [VectorForm { address: !0, data: 7, masked: true }];
        assert!(plausible(&bytes_of(&table)) && plausible(&bytes_of(&masked)) && plausible(&[]));
        for count in 1..=table.len() {
            // As the other layout of messages has it.
            let shifted = [&bytes_of(&table[..count])[4..], &[0; 4]].concat();
            assert!(!plausible(&shifted), "{shifted:02x?}");
        }
        assert!(!plausible(&bytes_of(&[vector(0x1234_5000, 0)])));
    }
}
