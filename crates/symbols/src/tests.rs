//! Symbols of kernels that are written down here.

use proptest::prelude::*;

use super::*;
use crate::Instruction;

fn map(text: &str) -> Result<Symbols> {
    let mut symbols = map::parse(&mut text.as_bytes(), Path::new("test"))?;
    symbols.symbols.sort_by_key(|symbol| symbol.address);
    Ok(symbols)
}

fn shown(symbols: &Symbols, address: u64) -> String {
    symbols.function(address).unwrap().to_string()
}

#[test]
fn names_and_offsets() {
    let symbols =
        map("ffffffff81000000 T _stext\nffffffff81000010 t acpi_pm_read\nffffffff81000040 D data\n\
                       ffffffffc0000000 t probe\t[planted]\n")
        .unwrap();
    assert_eq!(shown(&symbols, 0xffff_ffff_8100_0010), "acpi_pm_read");
    assert_eq!(shown(&symbols, 0xffff_ffff_8100_001c), "acpi_pm_read+0xc");
    assert_eq!(shown(&symbols, 0xffff_ffff_c000_0004), "probe [planted]+0x4");
    assert_eq!(symbols.function(0xffff_ffff_80ff_ffff), None);
    assert_eq!(symbols.function(0xffff_ffff_9100_0010), None);
    assert_eq!(symbols.origin, Origin::Kallsyms);
}

#[test]
fn damaged_files() {
    let cut = map("ffffffff81000000 T a\nffffffff8100").unwrap();
    assert_eq!((cut.len(), cut.notes.len()), (1, 1));
    let hidden = map("0000000000000000 T a\n0000000000000000 T b\n").unwrap_err();
    assert!(hidden.to_string().contains("kptr_restrict"), "{hidden}");
    let other = map(&"this is a letter\n".repeat(100)).unwrap_err();
    assert!(other.to_string().contains("neither"), "{other}");
    let endless = map(&format!("ffffffff81000000 T {}\n", "x".repeat(100_000))).unwrap();
    assert!(endless.notes[0].contains("cut off"));
}

/// A kernel of random bytes with a few instructions that exit.
fn kernel(seed: u64) -> (Symbols, Vec<(u64, Instruction)>) {
    let start = 0xffff_ffff_8100_0000_u64;
    let mut random = seed | 1;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut bytes: Vec<u8> = (0..8 << 20).map(|_| next() as u8).collect();
    let mut seen = Vec::new();
    for number in 0..12 {
        let at = next() as usize % (bytes.len() - 16);
        let (code, kind): (&[u8], Instruction) = match number % 4 {
            0 => (&[0xed], Instruction::Port),
            1 => (&[0x0f, 0x30], Instruction::Msr),
            2 => (&[0xf4], Instruction::Halt),
            _ => (&[0x66, 0xef], Instruction::Port),
        };
        bytes[at..at + code.len()].copy_from_slice(code);
        seen.push((start + at as u64, kind));
    }
    let mut symbols = Symbols::empty(Origin::Elf);
    for (number, at) in (0..bytes.len() as u64).step_by(4096).enumerate() {
        symbols.add(start + at, 4096, &format!("function_{number}"), false);
    }
    symbols.text = Some(Text::of(vec![(start, bytes)]));
    (symbols, seen)
}

#[test]
fn the_offset_is_found_and_the_wrong_kernel_is_not() {
    for seed in 1..6 {
        let (mut symbols, seen) = kernel(seed * 77_777);
        let slide = (seed * 37 % 400) << 21;
        let fit = symbols.fit(seen.iter().map(|(rip, kind)| (rip + slide, *kind)));
        assert_eq!((fit.slide, fit.confidence), (slide, Confidence::High), "{fit}");
        let function = symbols.function(seen[0].0 + slide).unwrap();
        assert_eq!(Some(function.name), symbols_at(&symbols, seen[0].0));
        let (mut other, _) = kernel(seed * 99_991);
        let fit = other.fit(seen.iter().map(|(rip, kind)| (rip + slide, *kind)));
        assert!(fit.confidence <= Confidence::Low, "{fit}");
    }
}

fn symbols_at(symbols: &Symbols, linked: u64) -> Option<String> {
    Some(format!("function_{}", (linked - symbols.symbols.first()?.address) / 4096))
}

#[test]
fn nothing_seen_is_nothing_found() {
    let (mut symbols, _) = kernel(5);
    assert_eq!(symbols.fit([]).confidence, Confidence::None);
    assert_eq!(symbols.fit([(0x1234, Instruction::Port)]).seen, 0);
}

