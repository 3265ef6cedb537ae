//! `ADDRESS TYPE NAME [MODULE]`, a line each: `/proc/kallsyms` and `System.map`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::Result;
use crate::{Origin, Symbols};
use ioplane_plain::{FileError, shown};

/// Ten times what Linux has.
const BYTES: u64 = 1 << 28;
/// Where Linux on x86-64 is linked to begin.
const LINKED: u64 = 0xffff_ffff_8100_0000;
/// A line is not longer.
const LINE: u64 = 4096;

pub(crate) fn read(path: &Path) -> Result<Symbols> {
    let file = File::open(path).map_err(FileError::of(path))?;
    parse(&mut BufReader::new(file.take(BYTES)), path)
}

fn malformed(path: &Path, what: &str) -> FileError {
    FileError::malformed(path, what)
}

pub(crate) fn parse(input: &mut impl BufRead, path: &Path) -> Result<Symbols> {
    let mut symbols = Symbols::empty(Origin::Map);
    let (mut lines, mut odd, mut hidden, mut bytes) = (0u64, 0u64, 0u64, 0u64);
    let mut line = Vec::new();
    loop {
        line.clear();
        let length = input.take(LINE).read_until(b'\n', &mut line).map_err(FileError::of(path))?;
        if length == 0 {
            break;
        }
        (lines, bytes) = (lines + 1, bytes + length as u64);
        if line.last() != Some(&b'\n') {
            // The end of what was cut off is worse than nothing: half a name, half an address.
            symbols.notes.push(format!("{} is cut off in line {lines}", shown(path)));
            break;
        }
        let text = String::from_utf8_lossy(&line);
        let mut words = text.split_ascii_whitespace();
        let (address, kind, name) = (words.next(), words.next(), words.next());
        let address = address.and_then(|word| u64::from_str_radix(word, 16).ok());
        let (Some(address), Some(kind), Some(name)) = (address, kind, name) else {
            odd += 1;
            if odd > 20 + lines / 10 {
                return Err(malformed(path, "is neither /proc/kallsyms nor a System.map"));
            }
            continue;
        };
        if !matches!(kind, "t" | "T" | "w" | "W" | "i") {
            continue;
        }
        if address == 0 {
            hidden += 1;
            continue;
        }
        if matches!(name, "_text" | "_stext") && address & !0x1000 != LINKED {
            // It has moved already.
            symbols.origin = Origin::Kallsyms;
        }
        let module = words.next();
        if module.is_some() {
            symbols.origin = Origin::Kallsyms;
        }
        // The build's own marks within functions.
        if name.starts_with("__pfx_") || name.starts_with("__cfi_") {
            continue;
        }
        let full = module.map(|module| format!("{name} {module}"));
        if !symbols.add(address, 0, full.as_deref().unwrap_or(name), module.is_some()) {
            symbols.notes.push(format!("{} has too many symbols; the rest is left out", shown(path)));
            break;
        }
    }
    if symbols.symbols.is_empty() && hidden > 0 {
        let what = "has no addresses: the guest hides them (kptr_restrict); read /proc/kallsyms as root in the guest";
        return Err(malformed(path, what));
    }
    if bytes >= BYTES {
        symbols.notes.push(format!("{} is read up to {BYTES} bytes only", shown(path)));
    }
    if odd > 0 {
        symbols.notes.push(format!("{}: {odd} of {lines} lines are not understood", shown(path)));
    }
    Ok(symbols)
}
