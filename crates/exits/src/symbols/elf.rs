//! An unstripped ELF kernel: its symbols, and the bytes of its text, which say where instructions are that can exit.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use object::read::ReadCache;
use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};

use super::{Origin, Symbols};
use crate::error::{ExitsError, Result};

/// So many bytes of text are kept.
const TEXT: u64 = 1 << 28;

/// The kernel's instructions, as linked.
#[derive(Debug, Default)]
pub(super) struct Text {
    parts: Vec<(u64, Vec<u8>)>,
}

impl Text {
    /// The bytes from an address on; empty if there are none.
    pub(super) fn at(&self, address: u64) -> &[u8] {
        let part = self.parts.iter().find(|(start, bytes)| {
            address.checked_sub(*start).is_some_and(|offset| offset < bytes.len() as u64)
        });
        part.map_or(&[], |(start, bytes)| &bytes[(address - start) as usize..])
    }

    #[cfg(test)]
    pub(super) fn of(parts: Vec<(u64, Vec<u8>)>) -> Text {
        Text { parts }
    }
}

pub(super) fn read(path: &Path) -> Result<Symbols> {
    parse(File::open(path).map_err(ExitsError::file(path))?, path)
}

pub(super) fn parse(file: impl Read + Seek, path: &Path) -> Result<Symbols> {
    let malformed = |what: String| ExitsError::Malformed { path: path.into(), what };
    // Reads what is asked for, not the gigabyte of debugging information.
    let cache = ReadCache::new(file);
    let elf =
        object::File::parse(&cache).map_err(|error| malformed(format!("is a damaged ELF file: {error}")))?;
    let mut symbols = Symbols::empty(Origin::Elf);
    for symbol in elf.symbols() {
        // Assembly has no type; what is not text is no function.
        let code = matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown | SymbolKind::Label);
        let in_text = symbol.section_index().is_some_and(|index| {
            elf.section_by_index(index).is_ok_and(|section| section.kind() == SectionKind::Text)
        });
        let Ok(name) = symbol.name() else { continue };
        if !code || !in_text || name.is_empty() || name.starts_with("__pfx_") {
            continue;
        }
        if !symbols.add(symbol.address(), symbol.size(), name, false) {
            symbols.notes.push(format!("{} has too many symbols; the rest is left out", path.display()));
            break;
        }
    }
    let (mut text, mut left) = (Text::default(), TEXT);
    for section in elf.sections().filter(|section| section.kind() == SectionKind::Text) {
        if section.size() > left {
            symbols.notes.push(format!("{} has too much text; some is left out", path.display()));
            continue;
        }
        let Ok(bytes) = section.data() else {
            symbols.notes.push(format!("{} is cut off in its text", path.display()));
            continue;
        };
        left -= section.size();
        text.parts.push((section.address(), bytes.to_vec()));
    }
    symbols.text = Some(text);
    Ok(symbols)
}