#[test]
fn exits_of_modules_only_are_enough() {
    let text = "ffffffff93c00000 T _stext\nffffffffc0518000 t hot\t[planted]\n";
    let mut symbols = map(text).unwrap();
    let fit = symbols.fit([(0xffff_ffff_c051_81b9, Instruction::Port)]);
    assert_eq!((fit.seen, fit.matched, fit.confidence), (1, 1, Confidence::Low), "{fit}");
    assert!(fit.to_string().contains("moved by 0x0, not very sure (1 of 1 addresses fit, none in"), "{fit}");
    assert_eq!(symbols.fit([]).confidence, Confidence::Low);
    assert_eq!(shown(&symbols, 0xffff_ffff_c051_81b9), "hot [planted]+0x1b9");
}

/// Functions of Linux of 64 bytes each, in this order, behind the same `_text`; then a module.
fn running(functions: &[&str]) -> Symbols {
    let mut text = "ffffffff81000000 T _text\n".to_owned();
    for (number, name) in functions.iter().enumerate() {
        text += &format!("{:x} t {name}\n", 0xffff_ffff_8100_1000_u64 + number as u64 * 64);
    }
    map(&(text + "ffffffffc0000000 t probe\t[planted]\n")).unwrap()
}

/// KASLR is off, and the guest was updated: its old kallsyms has a function at each address, and they are wrong ones.
#[test]
fn names_of_the_kernel_before_an_update_are_not_sure() {
    let now = [
        "acpi_pm_read",
        "schedule",
        "native_write_msr",
        "vfs_read",
        "default_idle",
        "iowrite16",
        "do_fork",
        "memcpy",
    ];
    let before: Vec<&str> = now.iter().cycle().skip(1).take(now.len()).copied().collect();
    let seen =
        [(0, Instruction::Port), (2, Instruction::Msr), (4, Instruction::Halt), (5, Instruction::Port)]
            .map(|(number, kind)| (0xffff_ffff_8100_1000_u64 + number * 64 + 8, kind));
    let (mut right, mut stale) = (running(&now), running(&before));
    assert_eq!((right.origin, stale.origin), (Origin::Kallsyms, Origin::Kallsyms));
    let fit = right.fit(seen);
    assert_eq!((fit.matched, fit.known, fit.confidence), (4, Some(4), Confidence::High), "{fit}");
    assert!(fit.to_string().contains("sure (4 of 4 addresses fit, 4 in functions"), "{fit}");
    let fit = stale.fit(seen);
    assert_eq!((fit.matched, fit.confidence), (4, Confidence::Low), "{fit}");
    assert!(fit.to_string().contains("not very sure"), "{fit}");
    // One that is right may be chance, two of two are not quite.
    assert_eq!(right.fit(seen[..1].iter().copied()).confidence, Confidence::Low);
    assert_eq!(right.fit(seen[..2].iter().copied()).confidence, Confidence::Fair);
    // The same instruction again says nothing new.
    assert_eq!(right.fit([seen[0]; 50]).confidence, Confidence::Low);
}

