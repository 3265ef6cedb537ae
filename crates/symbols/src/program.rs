//! Functions of a program or a library of this host: from the symbols that its file has, or that a debug file of the same build has.
//!
//! A stripped file names only what it exports. Where its other functions begin its unwind table still tells.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};

use crate::Result;
use crate::elf::{self, Elf};
use crate::{Origin, SYMBOLS, Symbols};

/// Of a program so many functions are kept, and so many bytes of their names: a VMM chooses what it maps.
const PROGRAM_SYMBOLS: usize = 500_000;
const PROGRAM_NAMES: usize = 64 << 20;
/// So many segments are looked at. A program has two with code at most.
const SEGMENTS: usize = 64;
/// No build has a longer number.
const BUILD_ID: usize = 64;
/// Header of `.eh_frame_hdr` whose table can be searched, as every linker writes it: version 1, an offset from here, a number, and pairs of offsets from the section's
/// beginning (Linux Standard Base 5.0, 10.6.2).
const UNWIND: [u8; 4] = [1, 0x1b, 0x03, 0x3b];

/// The functions of one file.
#[derive(Debug)]
pub struct ProgramSymbols {
    symbols: Symbols,
    /// Where in the file, how long, where linked.
    segments: Vec<(u64, u64, u64)>,
    /// Where functions begin, as linked, in order.
    starts: Vec<u64>,
    build_id: Option<Vec<u8>>,
    /// It has names of functions that it does not export.
    whole: bool,
}

/// What is known of an instruction. Addresses are as linked, as `nm` and `addr2line` have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramFunction<'a> {
    /// The name of its function, as the file has it. Not plain.
    Named(&'a str),
    /// Where its function begins; the name is not known.
    Begins(u64),
    /// Its own address only.
    At(u64),
}

impl ProgramSymbols {
    /// Reads an ELF file; `path` is for messages.
    pub fn read(file: File, path: &Path) -> Result<ProgramSymbols> {
        ProgramSymbols::parse(file, path)
    }

    fn parse(file: impl Read + Seek, path: &Path) -> Result<ProgramSymbols> {
        elf::open(file, path, |elf, _| ProgramSymbols::of(elf))
    }

    fn of<F: Read + Seek>(elf: &Elf<'_, F>) -> ProgramSymbols {
        let mut symbols = Symbols::empty(Origin::Elf);
        let whole = elf.symbols().next().is_some();
        let all = whole.then(|| elf.symbols()).into_iter().flatten();
        let exported = (!whole).then(|| elf.dynamic_symbols()).into_iter().flatten();
        for symbol in all.chain(exported) {
            let defined = symbol.kind() == SymbolKind::Text && symbol.is_definition() && symbol.size() > 0;
            let Some(name) = symbol.name().ok().filter(|name| defined && !name.is_empty()) else { continue };
            let full = symbols.symbols.len() >= PROGRAM_SYMBOLS || symbols.names.len() >= PROGRAM_NAMES;
            if full || !symbols.add(symbol.address(), symbol.size(), name, false) {
                break;
            }
        }
        let segments = elf.segments().take(SEGMENTS).map(|segment| {
            let (offset, size) = segment.file_range();
            (offset, size, segment.address())
        });
        let build_id = elf.build_id().ok().flatten().filter(|id| id.len() <= BUILD_ID).map(<[u8]>::to_vec);
        let mut program =
            ProgramSymbols { symbols, segments: segments.collect(), starts: starts(elf), build_id, whole };
        program.sort();
        program
    }

    /// Of several names for one place the plainest is taken: `ioctl`, not `__GI___ioctl`.
    fn sort(&mut self) {
        let Symbols { symbols, names, .. } = &mut self.symbols;
        let name = |(start, length): (u32, u32)| &names[start as usize..(start + length) as usize];
        symbols.sort_by_cached_key(|symbol| {
            let name = name(symbol.name);
            let bars = name.len() - name.trim_start_matches('_').len();
            (symbol.address, bars, name.len(), name.to_owned())
        });
        symbols.dedup_by_key(|symbol| symbol.address);
    }

    /// The file with the rest of the names, below a directory of debug files, if this one has them not.
    pub fn debug_file(&self) -> Option<String> {
        let id = self.build_id.as_ref().filter(|id| !self.whole && id.len() > 1)?;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Some(format!(".build-id/{}/{}.debug", hex(&id[..1]), hex(&id[1..])))
    }

    /// Takes the names of a debug file, if it is one of the same build.
    pub fn take_names(&mut self, debug: ProgramSymbols) {
        if debug.whole && debug.build_id == self.build_id {
            (self.symbols, self.whole) = (debug.symbols, true);
        }
    }

    /// Whether the file names only what it exports.
    pub fn is_stripped(&self) -> bool {
        !self.whole
    }

    /// The function at so many bytes into the file; nothing where the file has no code there.
    pub fn function(&self, offset: u64) -> Option<ProgramFunction<'_>> {
        let inside = |(start, size, _): &&(u64, u64, u64)| offset >= *start && offset - start < *size;
        let (start, _, address) = self.segments.iter().find(inside)?;
        let at = address.checked_add(offset - start)?;
        if let Some(name) = self.symbols.covering(at) {
            return Some(ProgramFunction::Named(name));
        }
        let next = self.starts.partition_point(|start| *start <= at);
        let begins = next.checked_sub(1).map(|last| ProgramFunction::Begins(self.starts[last]));
        Some(begins.unwrap_or(ProgramFunction::At(at)))
    }
}

