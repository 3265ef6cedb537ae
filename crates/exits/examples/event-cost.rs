//! What the reader of a watch does for each event, in ns of this thread's own time: `event-cost [ROUNDS]`. Formats and the mix of records are
//! those of Linux 6.12 on AMD; nothing is recorded and no VM is needed.
//!
//! The fastest of the rounds is printed: what else the machine does only ever adds.

use std::time::Duration;

use ioplane_exits::{Decoder, Format, Profile, Thread};
use rustix::time::{ClockId, clock_gettime};

/// Events of one round.
const EVENTS: usize = 200_000;

const HEAD: &str = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\n\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\n\
                    \tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\n\tfield:int common_pid;\toffset:4;\tsize:4;\n";

/// Fields with their sizes, one after the other, each aligned to its size.
fn format(id: u64, fields: &[(&str, usize)]) -> Format {
    let mut text = format!("ID: {id}\n{HEAD}");
    let mut at = 8usize;
    for (name, size) in fields {
        at = at.next_multiple_of(*size);
        text += &format!("\tfield:u64 {name};\toffset:{at};\tsize:{size};\n");
        at += size;
    }
    Format::parse(&text).expect("a format")
}

fn decoder() -> Decoder {
    let exit = format(
        1600,
        &[("exit_reason", 4), ("guest_rip", 8), ("isa", 4), ("info1", 8), ("info2", 8), ("vcpu_id", 4)],
    );
    let others = |name: &str| {
        let (id, fields): (u64, &[(&str, usize)]) = match name {
            "kvm_entry" => (1601, &[("vcpu_id", 4), ("rip", 8)]),
            "kvm_pio" => (1602, &[("rw", 4), ("port", 4), ("size", 4)]),
            "kvm_mmio" => (1603, &[("type", 4), ("len", 4), ("gpa", 8), ("val", 8)]),
            "kvm_fast_mmio" => (1604, &[("gpa", 8)]),
            "kvm_msr" => (1605, &[("write", 4), ("ecx", 4), ("data", 8), ("exception", 1)]),
            "kvm_cpuid" => (1606, &[("function", 4)]),
            "kvm_hypercall" => (1607, &[("nr", 8)]),
            "kvm_page_fault" => (1608, &[("vcpu_id", 4)]),
            "kvm_userspace_exit" => (1609, &[("reason", 4), ("errno", 4)]),
            "kvm_inj_virq" => (1610, &[("vector", 4)]),
            "kvm_apic_accept_irq" => (1611, &[("apicid", 4)]),
            "kvm_apicv_accept_irq" => (1612, &[("apicid", 4)]),
            "kvm_ple_window_update" => (1613, &[("vcpu_id", 4)]),
            _ => (1614, &[("exit_code", 4)]),
        };
        Some(format(id, fields))
    };
    Decoder::of(&exit, others).expect("every field")
}

fn record(id: u16, words: &[(usize, u64, usize)]) -> Vec<u8> {
    let mut bytes = vec![0; 56];
    bytes[..2].copy_from_slice(&id.to_le_bytes());
    for (at, value, size) in words {
        bytes[*at..at + size].copy_from_slice(&value.to_le_bytes()[..*size]);
    }
    bytes
}

/// A guest that reads a port, writes a register of a device and an MSR, is interrupted, and waits; from `sites` instructions each.
fn hardware(sites: u64) -> Vec<Vec<u8>> {
    let exit = |code: u64, rip: u64, info1: u64, info2: u64| {
        record(1600, &[(8, code, 4), (16, rip, 8), (24, 2, 4), (32, info1, 8), (40, info2, 8)])
    };
    let entry = || record(1601, &[]);
    let mut all = Vec::new();
    for site in 0..sites {
        let rip = 0xffff_ffff_8100_0000 + site * 64;
        all.extend([exit(0x7b, rip, (0x608 << 16) | 0x41, 0), entry()]);
        let address = 0xfebf_0000 + site * 4;
        all.push(exit(0x400, rip + 8, 0xe, address));
        all.push(record(1603, &[(8, 2, 4), (12, 4, 4), (16, address, 8)]));
        all.extend([record(1609, &[]), entry()]);
        all.push(exit(0x7c, rip + 16, 1, 0));
        all.extend([record(1605, &[(8, 1, 4), (12, 0x6e0, 4)]), entry()]);
        all.extend([exit(0x60, rip + 24, 0, 0), entry(), exit(0x78, rip + 32, 0, 0)]);
        all.extend([record(1610, &[(8, 0xec, 4)]), entry()]);
    }
    all
}

/// A software KVM, which tells only what it does.
fn software(sites: u64) -> Vec<Vec<u8>> {
    let each = |site: u64| {
        [
            record(1602, &[(8, 1, 4), (12, 0x3f8 + site, 4), (16, 1, 4)]),
            record(1605, &[(8, 1, 4), (12, 0x800 + site, 4)]),
            record(1603, &[(8, 2, 4), (12, 4, 4), (16, 0xfee0_0000 + site * 16, 8)]),
            record(1606, &[(8, site, 4)]),
        ]
    };
    (0..sites).flat_map(each).collect()
}

fn own_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn measure(what: &str, rounds: usize, records: &[Vec<u8>]) {
    let decoder = decoder();
    let [mut decoding, mut taking] = [f64::INFINITY; 2];
    let mut exits = 0;
    for _ in 0..rounds {
        let begun = own_time();
        let mut understood = 0;
        for record in records.iter().cycle().take(EVENTS) {
            understood +=
                usize::from(std::hint::black_box(decoder.decode(std::hint::black_box(record))).is_some());
        }
        assert_eq!(understood, EVENTS);
        let decoded = own_time();
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for (at, record) in records.iter().cycle().take(EVENTS).enumerate() {
            if let Some(event) = decoder.decode(record) {
                profile.take(&mut thread, at as u64 * 100, event);
            }
        }
        let taken = own_time();
        exits = profile.total().count;
        let each = |time: Duration| time.as_secs_f64() * 1e9 / EVENTS as f64;
        decoding = decoding.min(each(decoded - begun));
        taking = taking.min(each(taken - decoded));
    }
    println!("{what:<28} {decoding:>6.1} ns to decode, {taking:>6.1} ns decoded and counted ({exits} exits)");
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(20);
    measure("hardware, 5 sites", rounds, &hardware(1));
    measure("hardware, 1000 sites", rounds, &hardware(200));
    measure("software, 4 sites", rounds, &software(1));
    measure("software, 400 sites", rounds, &software(100));
}
