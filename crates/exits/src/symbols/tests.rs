//! Symbols of kernels that are written down here.

use proptest::prelude::*;

use super::*;
use crate::reason::Kind;

fn map(text: &str) -> Result<Symbols> {
    let mut symbols = map::parse(&mut text.as_bytes(), Path::new("test"))?;
    symbols.symbols.sort_by_key(|symbol| symbol.address);
    Ok(symbols)
}

#[test]
fn names_and_offsets() {
    let symbols =
        map("ffffffff81000000 T _stext\nffffffff81000010 t acpi_pm_read\nffffffff81000040 D data\n\
                       ffffffffc0000000 t probe\t[planted]\n")
        .unwrap();
    assert_eq!(symbols.place(0xffff_ffff_8100_0010).as_deref(), Some("acpi_pm_read"));
    assert_eq!(symbols.place(0xffff_ffff_8100_001c).as_deref(), Some("acpi_pm_read+0xc"));
    assert_eq!(symbols.place(0xffff_ffff_c000_0004).as_deref(), Some("probe [planted]+0x4"));
    assert_eq!(symbols.place(0xffff_ffff_80ff_ffff), None);
    assert_eq!(symbols.place(0xffff_ffff_9100_0010), None);
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
fn kernel(seed: u64) -> (Symbols, Vec<(u64, Kind)>) {
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
        let (code, kind): (&[u8], Kind) = match number % 4 {
            0 => (&[0xed], Kind::Port),
            1 => (&[0x0f, 0x30], Kind::Msr),
            2 => (&[0xf4], Kind::Halt),
            _ => (&[0x66, 0xef], Kind::Port),
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
        let name = symbols.place(seen[0].0 + slide).unwrap();
        assert_eq!(name.split('+').next(), symbols_at(&symbols, seen[0].0).as_deref());
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
    assert_eq!(symbols.fit([(0x1234, Kind::Port)]).seen, 0);
}

#[test]
fn exits_of_modules_only_are_enough() {
    let text = "ffffffff93c00000 T _stext\nffffffffc0518000 t hot\t[planted]\n";
    let mut symbols = map(text).unwrap();
    let fit = symbols.fit([(0xffff_ffff_c051_81b9, Kind::Port)]);
    assert_eq!((fit.seen, fit.matched, fit.confidence), (1, 1, Confidence::High), "{fit}");
    assert_eq!(symbols.fit([]).confidence, Confidence::Low);
    assert_eq!(symbols.place(0xffff_ffff_c051_81b9).as_deref(), Some("hot [planted]+0x1b9"));
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
