//! Tracepoints through tracefs, where perf events are forbidden: an instance of our own, filtered by thread, read as the kernel's
//! ring buffer has it.
//!
//! ```text
//!   instances/ioplane-exits-PID-N/set_event_pid  <-- vCPU threads
//!                                 per_cpu/cpuN/trace_pipe_raw --pages--> records, in the order of their times --> Decoder
//! ```
//!
//! The kernel drops what finds no room and counts it, but not by tracepoint: how many exits were lost only KVM's own counter tells.
//! What it has counted, and pages that could not be understood to their end, is said ([`Losses`]); counts that cannot be read are an
//! error and never none.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ioplane_plain::file_text;

use crate::claim::Claim;
use crate::error::{ExitsError, Result};
use crate::event::{Decoder, Event};
use crate::format::{Field, Format};

/// Each processor's ring, in KiB.
const RING: u64 = 4096;
/// A page of the ring is not larger.
const PAGE: usize = 1 << 16;
/// So many records are read of each processor at once; more are then, in the next turn.
const TURN: usize = 1 << 16;
/// So many may wait for older ones of other processors; then nothing is read, until the kernel has no room and counts that.
const WAITING: usize = 1 << 20;
/// What is older than this was written long since, on whatever processor. In ns.
const SETTLED: u64 = 1_000_000;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traced {
    /// When, in ns of the clock `mono`.
    pub at: u64,
    /// The thread in which it happened.
    pub thread: u32,
    /// What it tells; nothing if it is of no tracepoint that was asked for. Records themselves are not kept: they lie in the page that was read.
    pub event: Option<Event>,
}

/// What was recorded and never came, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Events that found no room in a ring.
    pub dropped: u64,
    /// Events that newer ones have overwritten before they were read.
    pub overrun: u64,
    /// Events that were interrupted so often that their page was full before they were complete.
    pub commit_overrun: u64,
    /// Pages of which the rest could not be understood.
    pub torn: u64,
    /// Pages before which the kernel says that events are missing.
    pub gaps: u64,
}

impl Losses {
    /// Events that are missing, as far as they are counted.
    pub fn events(&self) -> u64 {
        self.dropped + self.overrun + self.commit_overrun
    }

    /// In words; nothing if nothing is missing.
    pub fn words(&self) -> Option<String> {
        let Losses { dropped, overrun, commit_overrun, torn, gaps } = *self;
        let all = [
            (dropped, "found no room"),
            (overrun, "were overwritten"),
            (commit_overrun, "were never complete"),
            (torn, "pages could not be read to their end"),
            (gaps, "pages begin after a gap"),
        ];
        let said: Vec<String> = all
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!said.is_empty()).then(|| said.join(", "))
    }
}

/// An instance of tracefs that is ours. It goes with this value.
#[derive(Debug)]
pub struct TraceInstance {
    folder: PathBuf,
    events: Vec<&'static str>,
    rings: Vec<File>,
    page: Page,
    buffer: Vec<u8>,
    /// What came too early to be passed on.
    waiting: Vec<Traced>,
    /// Pages that were torn, and pages after a gap.
    pages: Losses,
    /// Goes last of all.
    _claim: Claim,
}

impl TraceInstance {
    /// Makes one below the root of tracefs for tracepoints of KVM. Nothing is recorded before [`TraceInstance::enable`].
    pub fn new(root: &Path, events: Vec<&'static str>) -> Result<TraceInstance> {
        let page = Page::parse(&at_once(&root.join("events/header_page"))?).ok_or_else(|| {
            ExitsError::malformed(root.join("events/header_page"), "does not say how a page begins")
        })?;
        let claim = Claim::new(root)?;
        let folder = claim.folder().to_owned();
        // From here on it goes with the value, whatever fails.
        let mut instance = TraceInstance {
            folder,
            events,
            rings: Vec::new(),
            page,
            buffer: vec![0; PAGE],
            waiting: Vec::new(),
            pages: Losses::default(),
            _claim: claim,
        };
        // Order across processors, and what is not read is kept.
        instance.write("trace_clock", "mono")?;
        instance.write("options/overwrite", "0")?;
        instance.write("buffer_size_kb", &RING.to_string())?;
        let folders = instance.folder.join("per_cpu");
        for entry in fs::read_dir(&folders).map_err(ExitsError::file(&folders))?.flatten() {
            let path = entry.path().join("trace_pipe_raw");
            let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            let ring = OpenOptions::new().read(true).custom_flags(flags).open(&path);
            instance.rings.push(ring.map_err(ExitsError::file(&path))?);
        }
        Ok(instance)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(ExitsError::file(&path))
    }

