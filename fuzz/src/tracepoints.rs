//! `tracepoints`: what a kernel says of its tracepoints and what comes from them (format files, pages of tracefs, records), and what a VMM
//! says of its devices.
//!
//! Oracles: every exit is counted once, whatever comes between; none is timed for which no entry has come since; a report of it all, whole
//! or of a sample, can be written as text, JSON, HTML and SVG, and no name in the page is markup.

use std::path::Path;
use std::time::Duration;

use arbitrary::Unstructured;
use ioplane_exits::{
    Decoder, Devices, Event, Format, Layout, Names, Page, Profile, Report, Subject, Thread, WatchCounts,
};
use ioplane_kvmstat::Vm;

use crate::Signature;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let mut input = Unstructured::new(data);
    let decoder = decoder(&mut input, &mut signature);
    let page = Page::parse(HEADER).expect("a header of Linux");
    let (mut profile, mut thread, mut exits) = (Profile::default(), Thread::default(), 0u64);
    // Exits that have an entry after them, and nothing that ends them before.
    let (mut whole, mut open) = (0u64, false);
    let layout = layout(&mut input, &mut signature);
    while let Ok(shape) = input.arbitrary::<u8>() {
        let bytes = input.arbitrary::<&[u8]>().unwrap_or_default();
        let mut take = |at: u64, record: &[u8]| {
            let Some(event) = decoder.decode(record) else { return };
            exits += u64::from(matches!(event, Event::Exit { .. }));
            match event {
                Event::Exit { .. } => open = true,
                Event::Entry { .. } => whole += u64::from(std::mem::take(&mut open)),
                _ => {}
            }
            profile.take(&mut thread, at, event);
        };
        match shape % 4 {
            0 => {
                page.records(bytes, &mut take);
            }
            1 => {
                let mut framed = 7u64.to_le_bytes().to_vec();
                framed.extend((bytes.len() as u64).to_le_bytes());
                framed.extend_from_slice(bytes);
                page.records(&framed, &mut take);
            }
            _ => {
                let mut record = vec![10 + shape % 7, 0, 0, 0, 1, 0, 0, 0];
                record.extend_from_slice(bytes);
                record.resize(48, shape);
                take(u64::from(shape) * 100, &record);
            }
        }
        if shape & 0x40 != 0 {
            profile.lost(&mut thread, 1);
            open = false;
        }
        if input.is_empty() {
            break;
        }
    }
    profile.end(&mut thread);
    if !profile.is_by_consequence() {
        assert_eq!(profile.total().count, exits, "exits are missing or counted twice");
    }
    assert!(profile.total().timed <= whole, "an exit without an end is timed");
    let sample = 1 + u64::from(data.first().copied().unwrap_or(0) % 3) * 50;
    report(&profile, layout, sample, &mut signature);
    signature.value()
}

fn report(profile: &Profile, pci: Layout, sample: u64, signature: &mut Signature) {
    let vm = Vm {
        pid: 1,
        name: "<q>&\"".into(),
        program: "p".into(),
        vcpus: 1,
        vm_fds: Vec::new(),
        command: Vec::new(),
    };
    let function = |rip: u64| Some(format!("<script>{rip:x}").into());
    let names = Names {
        function: Some(&function),
        devices: Devices { pci, ..Devices::default() },
        ..Names::default()
    };
    let recorded = (Duration::from_secs(1).div_f64(sample as f64), 1);
    let seen = WatchCounts { counted: profile.total().count, recorded, ..WatchCounts::default() };
    let subject = Subject { vm: &vm, time: Duration::from_secs(1), seen, sample };
    let report = Report::new(subject, profile, None, &names);
    signature.count(report.exits);
    signature.count(report.sites.len() as u64);
    signature.count(report.findings.len() as u64);
    report.findings.iter().for_each(|finding| signature.saw(&finding.id));
    let pages = [report.to_string(), report.html(), report.svg()];
    assert!(pages[1..].iter().all(|page| !page.contains("<script>f") && !page.contains("<q>")), "markup");
}

fn decoder(input: &mut Unstructured<'_>, signature: &mut Signature) -> Decoder {
    let strange = input.arbitrary::<&str>().unwrap_or_default();
    let head = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
                \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n";
    let format = |id: u64, fields: &[(&str, u32)]| {
        let mut text = format!("ID: {id}\n{head}");
        let mut at = 8;
        for (name, size) in fields {
            text += &format!("\tfield:u64 {name};\toffset:{at};\tsize:{size};\tsigned:0;\n");
            at += size;
        }
        // What is odd comes last: the first of a name counts.
        Format::parse(&format!("{text}\tfield:{strange}")).or_else(|| Format::parse(&text))
    };
    if Format::parse(strange).is_some() {
        signature.saw("a format");
    }
    let exit = format(
        10,
        &[("exit_reason", 4), ("guest_rip", 8), ("isa", 4), ("info1", 8), ("info2", 8), ("vcpu_id", 4)],
    );
    let decoder = Decoder::of(&exit.expect("a format"), |name| match name {
        "kvm_entry" => format(11, &[("vcpu_id", 4)]),
        "kvm_pio" => format(12, &[("rw", 4), ("port", 4), ("size", 4)]),
        "kvm_mmio" => format(13, &[("type", 4), ("len", 4), ("gpa", 8)]),
        "kvm_inj_virq" => format(14, &[("vector", 4)]),
        "kvm_msr" => format(15, &[("write", 4), ("ecx", 4)]),
        "kvm_nested_vmexit" => format(16, &[("exit_code", 4)]),
        _ => None,
    });
    decoder.expect("every field")
}

fn layout(input: &mut Unstructured<'_>, signature: &mut Signature) -> Layout {
    let (start, size) = (input.arbitrary::<u64>().unwrap_or(0), input.arbitrary::<u32>().unwrap_or(0));
    let (vendor, id) = (input.arbitrary::<u16>().unwrap_or(0), input.arbitrary::<u16>().unwrap_or(0));
    let text = format!(
        "[{{\"devices\": [{{\"bus\": 0, \"slot\": 3, \"function\": 0, \"qdev_id\": \"<q>\", \"id\": {{\"vendor\": {vendor}, \
         \"device\": {id}}}, \"regions\": [{{\"bar\": 0, \"type\": \"io\", \"address\": {start}, \"size\": {size}}}]}}]}}]"
    );
    let strange = input.arbitrary::<&str>().unwrap_or_default();
    let path = Path::new("fuzz");
    if Layout::parse(strange.as_bytes(), path).is_ok() {
        signature.saw("a strange layout");
    }
    Layout::parse(text.as_bytes(), path).unwrap_or_default()
}

/// Of Linux 6.12.
const HEADER: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
    \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
    \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";
