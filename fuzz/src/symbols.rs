//! `symbols`: a guest's symbol file, whatever it is: kallsyms, System.map or an ELF kernel, damaged anywhere.
//!
//! Oracles: what is named lies in what was read; a name is short and has nothing in it that moves a terminal's cursor; a file that names
//! nothing is an error.

use std::path::Path;

use arbitrary::Unstructured;
use ioplane_exits::{Kind, Symbols};

use crate::Signature;

const START: u64 = 0xffff_ffff_8100_0000;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let shape = input.arbitrary::<u8>().unwrap_or(0);
    let file = match shape % 3 {
        0 => input.take_rest().to_vec(),
        1 => lines(&mut input),
        _ => elf(&mut input),
    };
    match Symbols::parse(&file, Path::new("fuzz")) {
        Ok(mut symbols) => {
            assert!(!symbols.is_empty());
            signature.saw("symbols");
            signature.count(symbols.len() as u64);
            signature.count(symbols.notes.len() as u64);
            let kinds = [Kind::Port, Kind::Msr, Kind::Halt, Kind::Cpuid];
            let seen =
                (0..8u64).map(|n| (START + n * 0x11 + (u64::from(shape) << 21), kinds[n as usize % 4]));
            let fit = symbols.fit(seen);
            signature.saw(&format!("{:?}", fit.confidence));
            for address in [START, START + 0x11, START + fit.slide, 0, u64::MAX] {
                if let Some(place) = symbols.place(address) {
                    assert!(place.len() < 600 && !place.chars().any(char::is_control), "{place:?}");
                    signature.saw("named");
                }
            }
        }
        Err(error) => signature.saw(error.to_string().split(' ').nth(2).unwrap_or_default()),
    }
    signature.value()
}

/// Nearly right lines.
fn lines(input: &mut Unstructured<'_>) -> Vec<u8> {
    let mut text = Vec::new();
    while let Ok(shape) = input.arbitrary::<u8>() {
        let address = START + u64::from(input.arbitrary::<u16>().unwrap_or(0));
        let name = input.arbitrary::<&[u8]>().unwrap_or_default();
        match shape % 6 {
            0 => text.extend_from_slice(name),
            1 => text.extend(format!("{address:016x} D data").bytes()),
            2 => text.extend(format!("{:016x} t hidden", 0).bytes()),
            _ => {
                text.extend(format!("{address:016x} t f_").bytes());
                text.extend_from_slice(name);
            }
        }
        if shape & 0x40 == 0 {
            text.extend(b"\t[module]");
        }
        text.push(b'\n');
        if input.is_empty() {
            break;
        }
    }
    text
}

/// A file of one text section and its symbols, then a few bytes of it changed.
fn elf(input: &mut Unstructured<'_>) -> Vec<u8> {
    let mut file = vec![0u8; 64 + 5 * 64];
    let text: Vec<u8> = (0..64).map(|_| input.arbitrary().unwrap_or(0xee)).collect();
    let names = b"\0f\0g\0.text\0.symtab\0.strtab\0";
    let text_at = file.len();
    file.extend(&text);
    let symbols_at = file.len();
    file.extend([0; 24]);
    for (name, value) in [(1u32, 0u64), (3, 0x11)] {
        file.extend(name.to_le_bytes());
        file.extend([0x02, 0, 1, 0]);
        file.extend((START + value).to_le_bytes());
        file.extend(17u64.to_le_bytes());
    }
    let names_at = file.len();
    file.extend(names);
    file[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
    file[20..24].copy_from_slice(&1u32.to_le_bytes());
    file[40..48].copy_from_slice(&64u64.to_le_bytes());
    file[52..64].copy_from_slice(&[64, 0, 56, 0, 0, 0, 64, 0, 4, 0, 3, 0]);
    let sections = [
        [5u64, 1, 6, START, text_at as u64, 64, 0, 0, 16, 0],
        [11, 2, 0, 0, symbols_at as u64, 72, 3, 1, 8, 24],
        [19, 3, 0, 0, names_at as u64, names.len() as u64, 0, 0, 1, 0],
    ];
    for (number, fields) in sections.iter().enumerate() {
        let mut at = 64 * (number + 2);
        for (index, field) in fields.iter().enumerate() {
            let size = if matches!(index, 0 | 1 | 6 | 7) { 4 } else { 8 };
            file[at..at + size].copy_from_slice(&field.to_le_bytes()[..size]);
            at += size;
        }
    }
    while let (Ok(at), Ok(value)) = (input.arbitrary::<u16>(), input.arbitrary::<u8>()) {
        let at = usize::from(at) % file.len();
        file[at] = value;
        if input.is_empty() {
            break;
        }
    }
    file
}