    /// Records this thread's events too.
    pub fn add(&self, thread: u32) -> Result<()> {
        let path = self.folder.join("set_event_pid");
        let file = OpenOptions::new().append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(format!("{thread}\n").as_bytes()));
        written.map_err(ExitsError::file(&path))
    }

    /// Begins to record. A tracepoint that this kernel does not have was left out before.
    pub fn enable(&self) -> Result<()> {
        self.events.iter().try_for_each(|event| self.write(&format!("events/kvm/{event}/enable"), "1"))
    }

    /// Ends that.
    pub fn disable(&self) -> Result<()> {
        self.events.iter().try_for_each(|event| self.write(&format!("events/kvm/{event}/enable"), "0"))
    }

    /// Records of one of them only what this expression says.
    pub fn filter_event(&self, event: &str, expression: &str) -> Result<()> {
        self.write(&format!("events/kvm/{event}/filter"), expression)
    }

    /// Ends one of them alone.
    pub fn drop_event(&self, event: &str) -> Result<()> {
        self.write(&format!("events/kvm/{event}/enable"), "0")
    }

    /// One descriptor for each processor; readable when something has come.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(File::as_fd)
    }

    /// What has come, in order, and whether there is more. A thread that moves leaves records on several processors: what is so
    /// new that older ones may still come waits, unless recording has ended.
    pub fn drain(&mut self, decoder: &Decoder, ended: bool) -> Result<(Vec<Traced>, bool)> {
        let now = monotonic();
        let mut horizon = if ended { u64::MAX } else { now.saturating_sub(SETTLED) };
        let mut more = false;
        for ring in &mut self.rings {
            let before = self.waiting.len();
            loop {
                if self.waiting.len() - before >= TURN || self.waiting.len() >= WAITING {
                    // Of this processor older ones are left than of the others.
                    let last = self.waiting[before..].last().map_or(0, |record| record.at);
                    horizon = horizon.min(last);
                    more = true;
                    break;
                }
                let waiting = &mut self.waiting;
                match ring.read(&mut self.buffer) {
                    Ok(0) => break,
                    Ok(length) => {
                        let mut strange = false;
                        let ending =
                            self.page.records(&self.buffer[..length], &mut |at, record| match decoder
                                .thread(record)
                            {
                                Some(thread) => {
                                    waiting.push(Traced { at, thread, event: decoder.decode(record) });
                                }
                                None => strange = true,
                            });
                        self.pages.torn += u64::from(strange || ending.torn);
                        self.pages.gaps += u64::from(ending.gap);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(ExitsError::os("reading tracefs")(error)),
                }
            }
        }
        Ok((settled(&mut self.waiting, horizon), more))
    }

    /// What was lost so far.
    pub fn lost(&self) -> Result<Losses> {
        let mut losses = self.pages;
        let rings = self.folder.join("per_cpu");
        for entry in fs::read_dir(&rings).map_err(ExitsError::file(&rings))? {
            let path = entry.map_err(ExitsError::file(&rings))?.path().join("stats");
            let ring = dropped(&file_text(&path, 4096)?);
            let ring =
                ring.ok_or_else(|| ExitsError::malformed(path, "does not say how many events were lost"))?;
            losses.dropped += ring.dropped;
            losses.overrun += ring.overrun;
            losses.commit_overrun += ring.commit_overrun;
        }
        Ok(losses)
    }
}

/// The clock of all records, in ns.
pub(crate) fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Takes what is not newer than the horizon, in order. Where too much waits, all.
fn settled(waiting: &mut Vec<Traced>, horizon: u64) -> Vec<Traced> {
    waiting.sort_by_key(|record| record.at);
    let known = waiting.partition_point(|record| record.at <= horizon);
    // Nothing would ever be read again.
    let known = if known == 0 && waiting.len() >= WAITING { waiting.len() } else { known };
    let rest = waiting.split_off(known);
    std::mem::replace(waiting, rest)
}

