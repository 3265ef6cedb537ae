//! The page that a cooperating driver shares with us: its bytes, and what of them is believed. All of it is a guest's word. The driver's
//! side of the same format is `guest/coop/ioplane_coop.h`; a test holds the two against each other.
//!
//! ```text
//!   00  magic     04  format    08  lock      0c  moves     10  replayed  14  flags     18  entries   1c  (0)   20 .. 3f  (0)
//!   40  entries of 16 bytes: operation, offset, two words or an address
//! ```
//!
//! Little-endian, all numbers aligned. `lock` is readers in bits 0 to 30 and the writer in bit 31. A reader adds one if there is no writer.
//! The writer sets its bit, which keeps new readers out, and has the lock once there are no readers. `moves` is the version: how often the
//! function was reset under the driver. It changes only while the writer has the lock. `replayed` is what `moves` was when the driver
//! brought the function back last.

use ioplane_memory::{GuestFault, GuestView, Window};

/// Bytes of the page, and its alignment.
pub const SIZE: u64 = 4096;
/// What it begins with.
pub const MAGIC: u32 = u32::from_le_bytes(*b"ioCP");
/// The only format.
pub const FORMAT: u32 = 1;
/// Most entries.
pub const MOST: u32 = ((SIZE as usize - LIST) / ENTRY) as u32;
/// Most bytes of one range that the device writes.
const MOST_AREA: u64 = 1 << 20;

const AT_MAGIC: usize = 0x00;
const AT_FORMAT: usize = 0x04;
const AT_LOCK: usize = 0x08;
const AT_MOVES: usize = 0x0c;
const AT_REPLAYED: usize = 0x10;
const AT_FLAGS: usize = 0x14;
const AT_ENTRIES: usize = 0x18;
const LIST: usize = 0x40;
const ENTRY: usize = 16;

/// Of the lock: we have it, or wait for it.
pub const WRITER: u32 = 1 << 31;
/// Of the flags: the guest's memory is a copy. What the device had written and the driver had not seen may be missing in it, unless it was
/// marked. The driver clears all flags when it has brought the function back.
pub const COPIED: u32 = 1;
/// Of the flags: the function stands still, and writes no memory any more.
pub const STILL: u32 = 2;
/// Of the flags, the driver's: since then it has written to each page of what the device had written and it has not seen, so that whoever
/// copies memory sends it. Set in place of [`STILL`] alone.
pub const MARKED: u32 = 4;

const KEEP: u32 = 1;
const CLEAR: u32 = 2;
const EQUAL: u32 = 3;
const AREA: u32 = 4;
const COUNTER: u32 = 5;

/// What a driver asks for, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedEntry {
    /// A register that is read at rest, and written on the other function after its reset.
    Keep {
        /// Offset in BAR 0.
        offset: u64,
    },
    /// To come to rest: these bits are cleared, and read as zero when that is done.
    Clear {
        /// Offset in BAR 0.
        offset: u64,
        /// The bits.
        bits: u32,
    },
    /// To come to rest: two registers are waited for until they are the same, as head and tail of a ring.
    Equal {
        /// Offset in BAR 0.
        offset: u64,
        /// Offset of the other.
        other: u64,
    },
    /// Memory that the device writes besides what the driver marks: rings.
    Area {
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        len: u64,
    },
    /// A register of 32 bits that counts up. It goes on, and is kept in the page.
    Counter {
        /// Offset in BAR 0.
        offset: u64,
    },
}

