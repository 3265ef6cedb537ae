//! In which functions of the VMM its vCPU threads are: at each tick of a clock that runs while they have a processor, where they are in user space.
//!
//! A tick may find the thread in the guest, and is an exit of our making then: so they are few.

use std::path::Path;

use foldhash::{HashMap, HashMapExt};
use ioplane_plain::{ProcMapping, excerpt, file_text, plain};
use ioplane_symbols::{ProgramFunction, ProgramSymbols};
use serde::{Deserialize, Serialize};

use crate::perf::ThreadSamples;

mod reader;

use reader::{Mapped, Reader};

/// 199 a second: no period of a guest or of a VMM has a factor in common with that.
pub(crate) const INTERVAL_NS: u64 = 5_025_126;
/// So many places are told apart.
const PLACES: usize = 1 << 16;
/// So many files with code.
const FILES: usize = 256;
/// A file for which there is no room.
const BEYOND: usize = usize::MAX;
/// A VMM has a thousand mappings; Linux allows 65,530 unless it is told otherwise.
const MAPS: u64 = 32 << 20;
/// So many functions are listed.
const ROWS: usize = 1000;

/// Where the vCPU threads were in the VMM's user space.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmmTime {
    /// How often a thread was found in user space.
    pub samples: u64,
    /// It was looked once in so much time of each thread, in ns.
    pub interval_ns: u64,
    /// Of `samples`, those at addresses that are no code of the VMM's process. Guest code looks so where a software KVM runs it.
    pub outside: u64,
    /// Of `samples`, those in places that found no room.
    pub crowded: u64,
    /// Samples beside these that found no room in a ring.
    pub lost: u64,
    /// Programs and libraries that name only what they export.
    pub stripped: Vec<String>,
    /// Those whose symbols could not be read in time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<String>,
    /// Most first.
    pub functions: Vec<VmmRow>,
}

/// A function of the VMM's program or of a library of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmmRow {
    /// The function and its file; `[qemu-system-x86_64]+0x1234` where only its address is known, as linked.
    pub name: String,
    /// How often a thread was found in it.
    pub samples: u64,
    /// Of all samples.
    pub percent: f64,
    /// Its name is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnamed: bool,
}

impl VmmTime {
    /// What the samples are of, and what is not among them.
    pub fn words(&self) -> String {
        let mut words = format!(
            "{} samples of its vCPU threads in user space, one in {:.0} ms",
            self.samples,
            self.interval_ns as f64 / 1e6
        );
        for (count, what) in [
            (self.outside, "outside its programs"),
            (self.crowded, "in too many places"),
            (self.lost, "more found no room"),
        ] {
            if count > 0 {
                words += &format!(", {count} {what}");
            }
        }
        if !self.stripped.is_empty() {
            words +=
                &format!("; addresses stand for local functions of {}: stripped", self.stripped.join(", "));
        }
        if !self.unread.is_empty() {
            words += &format!("; files that did not let themselves be read: {}", self.unread.join(", "));
        }
        words
    }
}

/// Code that the process has mapped.
#[derive(Debug)]
struct Code {
    start: u64,
    end: u64,
    offset: u64,
    key: FileKey,
    /// In [`VmmSamples::files`], once a sample was in it.
    file: Option<usize>,
}

/// Device, inode and path. Files of a container can have the same path as others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileKey {
    device: (u32, u32),
    inode: u64,
    path: String,
}

#[derive(Debug)]
struct CodeFile {
    key: FileKey,
    /// Its symbols are asked for.
    awaited: bool,
    symbols: Option<ProgramSymbols>,
}

/// Samples of all vCPU threads of one process.
#[derive(Debug, Default)]
pub(crate) struct VmmSamples {
    pid: u32,
    code: Vec<Code>,
    files: Vec<CodeFile>,
    /// From the first file on.
    reader: Option<Reader>,
    /// By file and offset in it.
    places: HashMap<(usize, u64), u64>,
    samples: u64,
    outside: u64,
    crowded: u64,
    lost: u64,
    /// Mappings were read since the last look into the rings.
    fresh: bool,
}

impl VmmSamples {
    /// Of that process.
    pub fn new(pid: u32) -> VmmSamples {
        VmmSamples { pid, ..VmmSamples::default() }
    }

