//! What an update of a model costs: the hooked accesses and events of pings, N times, as the monitor tells them.
//!
//! ```text
//! cargo run --release -p ioplane-passthrough --example update -- rtl8139 1000000
//! valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*pings*' target/release/examples/update rtl8139 1000
//! ```
//! It prints one line of JSON: updates, transitions, nanoseconds an update. Under callgrind only [`pings`] is counted: its instructions
//! by the number of updates are the instructions an update, the loop around it included.

use std::hint::black_box;
use std::time::Instant;

use ioplane_model::{Machine, ModelInput, Verdict};
use ioplane_passthrough::catalog;

/// One row of a trace.
enum Row {
    Write(&'static str, u32),
    Read(&'static str),
    Interrupt(u32),
    Drained(u8),
    Moved,
    Holds(u8),
}

use Row::{Drained, Holds, Interrupt, Moved, Read, Write};

/// 8139cp: what brings it up, then a frame out and a frame in.
const RTL8139_UP: &[Row] = &[Write("CR", 0x10), Write("CPCR", 0x2b), Write("CR", 0x0c)];
const RTL8139: &[Row] = &[
    Write("TPPOLL", 0x40),
    Interrupt(0x04),
    Interrupt(0x01),
    Read("ISR"),
    Write("ISR", 0x04),
    Write("IMR", 0x80ac),
    Read("IMR"),
    Drained(0),
    Write("ISR", 0x53),
    Write("IMR", 0x80ff),
    Read("IMR"),
    Read("IMR"),
];

/// ne2k-pci: what brings it up, then a frame out and a frame in.
const NE2000_UP: &[Row] = &[
    Write("PSTART", 0x4c),
    Write("PSTOP", 0x80),
    Write("CURR", 0x4c),
    Write("CR", 0x22),
    Write("RCR", 0x04),
];
const NE2000: &[Row] = &[
    // Put a frame on the card, send it.
    Write("IMR", 0),
    Write("CR", 0x22),
    Write("ISR", 0x40),
    Write("RBCR0", 0x12),
    Write("RBCR1", 0x04),
    Write("RSAR0", 0),
    Write("RSAR1", 0x40),
    Write("CR", 0x12),
    Moved,
    Read("ISR"),
    Write("ISR", 0x40),
    Write("CR", 0x20),
    Write("TBCR0", 0x12),
    Write("TBCR1", 0x04),
    Write("TPSR", 0x40),
    Write("CR", 0x26),
    Write("IMR", 0x3f),
    Interrupt(0x02),
    Interrupt(0x01),
    Write("CR", 0x20),
    Read("ISR"),
    // Fetch one: its header, then the rest.
    Write("CR", 0x60),
    Write("CR", 0x20),
    Write("CR", 0x22),
    Write("RBCR0", 4),
    Write("RBCR1", 0),
    Write("RSAR0", 0),
    Write("RSAR1", 0x4c),
    Write("CR", 0x0a),
    Moved,
    Write("ISR", 0x40),
    Write("CR", 0x22),
    Write("RBCR0", 0x12),
    Write("RBCR1", 0x04),
    Write("RSAR0", 4),
    Write("RSAR1", 0x4c),
    Write("CR", 0x0a),
    Moved,
    Write("ISR", 0x40),
    Write("CR", 0x60),
    Write("CR", 0x20),
    Write("ISR", 0x05),
    Write("ISR", 0x02),
    Write("CR", 0x22),
    Read("ISR"),
    // The ring was read empty.
    Holds(0),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("name a model: rtl8139 or ne2000")?;
    let rounds: u64 = arguments.next().map_or(Ok(100_000), |rounds| rounds.parse())?;
    let model = catalog::named(&name).ok_or("there is no such model: take rtl8139 or ne2000")?;
    let mut machine = Machine::new(model)?;
    let (up, ping) = match model.name {
        "rtl8139" => (RTL8139_UP, RTL8139),
        "ne2000" => (NE2000_UP, NE2000),
        _ => return Err("this model has no trace here: write one".into()),
    };
    let up = told(&machine, up)?;
    pass(&mut machine, &up);
    let trace = told(&machine, ping)?;
    let (updates, transitions) = (machine.updates(), machine.transitions());
    let begun = Instant::now();
    pings(&mut machine, &trace, rounds);
    let took = begun.elapsed();
    let updates = machine.updates() - updates;
    let transitions = machine.transitions() - transitions;
    if !machine.reusable() {
        return Err(format!("the trace ends busy: {:?}", machine.busy()).into());
    }
    let nanoseconds = took.as_nanos() as f64 / updates.max(1) as f64;
    println!(
        "{{\"model\": \"{}\", \"updates\": {updates}, \"transitions\": {transitions}, \"ns_per_update\": {nanoseconds:.1}}}",
        model.name
    );
    Ok(())
}

/// Names to ids, once.
fn told(machine: &Machine, rows: &[Row]) -> Result<Vec<ModelInput>, String> {
    let find = |name: &str| machine.find(name).ok_or(format!("there is no register {name}"));
    rows.iter()
        .map(|row| {
            Ok(match *row {
                Write(name, value) => ModelInput::Write { register: find(name)?, value },
                Read(name) => ModelInput::Read { register: find(name)? },
                Interrupt(bits) => ModelInput::Interrupt { bits },
                Drained(ring) => ModelInput::Drained { ring },
                Moved => ModelInput::Moved,
                Holds(condition) => ModelInput::Holds { condition },
            })
        })
        .collect()
}

/// What is measured.
#[inline(never)]
fn pings(machine: &mut Machine, trace: &[ModelInput], rounds: u64) {
    for _ in 0..rounds {
        pass(machine, black_box(trace));
    }
}

/// Every check passes: they are the monitor's, and are not measured.
#[inline]
fn pass(machine: &mut Machine, trace: &[ModelInput]) {
    for seen in trace {
        if let Verdict::Check(pending) = machine.update(*seen) {
            black_box(machine.commit(pending));
        }
    }
}
