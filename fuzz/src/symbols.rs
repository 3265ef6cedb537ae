//! `symbols`: a guest's symbol file, whatever it is: kallsyms, System.map or an ELF kernel, damaged anywhere.
//!
//! Oracles: what is named lies in what was read; a name is short and has nothing in it that moves a terminal's cursor, nor has an error
//! or the whole report as text; no name in a page is markup; a file that names nothing is an error.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use arbitrary::Unstructured;
use ioplane_exits::{
    Detail, Devices, Event, Layout, Names, Profile, Reason, Report, Subject, Thread, WatchCounts,
};
use ioplane_kvmstat::Vm;
use ioplane_symbols::{Instruction, Symbols};

use crate::Signature;

const START: u64 = 0xffff_ffff_8100_0000;
/// A file may be called so, and a VM's device too.
const NAME: &[u8] = b"\x1b]0;x\x07\x1b[2J\n\xc2\x9b\xff<q>";
const DEVICE: &[u8] = br#"[{"devices": [{"bus": 0, "slot": 3, "function": 0, "qdev_id": "\u001b[2J\n\u009b<q>",
    "id": {"vendor": 1, "device": 2}, "regions": [{"bar": 0, "type": "io", "address": 1536, "size": 16}]}]}]"#;

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
    let path = Path::new(OsStr::from_bytes(NAME));
    match Symbols::parse(&file, path) {
        Ok(mut symbols) => {
            assert!(!symbols.is_empty());
            signature.saw("symbols");
            signature.count(symbols.len() as u64);
            signature.count(symbols.notes.len() as u64);
            let kinds = [Instruction::Port, Instruction::Msr, Instruction::Halt, Instruction::Cpuid];
            let seen =
                (0..8u64).map(|n| (START + n * 0x11 + (u64::from(shape) << 21), kinds[n as usize % 4]));
            let fit = symbols.fit(seen);
            signature.saw(&format!("{:?}", fit.confidence));
            for address in [START, START + 0x11, START + fit.slide, 0, u64::MAX] {
                if let Some(place) = symbols.function(address).map(|function| function.to_string()) {
                    assert!(place.len() < 600 && !place.chars().any(char::is_control), "{place:?}");
                    signature.saw("named");
                }
            }
            let mut notes = symbols.notes.clone();
            notes.extend([
                fit.to_string(),
                Layout::parse(&file, path).map_or_else(|error| error.to_string(), |_| String::new()),
            ]);
            report(&symbols, notes);
        }
        Err(error) => {
            let error = error.to_string();
            assert!(is_plain(&error), "{error:?}");
            signature.saw(error.split(' ').nth(2).unwrap_or_default());
        }
    }
    signature.value()
}

/// Lines, and nothing that a terminal obeys.
fn is_plain(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() && c != '\n')
}

/// A report of exits in the functions of the file.
fn report(symbols: &Symbols, notes: Vec<String>) {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for (number, rip) in (0u64..).zip([START, START + 0x11, START + 0x22]) {
        let detail = Detail::Port { port: 0x600, width: 1, write: true, queue: None };
        let reason = Reason::from_kvm(1, 30);
        profile.take(&mut thread, number, Event::Exit { reason, rip, vcpu: Some(0), detail });
    }
    profile.end(&mut thread);
    assert!(notes.iter().all(|note| is_plain(note) && !note.contains('\n')), "{notes:?}");
    let (name, program) = ("vm".into(), "p".into());
    let vm = Vm { pid: 1, name, program, vcpus: 1, vm_fds: Vec::new(), command: Vec::new() };
    let function = |rip: u64| symbols.function(rip);
    let pci = Layout::parse(DEVICE, Path::new("fuzz")).expect("a layout");
    let names = Names {
        function: Some(&function),
        devices: Devices { pci, ..Devices::default() },
        notes,
        ..Names::default()
    };
    let subject = Subject { vm: &vm, time: Duration::from_secs(1), seen: WatchCounts::default(), sample: 1 };
    let report = Report::new(subject, &profile, None, &names);
    let text = report.to_string();
    assert!(text.contains("PCI 0001:0002") && is_plain(&text), "{text:?}");
    assert!(!report.html().contains("<q>") && !report.svg().contains("<q>"), "markup");
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