impl Drop for TraceInstance {
    fn drop(&mut self) {
        // It cannot be removed while its rings are open; then its claim does that.
        self.rings.clear();
        let _ = self.disable();
    }
}

/// A file of tracefs that gives what one read asks for, and nothing to a second.
fn at_once(path: &Path) -> Result<String> {
    let mut bytes = vec![0; 4096];
    let length =
        File::open(path).and_then(|mut file| file.read(&mut bytes)).map_err(ExitsError::file(path))?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

/// Of `stats`: what was lost; nothing if it does not say all of it.
fn dropped(stats: &str) -> Option<Losses> {
    let number = |wanted: &str| {
        let mut lines = stats.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(key, _)| *key == wanted)?.1.trim().parse::<u64>().ok()
    };
    let (overrun, commit_overrun) = (number("overrun")?, number("commit overrun")?);
    Some(Losses { dropped: number("dropped events")?, overrun, commit_overrun, ..Losses::default() })
}

/// How the reading of a page has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// The rest of it could not be understood.
    pub torn: bool,
    /// The kernel says that events are missing before it.
    pub gap: bool,
}

/// In the length of a page: events before it are missing (the kernel's `RB_MISSED_EVENTS`).
const MISSED: u64 = 1 << 31;

/// How a page of the ring begins, as `events/header_page` states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    time: Field,
    length: Field,
    data: usize,
}

impl Page {
    /// Reads `header_page`; nothing if it says something else.
    pub fn parse(text: &str) -> Option<Page> {
        let fields = Format::parse(&format!("ID: 0\n{text}"))?;
        // The data are longer than a number: only their beginning is wanted.
        let data = text.lines().find(|line| line.contains(" data;"))?;
        let data = data.split(';').find_map(|part| part.trim().strip_prefix("offset:")?.parse().ok())?;
        (data < PAGE).then_some(Page {
            time: fields.field("timestamp")?,
            length: fields.field("commit")?,
            data,
        })
    }

    /// Gives each record of a page, with its time, to `take`. What cannot be understood ends the page. The layout is that of
    /// `events/header_event`: five bits of type or length, 27 of time since the last.
    pub fn records(&self, page: &[u8], take: &mut dyn FnMut(u64, &[u8])) -> Ending {
        let (time, length) = (self.time.of(page), self.length.of(page));
        let gap = length.is_some_and(|length| length & MISSED != 0);
        let whole = time.zip(length).is_some_and(|(at, length)| self.whole(page, at, length, take));
        Ending { torn: !whole, gap }
    }