    /// Takes what has come of a thread.
    pub fn drain(&mut self, samples: &mut ThreadSamples) {
        self.fresh = false;
        let lost = samples.drain(|address| self.take(address));
        self.lost = self.lost.saturating_add(lost);
    }

    fn take(&mut self, address: u64) {
        self.samples += 1;
        let found = self.find(address).or_else(|| {
            self.map()?;
            self.find(address)
        });
        let Some(place) = found else {
            self.outside += 1;
            return;
        };
        if place.0 != BEYOND && (self.places.len() < PLACES || self.places.contains_key(&place)) {
            *self.places.entry(place).or_default() += 1;
        } else {
            self.crowded += 1;
        }
    }

    /// The file, or [`BEYOND`], and where in it.
    fn find(&mut self, address: u64) -> Option<(usize, u64)> {
        let next = self.code.partition_point(|code| code.start <= address);
        let code = self.code.get_mut(next.checked_sub(1)?).filter(|code| address < code.end)?;
        let offset = code.offset.checked_add(address - code.start)?;
        if code.file.is_none() {
            let known = self.files.iter().position(|file| file.key == code.key);
            if known.is_none() && self.files.len() >= FILES {
                return Some((BEYOND, offset));
            }
            code.file = known.or_else(|| {
                let index = self.files.len();
                let mapped = Mapped::of(self.pid, code);
                self.files.push(CodeFile { key: code.key.clone(), awaited: mapped.is_some(), symbols: None });
                if self.reader.is_none() {
                    self.reader = Reader::start();
                }
                if let (Some(reader), Some(mapped)) = (&self.reader, mapped) {
                    reader.open(index, mapped);
                }
                Some(index)
            });
        }
        Some((code.file?, offset))
    }

    /// Reads what the process has mapped, unless that was just done.
    fn map(&mut self) -> Option<()> {
        (!self.fresh).then(|| self.fresh = true)?;
        let maps = file_text(Path::new(&format!("/proc/{}/maps", self.pid)), MAPS).ok()?;
        self.code = maps.lines().filter_map(ProcMapping::parse).filter_map(Code::of).collect();
        Some(())
    }

    /// Reads the symbols of files that samples were in, each once.
    pub fn read_names(&mut self) {
        let VmmSamples { files, reader, .. } = self;
        if let Some(reader) = reader {
            reader.read(|index, symbols| {
                files[index].awaited = false;
                files[index].symbols = symbols;
            });
        }
    }

    /// So far; names are those of the last [`VmmSamples::read_names`].
    pub fn time(&self) -> VmmTime {
        let mut functions: HashMap<(String, bool), u64> = HashMap::new();
        for ((file, offset), count) in &self.places {
            *functions.entry(self.files[*file].name(*offset)).or_default() += count;
        }
        let percent = |samples: u64| samples as f64 * 100.0 / self.samples.max(1) as f64;
        let row = |((name, unnamed), samples)| VmmRow { name, samples, percent: percent(samples), unnamed };
        let mut functions: Vec<VmmRow> = functions.into_iter().map(row).collect();
        functions.sort_by(|a, b| b.samples.cmp(&a.samples).then_with(|| a.name.cmp(&b.name)));
        functions.truncate(ROWS);
        let shown = |files: &mut dyn Iterator<Item = &CodeFile>| files.map(|file| file.key.shown()).collect();
        let stripped = |file: &&CodeFile| file.symbols.as_ref().is_some_and(ProgramSymbols::is_stripped);
        VmmTime {
            samples: self.samples,
            interval_ns: INTERVAL_NS,
            outside: self.outside,
            crowded: self.crowded,
            lost: self.lost,
            stripped: shown(&mut self.files.iter().filter(stripped)),
            unread: shown(&mut self.files.iter().filter(|file| file.awaited)),
            functions,
        }
    }
}

impl Code {
    fn of(mapping: ProcMapping<'_>) -> Option<Code> {
        let ProcMapping { start, end, offset, device, inode, path, .. } = mapping;
        let path = path.strip_suffix(" (deleted)").unwrap_or(path).to_owned();
        mapping.executable.then_some(Code {
            start,
            end,
            offset,
            key: FileKey { device, inode, path },
            file: None,
        })
    }
}

