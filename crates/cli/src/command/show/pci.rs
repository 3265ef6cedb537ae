//! Reports of PCI functions for people.

use std::collections::BTreeMap;

use ioplane_api::report::{
    CooperationReport, FunctionReport, PhysicalReport, QuiesceReport, ServedState, Stage, StatusReport,
    WatchReport,
};
use ioplane_api::size::Size;
use ioplane_api::spec::VfSettings;

use super::{or_dash, state};
use crate::command::table::Table;

/// What is behind a function.
fn behind(function: &FunctionReport) -> String {
    let model = function.model.as_deref().unwrap_or("-");
    match (&function.host, &function.switch, &function.tap) {
        (Some(host), _, _) if ["passthrough", "cooperating"].contains(&function.mode.as_str()) => {
            host.clone()
        }
        (Some(host), _, _) => format!("{host} ({model})"),
        (None, Some(switch), _) => format!("{model} on switch {switch}"),
        (None, None, Some(tap)) => format!("{model} on {tap}"),
        (None, None, None) => model.to_owned(),
    }
}

/// Where it stands, in a word.
pub fn standing(function: &FunctionReport) -> &'static str {
    match (function.state, function.stage) {
        _ if function.unusable.is_some() => "UNUSABLE",
        _ if function.watch.as_ref().is_some_and(|watch| watch.stopped) => "STOPPED",
        (ServedState::Served, Stage::Held | Stage::Quiescing | Stage::Away) => function.stage.word(),
        (served, _) => state(served, function.connected),
    }
}

/// Those that are served, of `pci list`.
pub fn functions(functions: &[FunctionReport]) -> String {
    if functions.is_empty() {
        return "no PCI functions are served: add one with `ioplane pci add`\n".to_owned();
    }
    let mut table = Table::new(&["NAME", "STATE", "MODE", "BACKEND", "VM", "ORIGIN", "SOCKET"]);
    for function in functions {
        table.row(vec![
            function.name.clone(),
            standing(function).to_owned(),
            function.mode.clone(),
            behind(function),
            or_dash(function.vm.as_ref().map(|vm| vm.name.clone())),
            function.origin.clone(),
            function.socket.display().to_string(),
        ]);
    }
    table.to_string() + &functions.iter().map(complaints).collect::<String>()
}

fn complaints(function: &FunctionReport) -> String {
    let name = &function.name;
    let mut text = super::error_lines(name, &function.error, &function.remedy, function.retry);
    if let Some(why) = &function.unusable {
        text.push_str(&format!("{name} takes no guest: {why}\n"));
        text.push_str(&format!(
            "  hint: then ioplane pci reset {name}, or start the guest again: each tries anew\n"
        ));
    }
    if let Some(watch) = &function.watch
        && watch.stopped
    {
        let why =
            watch.faults.iter().find(|fault| fault.cause != "hardware").map(|fault| fault.last.as_str());
        let why = why.unwrap_or("a fault");
        text.push_str(&format!("{name} has been stopped: {why}\n"));
        text.push_str("  hint: restart the guest; to be less strict: ioplane pci add --on-fault\n");
    }
    if let Some(fault) = &function.last_front_end_fault {
        text.push_str(&format!("{name}: what a VMM did wrong last: {fault}\n"));
    }
    text
}

fn counted(counts: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if each.is_empty() { "none".to_owned() } else { each.join(", ") }
}

/// The states of a mediated function, and whether it could change hands.
pub fn states(watch: &WatchReport) -> String {
    let each: Vec<String> =
        watch.states.iter().map(|region| format!("{} {}", region.region, region.state)).collect();
    let reusable = if watch.reusable { " (reusable)" } else { "" };
    if each.is_empty() { "-".to_owned() } else { each.join(" | ") + reusable }
}