    /// The same of a page of that time and length; whether all of it was understood.
    fn whole(&self, page: &[u8], mut at: u64, length: u64, take: &mut dyn FnMut(u64, &[u8])) -> bool {
        // The upper bits of the length say that records are missing.
        let end = self.data.saturating_add((length & 0xf_ffff) as usize);
        let Some(mut rest) = page.get(self.data..end.min(page.len())) else { return false };
        let word = |bytes: &[u8], at: usize| {
            bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        };
        while let Some(head) = word(rest, 0) {
            let (kind, delta) = (head & 31, u64::from(head >> 5));
            let (from, to) = match kind {
                // Longer than 28 words: its length is in the next one, and counts that one.
                0 => match word(rest, 4) {
                    Some(length) if length >= 4 => (8, (4 + length as usize).next_multiple_of(4)),
                    _ => return false,
                },
                1..=28 => (4, 4 + 4 * kind as usize),
                // The rest of the page, or a record that was taken back.
                29 => match word(rest, 4) {
                    Some(length) if delta != 0 => (0, 4 + length as usize),
                    // No time: the rest of the page is empty.
                    found => return found.is_some() || rest.len() == 4,
                },
                30 | 31 => {
                    let Some(high) = word(rest, 4) else { return false };
                    let time = (u64::from(high) << 27) | delta;
                    // A longer step, or the time itself, without its upper five bits.
                    at = if kind == 30 { at.wrapping_add(time) } else { (at & (31 << 59)) | time };
                    (0, 8)
                }
                _ => return false,
            };
            if kind < 30 {
                at = at.wrapping_add(delta);
            }
            if to == 0 || to > rest.len() {
                return false;
            }
            if from > 0 {
                take(at, &rest[from..to]);
            }
            rest = &rest[to..];
        }
        rest.is_empty() && end <= page.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of Linux 6.12.
    const HEADER: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
        \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
        \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
        \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";

    fn page(words: &[u32]) -> Vec<u8> {
        let mut page = 1000u64.to_le_bytes().to_vec();
        page.extend((words.len() as u64 * 4).to_le_bytes());
        page.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        page
    }

    fn records(page: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut found = Vec::new();
        Page::parse(HEADER).unwrap().records(page, &mut |at, record| found.push((at, record.to_vec())));
        found
    }

    #[test]
    fn a_page_is_taken_apart() {
        let words = [
            2 | (5 << 5),
            0x11,
            0x22, // two words, 5 ns later
            30 | (1 << 5),
            1, // 2^27 + 1 ns later
            0,
            12,
            0x33,
            0x44, // long form: its own length and two words
            29 | (1 << 5),
            4, // taken back
            1,
            0x55,
        ];
        let found = records(&page(&words));
        let times: Vec<u64> = found.iter().map(|(at, _)| *at).collect();
        let later = 1006 + (1 << 27);
        assert_eq!(times, [1005, later, later + 1]);
        assert_eq!(found[0].1, [0x11, 0, 0, 0, 0x22, 0, 0, 0]);
        assert_eq!(found[1].1.len(), 8);
        assert_eq!(found[2].1, [0x55, 0, 0, 0]);
    }

    /// A thread that moved: its records of the processor that was read first are the later ones.
    #[test]
    fn records_of_several_processors_are_put_in_order() {
        let record = |at: u64| Traced { at, thread: 7, event: None };
        let times = |found: Vec<Traced>| found.into_iter().map(|record| record.at).collect::<Vec<_>>();
        let mut waiting = vec![record(40), record(60), record(10)];
        assert_eq!(times(settled(&mut waiting, 50)), [10, 40]);
        // What comes now is older than what has waited.
        waiting.extend([record(55), record(70)]);
        assert_eq!(times(settled(&mut waiting, 65)), [55, 60]);
        assert_eq!(times(settled(&mut waiting, u64::MAX)), [70]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn hole_21_what_tracefs_lost_is_said_by_cause() {
        let stats =
            "entries: 5\noverrun: 3\ncommit overrun: 2\nbytes: 20\nread events: 9\ndropped events: 4\n";
        let lost = dropped(stats).unwrap();
        assert_eq!(lost, Losses { dropped: 4, overrun: 3, commit_overrun: 2, ..Losses::default() });
        assert_eq!(lost.words().unwrap(), "4 found no room, 3 were overwritten, 2 were never complete");
        assert_eq!((lost.events(), Losses::default().words()), (9, None));
        // A file that does not say it does not say that nothing was lost.
        for key in ["overrun: 3\n", "commit overrun: 2\n", "dropped events: 4\n"] {
            assert_eq!(dropped(&format!("\n{stats}").replace(&format!("\n{key}"), "\n")), None, "{key}");
        }
        assert_eq!(dropped("what?"), None);
    }

    #[test]
    fn hole_21_pages_with_gaps_and_torn_pages_are_told() {
        let ending = |page: &[u8]| Page::parse(HEADER).unwrap().records(page, &mut |_, _| {});
        let whole = page(&[2 | (5 << 5), 0x11, 0x22]);
        assert_eq!(ending(&whole), Ending::default());
        // Padding to the end of the page is no loss.
        assert_eq!(ending(&page(&[2 | (5 << 5), 0x11, 0x22, 29, 4040])), Ending::default());
        let mut missed = whole.clone();
        missed[11] |= 0x80;
        assert_eq!(ending(&missed), Ending { gap: true, torn: false });
        for torn in [&whole[..whole.len() - 4], &whole[..12], &page(&[0, 1]), &page(&[28, 1])] {
            assert!(ending(torn).torn, "{torn:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_page_is_survived(words in proptest::collection::vec(any::<u32>(), 0..64), cut in 0usize..280) {
            let page = page(&words);
            let _ = records(&page[..cut.min(page.len())]);
        }

        #[test]
        fn any_header_is_survived(text in "\\PC{0,200}", bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(page) = Page::parse(&format!("{HEADER}{text}")) {
                let _ = page.records(&bytes, &mut |_, _| {});
            }
        }
    }
}