impl FileKey {
    /// The file's name alone, plain.
    fn shown(&self) -> String {
        match self.path.rsplit('/').next() {
            None | Some("") => "anonymous memory".into(),
            Some(name) => excerpt(&name.trim_matches(['[', ']'])),
        }
    }
}

impl CodeFile {
    /// What is at so many bytes into it, and whether that is not a name.
    fn name(&self, offset: u64) -> (String, bool) {
        let file = self.key.shown();
        match self.symbols.as_ref().and_then(|symbols| symbols.function(offset)) {
            Some(ProgramFunction::Named(name)) => (format!("{} [{file}]", demangled(name)), false),
            Some(ProgramFunction::Begins(at) | ProgramFunction::At(at)) => {
                (format!("[{file}]+{at:#x}"), true)
            }
            None => (format!("[{file}]"), true),
        }
    }
}

/// Plain, and a name of Rust as its source has it.
fn demangled(name: &str) -> String {
    match rustc_demangle::try_demangle(name) {
        Ok(name) => excerpt(&format_args!("{name:#}")),
        Err(_) => plain(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn sampled_here(number: u64) -> u64 {
        std::hint::black_box(number) + 1
    }

    fn of_this_process() -> VmmSamples {
        VmmSamples::new(std::process::id())
    }

    #[test]
    fn places_become_functions() {
        assert_eq!(sampled_here(1), 2);
        let mut samples = of_this_process();
        let own = sampled_here as fn(u64) -> u64 as usize as u64;
        let exported = libc::ioctl as *const () as usize as u64;
        [own, own, own + 1, exported, 8, u64::MAX].into_iter().for_each(|address| samples.take(address));
        // A new thread's stack is no code.
        samples.take(&raw const own as usize as u64);
        let unread = samples.time();
        assert!(unread.functions.iter().all(|row| row.unnamed && row.name.ends_with(']')), "{unread:#?}");
        samples.read_names();
        let time = samples.time();
        assert_eq!(
            (time.samples, time.outside, time.crowded, time.functions.len()),
            (7, 3, 0, 2),
            "{time:#?}"
        );
        let [first, second] = [&time.functions[0], &time.functions[1]];
        assert!(
            first.name.starts_with("ioplane_exits::vmm::tests::sampled_here [ioplane_exits-"),
            "{first:?}"
        );
        assert_eq!((first.samples, first.unnamed), (3, false));
        assert!((first.percent - 300.0 / 7.0).abs() < 1e-9);
        assert!(second.name.starts_with("ioctl [libc.so"), "{second:?}");
    }

    #[test]
    fn mappings_are_read_once_for_a_look() {
        let mut samples = of_this_process();
        samples.take(8);
        samples.code.clear();
        samples.take(sampled_here as fn(u64) -> u64 as usize as u64);
        assert_eq!((samples.outside, samples.files.len()), (2, 0));
        samples.fresh = false;
        samples.take(sampled_here as fn(u64) -> u64 as usize as u64);
        assert_eq!((samples.outside, samples.files.len()), (2, 1));
    }

    #[test]
    fn files_without_symbols_have_no_functions() {
        let mapping = |line: &str| Code::of(ProcMapping::parse(line).unwrap()).unwrap();
        let code = mapping("1000-2000 r-xp 00000000 00:00 7 /tmp/\u{1b}[2Jqemu (deleted)");
        let name = |code: Code| CodeFile { key: code.key, awaited: false, symbols: None }.name(0x10);
        assert_eq!(name(code), ("[?[2Jqemu]".into(), true));
        assert_eq!(name(mapping("1000-2000 r-xp 00000000 00:00 0 [vdso]")), ("[vdso]".into(), true));
        assert_eq!(name(mapping("1000-2000 rwxp 00000000 00:00 0 ")), ("[anonymous memory]".into(), true));
        assert!(Code::of(ProcMapping::parse("1000-2000 rw-p 00000000 00:00 0 ").unwrap()).is_none());
    }

    #[test]
    fn names_of_rust_are_as_in_its_source() {
        assert_eq!(demangled("_ZN3foo3bar17h05af221e174051e9E"), "foo::bar");
        assert_eq!(demangled("kvm_cpu_exec\u{1b}"), "kvm_cpu_exec?");
    }
}