/// An ELF file's beginning: one table of sections, and where it says so, their number in the first of them.
fn elf_of(sections: &[[u64; 10]]) -> Vec<u8> {
    let mut file = vec![0u8; 64];
    file[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
    file[20..24].copy_from_slice(&1u32.to_le_bytes());
    file[40..48].copy_from_slice(&64u64.to_le_bytes());
    let number = u16::try_from(sections.len()).unwrap();
    file[52..60].copy_from_slice(&[64, 0, 56, 0, 0, 0, 64, 0]);
    file[60..62].copy_from_slice(&number.to_le_bytes());
    file[62..64].copy_from_slice(&(number - 1).to_le_bytes());
    for fields in sections {
        for (index, field) in fields.iter().enumerate() {
            let size = if matches!(index, 0 | 1 | 6 | 7) { 4 } else { 8 };
            file.extend(&field.to_le_bytes()[..size]);
        }
    }
    file
}

/// Nothing of it is on the disk, and it would fill the memory.
#[test]
fn a_sparse_file_does_not_fill_the_memory() {
    let huge = 30u64 << 30;
    for (symbols, names) in [(huge / 24 * 24, 8), (48, huge)] {
        let bytes = elf_of(&[
            [0; 10],
            [0, 1, 6, 0xffff_ffff_8100_0000, 4096, 64, 0, 0, 16, 0],
            [0, 2, 0, 0, 8192, symbols, 3, 1, 8, 24],
            [0, 3, 0, 0, 16384, names, 0, 0, 1, 0],
        ]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file.as_file().set_len(huge + 65536).unwrap();
        let error = Symbols::read(file.path()).unwrap_err().to_string();
        // Names are read one by one: a long table of them harms nobody.
        let wanted = if symbols > 48 { "no kernel has a table of" } else { "names no function" };
        assert!(error.contains(wanted), "{error}");
    }
}

/// Millions of names that never end, or that share their letters, would be read or kept for each symbol.
#[test]
fn names_without_end_are_given_up() {
    let (number, names) = (300_000u64, 2 << 20);
    let mut bytes = elf_of(&[
        [0; 10],
        [0, 1, 6, 0xffff_ffff_8100_0000, 320, 64, 0, 0, 16, 0],
        [0, 2, 0, 0, 320, 24 * number, 3, 1, 8, 24],
        [0, 3, 0, 0, 320 + 24 * number, names, 0, 0, 1, 0],
    ]);
    for symbol in 0..number as u32 {
        bytes.extend(symbol.to_le_bytes());
        bytes.extend([0x02, 0, 1, 0]);
        bytes.extend((0xffff_ffff_8100_0000 + u64::from(symbol)).to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    bytes.resize(bytes.len() + names as usize, b'x');
    let error = Symbols::parse(&bytes, Path::new("test")).unwrap_err().to_string();
    assert!(error.contains("names no function"), "{error}");
    // The first symbol is none; the second has a name that ends, then come the others.
    let second = 320 + 24 * number as usize + 4;
    bytes[second] = 0;
    let symbols = Symbols::parse(&bytes, Path::new("test")).unwrap();
    assert!(symbols.notes.iter().any(|note| note.contains("longer names")), "{:?}", symbols.notes);
}

/// Each candidate offset looks up each address: that must not be a walk over all sections.
#[test]
fn many_sections_are_cut_short() {
    let start = 0xffff_ffff_8100_0000_u64;
    let mut sections = vec![[0; 10]];
    // The last comes first.
    sections.extend((0..60_000).rev().map(|n| [0, 1, 6, start + n * 0x1000, 16, 1, 0, 0, 1, 0]));
    let symbols = 64 * (sections.len() as u64 + 3);
    sections.push([0, 2, 0, 0, symbols, 48, sections.len() as u64 + 1, 1, 8, 24]);
    sections.push([0, 3, 0, 0, symbols + 48, 4, 0, 0, 1, 0]);
    let mut bytes = elf_of(&sections);
    assert_eq!(bytes.len() as u64, 64 * (sections.len() as u64 + 1));
    bytes.resize(symbols as usize, 0);
    bytes.extend([0; 24]);
    bytes.extend([1, 0, 0, 0, 0x02, 0, 1, 0]);
    bytes.extend(start.to_le_bytes());
    bytes.extend(0x4000_0000u64.to_le_bytes());
    bytes.extend(b"\0f\0\0");
    let mut symbols = Symbols::parse(&bytes, Path::new("test")).unwrap();
    assert!(symbols.notes.iter().any(|note| note.contains("more parts of text")), "{:?}", symbols.notes);
    assert!(symbols.text.as_ref().is_some_and(|text| text.len() <= elf::PARTS));
    let fit = symbols.fit((0..1000).map(|n| (start + n * 0x1000, Instruction::Port)));
    assert!(fit.confidence <= Confidence::Low, "{fit}");
}

#[test]
fn text_is_found_in_any_order() {
    let text = Text::of(vec![(0x300, vec![7; 4]), (0x100, vec![1, 2]), (0x100, vec![1]), (0x200, vec![])]);
    assert_eq!((text.at(0x101), text.at(0x303)), (&[2u8][..], &[7u8][..]));
    assert!([0, 0xff, 0x102, 0x200, 0x304].iter().all(|address| text.at(*address).is_empty()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..4000)) {
        let _ = map::parse(&mut bytes.as_slice(), Path::new("test"));
    }

    #[test]
    fn any_elf_is_survived(mut bytes in proptest::collection::vec(any::<u8>(), 64..4000), sane in any::<bool>()) {
        bytes[..4].copy_from_slice(b"\x7fELF");
        if sane {
            bytes[4..8].copy_from_slice(&[2, 1, 1, 0]);
            bytes[52..64].copy_from_slice(&[64, 0, 56, 0, 3, 0, 64, 0, 9, 0, 1, 0]);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let _ = Symbols::read(file.path());
    }
}
