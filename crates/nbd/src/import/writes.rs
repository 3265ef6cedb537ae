//! What is known of the writes of an import: how many the server has acknowledged, and how many of those are durable there.
//!
//! With a mark file the counts are in a mapped page of it, so they outlive this process, however it ends: the next one sees that its
//! predecessor was told of writes that no flush has covered, and by which instance of the exporter. A count is raised before the guest
//! is told. Not meant to survive a power cut of this host, which the guest does not survive either.

#![allow(unsafe_code)]
// UNSAFETY: looks at a page of a mapped file, or of memory of ours, as atomics.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ioplane_memory::{MemoryRegion, RegionSpec};
use rustix::fs::{Mode, OFlags};

use super::connect::LONGEST_INSTANCE;
use crate::error::NbdError;
use crate::mutation::{Rule, removed};

/// Of a mark file; the last two digits are its version.
const MAGIC: u64 = u64::from_le_bytes(*b"ioplnm01");
/// Bytes of a mark file.
const PAGE: u64 = 4096;
const WORDS: usize = LONGEST_INSTANCE / 8;

/// A mark file's content. All of it may be looked at by two processes at a time, during an upgrade.
#[repr(C)]
struct Page {
    magic: AtomicU64,
    acknowledged: AtomicU64,
    durable: AtomicU64,
    /// Bytes of the instance's name, and the name. Changed only while nothing is dirty.
    length: AtomicU64,
    instance: [AtomicU64; WORDS],
}

enum Place {
    Own(Box<Page>),
    File(MemoryRegion),
}

impl Place {
    fn page(&self) -> &Page {
        match self {
            Place::Own(page) => page,
            // SAFETY: the region is a page long, aligned to pages, and mapped while it lives. Everybody looks at it by atomics.
            Place::File(region) => unsafe { &*(region.host_address() as *const Page) },
        }
    }
}

/// See the module.
pub(super) struct Writes {
    place: Place,
    /// The last acknowledged write of which there is no copy.
    unretained: AtomicU64,
    /// Writes that were sent for the first time: their order.
    sent: AtomicU64,
    /// A flush has failed: what it should have covered may be lost although the instance is the same.
    flush_failed: AtomicBool,
    /// A channel has gone before all of its requests were answered.
    unanswered: AtomicBool,
}

impl fmt::Debug for Writes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writes")
            .field("acknowledged", &self.mark())
            .field("durable", &self.durable())
            .finish()
    }
}

impl Writes {
    /// Counts in the file at `path`, which is made if it is not there; without one in memory that ends with this process.
    pub fn open(path: Option<&Path>) -> Result<Writes, NbdError> {
        let place = match path {
            Some(path) => Place::File(map(path)?),
            None => {
                let zero = || AtomicU64::new(0);
                let instance = std::array::from_fn(|_| zero());
                let magic = AtomicU64::new(MAGIC);
                Place::Own(Box::new(Page {
                    magic,
                    acknowledged: zero(),
                    durable: zero(),
                    length: zero(),
                    instance,
                }))
            }
        };
        Ok(Writes {
            place,
            unretained: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            flush_failed: AtomicBool::new(false),
            unanswered: AtomicBool::new(false),
        })
    }

    /// The server has acknowledged a write. Says its number; there is a copy of it if it was `retained`.
    #[inline]
    pub fn acknowledge(&self, retained: bool) -> u64 {
        let number = self.place.page().acknowledged.fetch_add(1, Ordering::AcqRel) + 1;
        if !retained {
            self.unretained.fetch_max(number, Ordering::AcqRel);
        }
        number
    }

    /// What a flush that is submitted now will cover.
    #[inline]
    pub fn mark(&self) -> u64 {
        self.place.page().acknowledged.load(Ordering::Acquire)
    }

    /// A flush has succeeded that covers all up to `mark`.
    pub fn flushed(&self, mark: u64) {
        let mark = if removed(Rule::CoveredByFlush) { self.mark() } else { mark };
        self.place.page().durable.fetch_max(mark, Ordering::AcqRel);
    }

    /// A flush has failed.
    pub fn flush_has_failed(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }

    /// Whether a flush has failed since all was durable.
    pub fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    /// Writes up to this number are durable.
    #[inline]
    pub fn durable(&self) -> u64 {
        self.place.page().durable.load(Ordering::Acquire)
    }

    /// Whether acknowledged writes could be lost by a power cut of the server.
    pub fn dirty(&self) -> bool {
        self.mark() > self.durable()
    }

    /// Whether there is one among them of which there is no copy.
    #[inline]
    pub fn incomplete(&self) -> bool {
        self.unretained.load(Ordering::Acquire) > self.durable()
    }

    /// Everything that was acknowledged is durable, or a person has given it up. Nothing is being acknowledged meanwhile.
    pub fn settle(&self) {
        self.place.page().durable.fetch_max(self.mark(), Ordering::AcqRel);
        self.flush_failed.store(false, Ordering::Release);
    }

    /// The predecessor of this process is done with the export. What it has left unflushed there are no copies of.
    pub fn inherit(&self) {
        if self.dirty() {
            self.unretained.fetch_max(self.mark(), Ordering::AcqRel);
        }
    }

