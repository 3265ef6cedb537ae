//! An unstripped ELF kernel: its symbols, and the bytes of its text, which say where instructions are that can exit.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::path::Path;

use object::read::{ReadCache, ReadRef};
use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};

use crate::{Origin, Symbols};
use ioplane_plain::{FileError, shown};

/// So many bytes of text are kept.
const TEXT: u64 = 1 << 28;

/// A name of which no end is found is read so far.
const ENDLESS: u64 = 4096;
/// So many sections of text are kept. A kernel has a dozen.
pub(crate) const PARTS: usize = 1024;
/// No table is larger: that of the symbols has a hundred bytes for each.
const TABLE: u64 = 1 << 28;
/// So much is read of a file in all. A kernel with everything in it has half.
const ALL: u64 = 3 << 28;

/// The kernel's instructions, as linked.
#[derive(Debug, Default)]
pub(crate) struct Text {
    /// By address, none empty.
    parts: Vec<(u64, Vec<u8>)>,
}

impl Text {
    /// The bytes from an address on; empty if there are none.
    pub(crate) fn at(&self, address: u64) -> &[u8] {
        let next = self.parts.partition_point(|(start, _)| *start <= address);
        let part = next.checked_sub(1).and_then(|at| self.parts.get(at));
        let rest = part.and_then(|(start, bytes)| bytes.get(usize::try_from(address - start).ok()?..));
        rest.unwrap_or_default()
    }

    /// Of parts in any order. They do not overlap in a kernel; of two at one address the longer is meant.
    pub(crate) fn of(mut parts: Vec<(u64, Vec<u8>)>) -> Text {
        parts.retain(|(_, bytes)| !bytes.is_empty());
        parts.sort_by_key(|(start, bytes)| (*start, bytes.len()));
        Text { parts }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }
}

/// A file that gives no more than a kernel has: what the headers say would be put into memory, and a sparse file has any size.
#[derive(Clone, Copy)]
pub(crate) struct Frugal<'a, T> {
    file: T,
    left: &'a Cell<u64>,
    /// How much was asked for and not given.
    refused: &'a Cell<u64>,
}

impl<T> Frugal<'_, T> {
    fn pay(&self, size: u64) -> Result<(), ()> {
        let left = self.left.get().checked_sub(size).filter(|_| size <= TABLE);
        self.left.set(left.ok_or_else(|| self.refused.set(size))?);
        Ok(())
    }
}

impl<'a, T: ReadRef<'a>> ReadRef<'a> for Frugal<'a, T> {
    fn len(self) -> Result<u64, ()> {
        self.file.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.pay(size)?;
        self.file.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        if self.refused.get() > 0 {
            return Err(());
        }
        let found = self.file.read_bytes_at_until(range, delimiter);
        // Looking for an end that is not there costs more than a name does.
        self.pay(found.map_or(ENDLESS, |name| name.len() as u64))?;
        found
    }
}

pub(crate) fn read(path: &Path) -> crate::Result<Symbols> {
    parse(File::open(path).map_err(FileError::of(path))?, path)
}

/// What is read of an ELF file.
pub(crate) type Elf<'a, F> = object::File<'a, Frugal<'a, &'a ReadCache<F>>>;

/// Hands an ELF file to `take`, which reads what it asks for, not the gigabyte of debugging information; it is told whether that was too much.
pub(crate) fn open<F: Read + Seek, T>(
    file: F,
    path: &Path,
    take: impl FnOnce(&Elf<'_, F>, &dyn Fn() -> bool) -> T,
) -> crate::Result<T> {
    let malformed = |what: String| FileError::malformed(path, what);
    let cache = ReadCache::new(file);
    let (left, refused) = (Cell::new(ALL), Cell::new(0));
    let frugal = Frugal { file: &cache, left: &left, refused: &refused };
    let elf = object::File::parse(frugal).map_err(|error| match refused.get() {
        0 => malformed(format!("is a damaged ELF file: {error}")),
        size => malformed(format!("is a damaged ELF file: no kernel has a table of {size} bytes")),
    })?;
    Ok(take(&elf, &|| refused.get() > 0))
}

pub(crate) fn parse(file: impl Read + Seek, path: &Path) -> crate::Result<Symbols> {
    open(file, path, |elf, refused| kernel(elf, refused, path))
}

fn kernel<F: Read + Seek>(elf: &Elf<'_, F>, refused: &dyn Fn() -> bool, path: &Path) -> Symbols {
    let mut symbols = Symbols::empty(Origin::Elf);
    for symbol in elf.symbols() {
        // Assembly has no type; what is not text is no function.
        let code = matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown | SymbolKind::Label);
        let in_text = symbol.section_index().is_some_and(|index| {
            elf.section_by_index(index).is_ok_and(|section| section.kind() == SectionKind::Text)
        });
        let Ok(name) = symbol.name() else {
            if refused() {
                symbols
                    .notes
                    .push(format!("{} has longer names than any kernel; the rest is left out", shown(path)));
                break;
            }
            continue;
        };
        if !code || !in_text || name.is_empty() || name.starts_with("__pfx_") {
            continue;
        }
        if !symbols.add(symbol.address(), symbol.size(), name, false) {
            symbols.notes.push(format!("{} has too many symbols; the rest is left out", shown(path)));
            break;
        }
    }
    let (mut parts, mut left, mut odd) = (Vec::new(), TEXT, BTreeSet::new());
    for section in elf.sections().filter(|section| section.kind() == SectionKind::Text && section.size() > 0)
    {
        if parts.len() >= PARTS {
            odd.insert("has more parts of text than any kernel; the rest is left out");
            break;
        }
        if section.size() > left {
            odd.insert("has too much text; some is left out");
            continue;
        }
        let Ok(bytes) = section.data() else {
            odd.insert("is cut off in its text");
            continue;
        };
        left -= section.size();
        parts.push((section.address(), bytes.to_vec()));
    }
    symbols.notes.extend(odd.into_iter().map(|what| format!("{} {what}", shown(path))));
    symbols.text = Some(Text::of(parts));
    symbols
}