/// Why a page is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageFlaw {
    /// It is not memory of the guest, or not a page.
    #[error("the page that the driver announced: {0}")]
    Memory(#[from] GuestFault),
    /// It does not begin as one.
    #[error("what the driver announced is no page of a cooperating driver")]
    NotAPage,
    /// Of another format.
    #[error("the driver's page is of format {0}, and this host reads format {own}", own = FORMAT)]
    Format(u32),
    /// More entries than there is room for.
    #[error("the driver's page has {0} entries, and there is room for {most}", most = MOST)]
    Count(u32),
    /// An entry that means nothing.
    #[error("entry {number} of the driver's page: {why}")]
    Entry {
        /// Which.
        number: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The state of a function at rest, whose page says otherwise.
    #[error("the driver's page is not locked as that of a function at rest is")]
    Unlocked,
}

/// A page in memory of a guest, for as long as something is done to it.
pub struct SharedPage {
    view: GuestView,
    window: Window,
}

impl SharedPage {
    /// The page at that address.
    ///
    /// # Errors
    ///
    /// It is not there, or does not begin as one. A driver may have left, and its memory be another's: this is asked each time.
    pub fn at(view: &GuestView, gpa: u64) -> Result<SharedPage, PageFlaw> {
        let window = view.window(gpa, SIZE, SIZE)?;
        if window.load_u32(AT_MAGIC) != MAGIC {
            return Err(PageFlaw::NotAPage);
        }
        match window.load_u32(AT_FORMAT) {
            FORMAT => Ok(SharedPage { view: view.clone(), window }),
            other => Err(PageFlaw::Format(other)),
        }
    }

    /// The driver's list, for a BAR of so many bytes: all of it is possible, or it is refused. Each word is read once.
    pub fn entries(&self, bar: u64) -> Result<Vec<SharedEntry>, PageFlaw> {
        let count = self.window.load_u32(AT_ENTRIES);
        if count > MOST {
            return Err(PageFlaw::Count(count));
        }
        (0..count).map(|number| self.entry(number, bar)).collect()
    }

    fn entry(&self, number: u32, bar: u64) -> Result<SharedEntry, PageFlaw> {
        let at = LIST + number as usize * ENTRY;
        let flaw = |why| PageFlaw::Entry { number, why };
        let register = |word: u32| {
            let offset = u64::from(word);
            let inside = offset.is_multiple_of(4) && offset + 4 <= bar;
            if inside { Ok(offset) } else { Err(flaw("a register that the function does not have")) }
        };
        let word = self.window.load_u32(at + 4);
        Ok(match self.window.load_u32(at) {
            KEEP => SharedEntry::Keep { offset: register(word)? },
            CLEAR => SharedEntry::Clear { offset: register(word)?, bits: self.window.load_u32(at + 8) },
            EQUAL => {
                SharedEntry::Equal { offset: register(word)?, other: register(self.window.load_u32(at + 8))? }
            }
            AREA => {
                let (gpa, len) = (self.window.load_u64(at + 8), u64::from(word));
                if len == 0 || len > MOST_AREA || gpa.checked_add(len).is_none() {
                    return Err(flaw("a range of memory that cannot be"));
                }
                SharedEntry::Area { gpa, len }
            }
            COUNTER => SharedEntry::Counter { offset: register(word)? },
            _ => return Err(flaw("an operation that this host does not know")),
        })
    }

    /// The value of an entry that keeps a register.
    pub fn value(&self, number: usize) -> u32 {
        self.window.load_u32(LIST + number * ENTRY + 12)
    }

    /// Writes it.
    pub fn put_value(&self, number: usize, value: u32) {
        self.view.store_u32(&self.window, LIST + number * ENTRY + 12, value);
    }

    /// The value of a counter.
    pub fn count(&self, number: usize) -> u64 {
        self.window.load_u64(LIST + number * ENTRY + 8)
    }

    /// Writes it.
    pub fn put_count(&self, number: usize, value: u64) {
        self.view.store_u64(&self.window, LIST + number * ENTRY + 8, value);
    }

    /// Asks for the lock: no reader comes in any more. Whether we have it: whether no reader is left.
    pub fn lock(&self) -> bool {
        let before = self.window.set_bits_u32(AT_LOCK, WRITER);
        self.view.wrote(self.window.gpa() + AT_LOCK as u64, 4);
        before & !WRITER == 0
    }

    /// Gives it back, or no longer asks for it.
    pub fn unlock(&self) {
        self.window.clear_bits_u32(AT_LOCK, WRITER);
        self.view.wrote(self.window.gpa() + AT_LOCK as u64, 4);
    }

    /// Whether it is as [`SharedPage::lock`] leaves it.
    pub fn is_locked(&self) -> bool {
        self.window.load_u32(AT_LOCK) == WRITER
    }

    /// How often the function was reset under the driver.
    pub fn moves(&self) -> u32 {
        self.window.load_u32(AT_MOVES)
    }

    /// What that was when the driver brought the function back last.
    pub fn replayed(&self) -> u32 {
        self.window.load_u32(AT_REPLAYED)
    }

    /// The function stands still; the driver may mark what it has written.
    pub fn still(&self) {
        self.window.clear_bits_u32(AT_FLAGS, MARKED);
        self.window.set_bits_u32(AT_FLAGS, STILL);
        self.view.wrote(self.window.gpa() + AT_FLAGS as u64, 4);
    }

    /// Whether it has.
    pub fn is_marked(&self) -> bool {
        self.window.load_u32(AT_FLAGS) & MARKED != 0
    }

    /// The function was reset, in `copied` memory or in that which the device has written to.
    pub fn moved(&self, copied: bool) {
        match copied {
            // From here on the driver cannot mark: what it does so now is not sent.
            true => self.window.set_bits_u32(AT_FLAGS, COPIED),
            false => self.window.clear_bits_u32(AT_FLAGS, STILL | MARKED),
        };
        self.view.wrote(self.window.gpa() + AT_FLAGS as u64, 4);
        self.view.store_u32(&self.window, AT_MOVES, self.moves().wrapping_add(1));
    }
}

/// A driver's page, for tests: the bytes that it writes before it announces it.
pub fn written(entries: &[SharedEntry]) -> Vec<u8> {
    let mut page = vec![0; SIZE as usize];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(AT_MAGIC, &MAGIC.to_le_bytes());
    put(AT_FORMAT, &FORMAT.to_le_bytes());
    put(AT_ENTRIES, &(entries.len() as u32).to_le_bytes());
    for (number, entry) in entries.iter().enumerate() {
        let (operation, word, value) = match *entry {
            SharedEntry::Keep { offset } => (KEEP, offset, 0),
            SharedEntry::Clear { offset, bits } => (CLEAR, offset, u64::from(bits)),
            SharedEntry::Equal { offset, other } => (EQUAL, offset, other),
            SharedEntry::Area { gpa, len } => (AREA, len, gpa),
            SharedEntry::Counter { offset } => (COUNTER, offset, 0),
        };
        let at = LIST + number * ENTRY;
        put(at, &operation.to_le_bytes());
        put(at + 4, &(word as u32).to_le_bytes());
        put(at + 8, &value.to_le_bytes());
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_memory::GuestMap;
    use std::sync::Arc;

    const BAR: u64 = 0x4000;

    fn memory(bytes: &[u8]) -> GuestView {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
        view.write(SIZE, bytes).unwrap();
        view
    }

    fn flaw(bytes: &[u8]) -> PageFlaw {
        let view = memory(bytes);
        SharedPage::at(&view, SIZE).and_then(|page| page.entries(BAR)).unwrap_err()
    }

    #[test]
    fn what_a_driver_asks_for_is_read() {
        let entries = [
            SharedEntry::Keep { offset: 0x2800 },
            SharedEntry::Clear { offset: 0x2828, bits: 1 << 25 },
            SharedEntry::Equal { offset: 0x3810, other: 0x3818 },
            SharedEntry::Area { gpa: 0x12_3456_7000, len: 4096 },
            SharedEntry::Counter { offset: BAR - 4 },
        ];
        let view = memory(&written(&entries));
        let page = SharedPage::at(&view, SIZE).unwrap();
        assert_eq!(page.entries(BAR).unwrap(), entries);
        page.put_value(0, 7);
        page.put_count(4, 1 << 40);
        assert_eq!((page.value(0), page.count(4), page.entries(BAR).unwrap().len()), (7, 1 << 40, 5));
    }

    #[test]
    fn a_lock_keeps_new_readers_out_and_waits_for_the_old() {
        let view = memory(&written(&[]));
        let page = SharedPage::at(&view, SIZE).unwrap();
        page.window.put_u32(AT_LOCK, 2);
        assert!(!page.lock() && !page.is_locked());
        page.window.put_u32(AT_LOCK, WRITER);
        assert!(page.lock() && page.is_locked());
        page.unlock();
        assert_eq!(page.window.load_u32(AT_LOCK), 0);
        page.window.put_u32(AT_MOVES, u32::MAX);
        page.moved(true);
        page.moved(false);
        assert_eq!((page.moves(), page.replayed(), page.window.load_u32(AT_FLAGS)), (1, 0, COPIED));
        page.window.put_u32(AT_FLAGS, MARKED);
        assert!(page.is_marked());
        page.still();
        assert!(!page.is_marked());
        assert_eq!(page.window.load_u32(AT_FLAGS), STILL);
        page.moved(true);
        assert_eq!(page.window.load_u32(AT_FLAGS), STILL | COPIED);
        page.moved(false);
        assert_eq!(page.window.load_u32(AT_FLAGS), COPIED);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = written(&[SharedEntry::Keep { offset: 0 }]);
        let with = |at: usize, word: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            flaw(&bytes)
        };
        assert_eq!(with(AT_MAGIC, 0), PageFlaw::NotAPage);
        assert_eq!(with(AT_FORMAT, 2), PageFlaw::Format(2));
        assert_eq!(with(AT_ENTRIES, MOST + 1), PageFlaw::Count(MOST + 1));
        assert_eq!(with(AT_ENTRIES, u32::MAX), PageFlaw::Count(u32::MAX));
        for (at, word) in [(LIST, 0), (LIST, 6), (LIST + 4, 2), (LIST + 4, BAR as u32), (LIST + 4, u32::MAX)]
        {
            assert!(matches!(with(at, word), PageFlaw::Entry { number: 0, .. }), "{at:#x}: {word:#x}");
        }
        // All that are zero are operations that do not exist: a list that is longer than what was written ends there.
        assert!(matches!(with(AT_ENTRIES, MOST), PageFlaw::Entry { number: 1, .. }));
        for (gpa, len) in [(0, 0), (0, MOST_AREA + 1), (u64::MAX, 4096)] {
            assert!(
                matches!(flaw(&written(&[SharedEntry::Area { gpa, len }])), PageFlaw::Entry { .. }),
                "{gpa:#x}"
            );
        }
        let other = SharedEntry::Equal { offset: 0, other: BAR };
        assert!(matches!(flaw(&written(&[other])), PageFlaw::Entry { .. }));
        let view = memory(&good);
        for gpa in [SIZE + 8, 1 << 20, u64::MAX - 4095, u64::MAX] {
            assert!(matches!(SharedPage::at(&view, gpa), Err(PageFlaw::Memory(_))), "{gpa:#x}");
        }
    }

    /// What the C header of the driver says under these names.
    #[test]
    fn the_driver_has_the_same_format() {
        let header = include_str!("../../../../guest/coop/ioplane_coop.h");
        let says = |name: &str, value: u64| {
            let line =
                header.lines().find(|line| line.starts_with(&format!("#define IOPLANE_COOP_{name}\t")));
            let word = line.and_then(|line| line.split_whitespace().nth(2)).unwrap_or_default();
            let word = word.trim_end_matches(['u', 'U']);
            let number = match word.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => word.parse(),
            };
            assert_eq!(number, Ok(value), "{name}: {line:?}");
        };
        for (name, value) in [
            ("MAGIC", MAGIC),
            ("FORMAT", FORMAT),
            ("WRITER", WRITER),
            ("COPIED", COPIED),
            ("STILL", STILL),
            ("MARKED", MARKED),
            ("KEEP", KEEP),
            ("CLEAR", CLEAR),
            ("EQUAL", EQUAL),
            ("AREA", AREA),
            ("COUNTER", COUNTER),
            ("MOST", MOST),
        ] {
            says(name, value.into());
        }
        let capability = super::super::capability::names();
        for (name, value) in capability {
            says(name, value.into());
        }
    }
}