    /// Which instance has acknowledged what is counted; `None` if nobody has said.
    pub fn instance(&self) -> Option<String> {
        let page = self.place.page();
        let length = usize::try_from(page.length.load(Ordering::Acquire)).ok()?;
        let words = page.instance.iter().flat_map(|word| word.load(Ordering::Acquire).to_le_bytes());
        let bytes: Vec<u8> = words.take(length).collect();
        String::from_utf8(bytes).ok().filter(|name| !name.is_empty())
    }

    /// The instance that acknowledges from now on. Only while nothing is dirty: a process that is killed in the middle of this leaves a
    /// name that nobody asks for.
    pub fn set_instance(&self, name: &str) {
        let page = self.place.page();
        page.length.store(0, Ordering::Release);
        let mut bytes = [0; LONGEST_INSTANCE];
        let length = name.len().min(LONGEST_INSTANCE);
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        for (word, eight) in page.instance.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*eight), Ordering::Release);
        }
        page.length.store(length as u64, Ordering::Release);
    }

    /// Numbers a write that is sent for the first time.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.sent.fetch_add(1, Ordering::AcqRel)
    }

    /// A channel goes, and the server may still carry out what it had in flight.
    pub fn leave_unanswered(&self) {
        self.unanswered.store(true, Ordering::Release);
    }

    /// Whether one has gone so, and none has come since.
    pub fn has_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Acquire)
    }

    /// Whether one has gone so since the last call.
    pub fn take_unanswered(&self) -> bool {
        self.unanswered.swap(false, Ordering::AcqRel)
    }
}

/// Opens, or makes, a mark file.
fn map(path: &Path) -> Result<MemoryRegion, NbdError> {
    let wrong = |why: String| NbdError::Mark { path: path.to_owned(), why };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file: OwnedFd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))
        .map_err(|errno| wrong(errno.to_string()))?;
    let bytes = rustix::fs::fstat(&file).map_err(|errno| wrong(errno.to_string()))?.st_size;
    if bytes == 0 {
        rustix::fs::ftruncate(&file, PAGE).map_err(|errno| wrong(errno.to_string()))?;
        // So that no store finds the file system full.
        let filled =
            rustix::io::pwrite(&file, &[0; PAGE as usize], 0).map_err(|errno| wrong(errno.to_string()))?;
        if filled as u64 != PAGE {
            return Err(wrong("it cannot be written".into()));
        }
    } else if bytes as u64 != PAGE {
        return Err(wrong(format!("it has {bytes} bytes, and a mark file has {PAGE}")));
    }
    let spec = RegionSpec { gpa: 0, len: PAGE, user: 0, offset: 0, file };
    let place = Place::File(MemoryRegion::map(spec).map_err(|error| wrong(error.to_string()))?);
    let page = place.page();
    let magic = page.magic.load(Ordering::Acquire);
    let counts = [&page.acknowledged, &page.durable].map(|count| count.load(Ordering::Acquire));
    if magic == 0 && counts == [0, 0] {
        // New, or its maker was killed before it counted anything.
        page.magic.store(MAGIC, Ordering::Release);
    } else if magic != MAGIC {
        return Err(wrong("it is no mark file of this version".into()));
    } else if counts[1] > counts[0] || page.length.load(Ordering::Acquire) > LONGEST_INSTANCE as u64 {
        return Err(wrong("its counts contradict each other".into()));
    }
    match place {
        Place::File(region) => Ok(region),
        Place::Own(_) => unreachable!("made from a file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_successor_sees_what_its_predecessor_was_told_and_did_not_flush() {
        let folder = folder();
        let path = folder.path().join("mark");
        let first = Writes::open(Some(&path)).unwrap();
        assert_eq!((first.instance(), first.dirty()), (None, false));
        first.set_instance("image@boot");
        first.acknowledge(true);
        let mark = first.mark();
        first.acknowledge(true);
        first.flushed(mark);
        assert!(first.dirty() && !first.incomplete(), "it has copies");
        drop(first);
        let second = Writes::open(Some(&path)).unwrap();
        second.inherit();
        assert_eq!(second.instance().as_deref(), Some("image@boot"));
        assert!(second.dirty() && second.incomplete());
        second.flushed(second.mark());
        assert!(!second.dirty() && !second.incomplete());
        second.set_instance("b");
        assert_eq!(Writes::open(Some(&path)).unwrap().instance().as_deref(), Some("b"));
    }

    #[test]
    fn what_is_no_mark_file_is_refused_by_name() {
        let folder = folder();
        let path = folder.path().join("mark");
        let refused = |bytes: &[u8], words: &str| {
            std::fs::write(&path, bytes).unwrap();
            let error = Writes::open(Some(&path)).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("mark"), "{error}");
        };
        refused(&[0; 100], "100 bytes");
        refused(&[7; PAGE as usize], "no mark file");
        let mut counts = [0; PAGE as usize];
        counts[..8].copy_from_slice(&MAGIC.to_le_bytes());
        counts[16] = 9;
        refused(&counts, "contradict");
        counts[8] = 9;
        counts[24..32].fill(0xff);
        refused(&counts, "contradict");
        let error = Writes::open(Some(&folder.path().join("no/mark"))).unwrap_err().to_string();
        assert!(error.contains("no/mark"), "{error}");
    }
}