/// `pci show`.
pub fn function(function: &FunctionReport) -> String {
    let FunctionReport { name, mode, traffic, .. } = function;
    let mut text = format!("{name}: {}, {mode}, {}\n", behind(function), standing(function));
    let mut line = |what: &str, value: String| text.push_str(&format!("  {what:<17} {value}\n"));
    line("socket", function.socket.display().to_string());
    match &function.vm {
        Some(vm) => line("VM", format!("{} (pid {})", vm.name, vm.pid)),
        None => line("VM", format!("none; {} so far", function.connections)),
    }
    if let Some(id) = &function.id {
        line("vendor:device", id.clone());
    }
    if let Some(mac) = &function.mac {
        line("address", mac.clone());
    }
    if let Some(PhysicalReport { interface, number, address, settings, own }) = &function.physical {
        let said = |settings: &VfSettings| match settings.words() {
            words if words.is_empty() => "nothing is set".to_owned(),
            words => words.join(", "),
        };
        line("at its card", format!("{interface} vf {number}: {}", said(settings)));
        if let Some(address) = address.filter(|address| settings.mac != Some(*address)) {
            line("", format!("its guest's address: {address}"));
        }
        if let Some(own) = own {
            line("", format!("when its guest is gone: {}", said(own)));
        }
    }
    if function.mode == "virtual" {
        line("on a fault", function.on_fault.clone().unwrap_or_default());
    }
    if let Some(ms) = function.held_ms {
        line("held", format!("resumes by itself in {:.1} s: ioplane pci resume {name}", ms as f64 / 1000.0));
    } else if function.stage == Stage::Held {
        line(
            "held",
            "for a move of its VM, until that has ended; if nobody moves it any more: docs/guide/move.md"
                .to_owned(),
        );
    }
    if let Some(watch) = &function.watch {
        line("states", states(watch));
        line(
            "accesses",
            format!("{}, hooked {} ({:.1} %)", watch.accesses, watch.hooked, watch.hooked_percent),
        );
        if watch.shadow_page {
            line("shadow page", "in use: reads of registers do not exit".to_owned());
        }
        line("DMA vetted", format!("{}, {}", watch.dma_vetted, Size(watch.dma_bytes)));
        line("denied", watch.denied.to_string());
        for fault in &watch.faults {
            line("", format!("{} {} ({}): {}", fault.count, fault.name, fault.cause, fault.last));
        }
        line("interrupts", format!("{}, {} given", watch.interrupts, watch.interrupts_given));
        for event in watch.events.iter().rev().take(10).rev() {
            line("", event.what.clone());
        }
    }
    line("from the VMM", format!("{} reads, {} writes", traffic.reads, traffic.writes));
    line("guest memory", format!("{} in {} ranges", Size(traffic.memory_bytes), traffic.memory_ranges));
    if let Some(port) = &function.port {
        let drops: u64 = port.dropped();
        let frames = format!(
            "{} sent ({}), {} received ({}), {drops} dropped",
            port.sent_frames,
            Size(port.sent_bytes),
            port.received_frames,
            Size(port.received_bytes)
        );
        // The link is up as soon as the function is plugged in, as that of a card in a machine that is off.
        line("frames", if function.connected { frames } else { frames + "; no VM is connected" });
    }
    if let Some(chip) = &function.chip
        && (!chip.drops.is_empty() || chip.wrong_dma > 0)
    {
        line("chip's drops", counted(&chip.drops));
        line("wrong DMA", chip.wrong_dma.to_string());
    }
    if let Some(CooperationReport { announced, refused, moves, replayed, .. }) = &function.cooperation {
        let driver = match (announced, refused) {
            (true, _) if moves == replayed => format!("cooperates; moved {moves} times"),
            (true, _) => {
                format!("cooperates; moved {moves} times, and has brought the function back {replayed} times")
            }
            (false, Some(why)) => why.clone(),
            (false, None) => "has announced nothing: with it the function cannot be moved".to_owned(),
        };
        line("guest's driver", driver);
    }
    match function.mapped_pages {
        None => {}
        Some(0) => line("mapped registers", "none: every access of its guest exits".to_owned()),
        Some(pages) => line("mapped registers", format!("{pages} pages, until it is moved")),
    }
    if !function.hardware_faults.is_empty() {
        line("hardware's faults", counted(&function.hardware_faults));
    }
    if let Some(step) = function.step {
        line("move", step.words().to_owned());
    }
    if let Some(why) = &function.no_replay {
        line("takes no state", why.clone());
    }
    if let Some(why) = &function.not_reset {
        line("not reset", why.clone());
    }
    if !function.front_end_faults.is_empty() {
        line("VMM's faults", counted(&function.front_end_faults));
    }
    text + &complaints(function)
}

/// `pci quiesce`.
pub fn quiesced(report: &QuiesceReport) -> String {
    let QuiesceReport { name, drained, waited_us, reason, connected, held_ms } = report;
    let how = match (drained, reason) {
        (true, _) => "was drained".to_owned(),
        (false, Some(reason)) => format!("was suspended ({reason})"),
        (false, None) => "was suspended".to_owned(),
    };
    let waits =
        if *connected { "its guest waits" } else { "no VM is connected: one that connects now waits" };
    format!(
        "{name} {how} after {:.1} ms; {waits}.\n  hint: ioplane pci resume {name}; it resumes by itself in {} s\n",
        *waited_us as f64 / 1000.0,
        held_ms / 1000
    )
}

/// The part of `status` about them; empty if there are none.
pub fn status(status: &StatusReport) -> String {
    if status.functions.is_empty() { String::new() } else { format!("\n{}", functions(&status.functions)) }
}