/// Of the unwind table's index; empty where there is none that is understood.
fn starts<F: Read + Seek>(elf: &Elf<'_, F>) -> Vec<u64> {
    let Some(section) = elf.section_by_name(".eh_frame_hdr") else { return Vec::new() };
    let (base, bytes) = (section.address(), section.data().unwrap_or_default());
    let Some((UNWIND, table)) =
        bytes.split_at_checked(12).and_then(|(head, table)| Some((*head.first_chunk()?, table)))
    else {
        return Vec::new();
    };
    let entries = table.chunks_exact(8).take(SYMBOLS).filter_map(|entry| entry.first_chunk().copied());
    let mut starts: Vec<u64> =
        entries.map(|start| base.wrapping_add_signed(i32::from_le_bytes(start).into())).collect();
    starts.sort_unstable();
    starts
}

#[cfg(test)]
mod tests {
    use ioplane_plain::ProcMapping;
    use proptest::prelude::*;

    use super::*;

    #[inline(never)]
    fn found_by_its_symbol(number: u64) -> u64 {
        std::hint::black_box(number) * 3
    }

    /// The mapping that an address of this process is in: where in the file the address is, and which file.
    fn mapped(address: usize) -> (u64, String) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut mappings = maps.lines().filter_map(ProcMapping::parse);
        let mapping = mappings.find(|mapping| mapping.has(address as u64)).unwrap();
        (address as u64 - mapping.start + mapping.offset, mapping.path.to_owned())
    }

    fn of(path: &str) -> ProgramSymbols {
        ProgramSymbols::read(File::open(path).unwrap(), Path::new(path)).unwrap()
    }

    #[test]
    fn this_program_has_names() {
        assert_eq!(found_by_its_symbol(2), 6);
        let (offset, path) = mapped(found_by_its_symbol as fn(u64) -> u64 as usize);
        let program = of(&path);
        let Some(ProgramFunction::Named(name)) = program.function(offset) else { panic!("{offset:#x}") };
        assert!(name.contains("found_by_its_symbol"), "{name}");
        assert_eq!((program.is_stripped(), program.debug_file()), (false, None));
        assert_eq!(program.function(u64::MAX), None);
        // The same place by the unwind table, which names nothing.
        let unnamed = ProgramSymbols { symbols: Symbols::empty(Origin::Elf), ..of(&path) };
        let begins = unnamed.function(offset).unwrap();
        assert!(matches!(begins, ProgramFunction::Begins(_)), "{begins:?}");
        assert_eq!(unnamed.function(offset + 1), Some(begins));
    }

    /// Debian's libc is stripped, and its debug file not installed on most machines.
    #[test]
    fn a_library_names_what_it_exports() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let Some(libc) =
            maps.lines().filter_map(ProcMapping::parse).find(|mapping| mapping.path.contains("libc.so"))
        else {
            println!("SKIPPED (cannot be had here): no libc.so is mapped");
            return;
        };
        let program = of(libc.path);
        assert!(
            program.symbols.symbols.iter().any(|symbol| program.symbols.name_of(symbol) == Some("ioctl"))
        );
        if program.is_stripped() {
            let file = program.debug_file().unwrap();
            assert!(file.starts_with(".build-id/") && file.ends_with(".debug"), "{file}");
        }
    }

    fn made(symbols: &[(u64, u64, &str)], starts: &[u64]) -> ProgramSymbols {
        let mut program = ProgramSymbols {
            symbols: Symbols::empty(Origin::Elf),
            segments: vec![(0x1000, 0x1000, 0x40_1000)],
            starts: starts.to_vec(),
            build_id: Some(vec![0xab, 0xcd, 0x01]),
            whole: false,
        };
        for (address, size, name) in symbols {
            assert!(program.symbols.add(*address, *size, name, false));
        }
        program.sort();
        program
    }

    #[test]
    fn a_name_reaches_as_far_as_its_size() {
        use ProgramFunction::{At, Begins, Named};
        let symbols = [(0x40_1100, 0x10, "__GI_read"), (0x40_1100, 0x10, "read"), (0x40_1200, 0, "label")];
        let program = made(&symbols, &[0x40_1100, 0x40_1180]);
        for (offset, found) in [
            (0x1100, Some(Named("read"))),
            (0x110f, Some(Named("read"))),
            (0x1110, Some(Begins(0x40_1100))),
            (0x1200, Some(Begins(0x40_1180))),
            (0x10ff, Some(At(0x40_10ff))),
            (0xfff, None),
            (0x2000, None),
        ] {
            assert_eq!(program.function(offset), found, "{offset:#x}");
        }
    }

    #[test]
    fn a_debug_file_of_another_build_names_nothing() {
        let mut program = made(&[], &[]);
        assert_eq!(program.debug_file().unwrap(), ".build-id/ab/cd01.debug");
        let debug = |id: u8| ProgramSymbols {
            whole: true,
            build_id: Some(vec![0xab, 0xcd, id]),
            ..made(&[(0x40_1000, 8, "local")], &[])
        };
        program.take_names(debug(2));
        assert_eq!(program.function(0x1000), Some(ProgramFunction::At(0x40_1000)));
        program.take_names(debug(1));
        assert_eq!(program.function(0x1000), Some(ProgramFunction::Named("local")));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_program_is_survived(mut bytes in proptest::collection::vec(any::<u8>(), 64..4000)) {
            bytes[..4].copy_from_slice(b"\x7fELF");
            bytes[4..8].copy_from_slice(&[2, 1, 1, 0]);
            bytes[52..64].copy_from_slice(&[64, 0, 56, 0, 3, 0, 64, 0, 9, 0, 1, 0]);
            if let Ok(program) = ProgramSymbols::parse(std::io::Cursor::new(bytes), Path::new("test")) {
                let _ = program.function(64);
            }
        }
    }
}
