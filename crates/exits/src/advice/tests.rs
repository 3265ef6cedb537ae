//! Findings of exits that are written down here.

use std::collections::BTreeSet;
use std::time::Duration;

use ioplane_symbols::GuestFunction;
use serde_json::{Value, json};

use super::*;
use ioplane_kvmstat::Vm;

use crate::devices::{Devices, Layout};
use crate::event::{Event, FaultCause};
use crate::host::HostFacts;
use crate::profile::{Profile, Thread};
use crate::reason::Reason;
use crate::report::{Names, RunStart, Subject};
use crate::seen::WatchCounts;

/// The maker's code, the address, about what, how many.
type Exits<'a> = &'a [(u64, u64, Detail, u64)];

/// A second of a VM with one vCPU, and what is known about it.
struct Scene {
    isa: u64,
    host: HostFacts,
    devices: Value,
    function: fn(u64) -> Option<GuestFunction>,
    /// Host time of each exit in ns, where every second one was timed.
    ns: Option<u64>,
    spin_windows: u64,
    /// Every exit goes on to the VMM.
    user: bool,
}

impl Default for Scene {
    fn default() -> Scene {
        Scene {
            isa: 2,
            host: HostFacts::default(),
            devices: json!([]),
            function: |rip| Some(GuestFunction { name: format!("f{:x}", rip >> 8), offset: rip & 0xff }),
            ns: None,
            spin_windows: 0,
            user: false,
        }
    }
}

impl Scene {
    fn report(&self, exits: Exits<'_>) -> Report {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for (code, rip, detail, count) in exits {
            for number in 0..*count {
                let reason = Reason::from_kvm(self.isa, *code);
                let event = Event::Exit { reason, rip: *rip, vcpu: Some(0), detail: *detail };
                profile.take(&mut thread, 0, event);
                if self.user {
                    profile.take(&mut thread, 0, Event::UserSpace);
                }
                if let Some(ns) = self.ns.filter(|_| number % 2 == 0) {
                    profile.take(&mut thread, ns, Event::Entry { vcpu: Some(0) });
                }
            }
        }
        for _ in 0..self.spin_windows {
            profile.take(&mut thread, 0, Event::SpinWindow);
        }
        profile.end(&mut thread);
        let vm = Vm {
            pid: 1,
            name: "a".into(),
            program: "b".into(),
            vcpus: 1,
            vm_fds: vec![3],
            command: Vec::new(),
        };
        let pci = Layout::from_query_pci(&self.devices).unwrap();
        let names = Names {
            function: Some(&self.function),
            devices: Devices { pci, ..Devices::default() },
            host: self.host.clone(),
            ..Names::default()
        };
        let seen = WatchCounts { counted: profile.total().count, ..WatchCounts::default() };
        let subject = Subject { vm: &vm, time: Duration::from_secs(1), seen, sample: 1 };
        Report::new(subject, &profile, None, &names)
    }
}

fn report(exits: Exits<'_>) -> Report {
    Scene::default().report(exits)
}

fn port(port: u16, width: u8, write: bool) -> Detail {
    Detail::Port { port, width, write, queue: None }
}

fn memory(address: u64, write: bool) -> Detail {
    Detail::Memory { address, width: 4, write }
}

/// A bus with one function, whose one region begins at 0xfe00_0000.
fn bus(vendor: u64, device: u64, bar: u64) -> Value {
    json!([{"devices": [{"bus": 0, "slot": 3, "function": 0, "qdev_id": "",
        "id": {"vendor": vendor, "device": device},
        "regions": [{"bar": bar, "type": "memory", "address": 0xfe00_0000_u64, "size": 0x2_0000}]}]}])
}

const BAR: u64 = 0xfe00_0000;

fn named(function: &str) -> GuestFunction {
    GuestFunction { name: function.into(), offset: 9 }
}

fn ids(report: &Report) -> Vec<String> {
    advise(report).into_iter().map(|finding| finding.id).collect()
}

fn find(report: &Report, id: &str) -> Finding {
    let found = advise(report);
    found.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("{id} in {found:#?}")).clone()
}

#[track_caller]
fn near(value: f64, wanted: f64) {
    assert!((value - wanted).abs() < 1.0, "{value}, not {wanted}");
}

#[test]
fn clocks_are_found() {
    let report = report(&[(0x7b, 0x105, port(0x608, 4, false), 3000), (0x78, 0x200, Detail::Nothing, 100)]);
    let findings = advise(&report);
    assert_eq!(findings.len(), 1);
    assert_eq!((findings[0].id.as_str(), findings[0].action), ("pm-timer", Some(Action::Clocksource)));
    near(findings[0].gain, 3000.0);
    assert!(findings[0].evidence.contains("most from f1"), "{}", findings[0].evidence);
    assert_eq!(report.findings, findings);
    assert_eq!(action_of(&findings[0].id), findings[0].action);
    near(findings[0].rate_in(&report), 3000.0);
    assert_eq!(ids(&self::report(&[(0x400, 1, memory(0xfed0_00f0, false), 50)])), ["hpet"]);
}

#[test]
fn rare_exits_are_not_worth_a_word() {
    let quiet = report(&[(0x7b, 1, port(0x608, 4, false), 5), (0x78, 2, Detail::Nothing, 100)]);
    assert!(ids(&quiet).is_empty());
}

#[test]
fn the_check_of_the_pm_timer_has_its_name() {
    let exits = [(0x7b, 1, port(0x608, 4, false), 2), (0x7b, 2, port(0x61, 1, false), 900)];
    let scene = |function| Scene { function, ..Scene::default() };
    let named = scene(|rip| Some(named(if rip == 1 { "acpi_pm_read" } else { "verify_pmtmr_rate" })));
    let check = find(&named.report(&exits), "pm-timer-check");
    assert!(check.title.contains("verify_pmtmr_rate") && check.remedy.contains("pmtmr=0"), "{check}");
    assert_eq!(check.certainty, Certainty::High);
    near(check.gain, 900.0);
    // In one function, and in the same watch only.
    let shared = scene(|_| Some(self::named("boot"))).report(&exits);
    assert_eq!(find(&shared, "pm-timer-check").certainty, Certainty::Fair);
    assert_eq!(find(&scene(|_| None).report(&exits), "pm-timer-check").certainty, Certainty::Low);
    // The same exits are not told twice.
    assert_eq!(ids(&shared), ["pm-timer-check"]);
    // The TSC's calibration reads both as well; and without the PM timer it is the PIT by itself.
    let calibration = scene(|_| Some(self::named("pit_calibrate_tsc"))).report(&exits);
    assert_eq!(ids(&calibration), ["pit"]);
    near(find(&report(&exits[1..]), "pit").gain, 900.0);
}

#[test]
fn disks_and_consoles() {
    let disk = report(&[
        (0x7b, 0x101, port(0x1f2, 1, true), 400),
        (0x7b, 0x102, port(0x1f3, 1, true), 400),
        (0x7b, 0x103, port(0x1f4, 1, true), 400),
        (0x7b, 0x104, port(0x1f7, 1, true), 399),
        (0x7b, 0x205, port(0x3f8, 1, true), 300),
    ]);
    // One after the other hundreds of times is nothing in a row.
    assert_eq!(ids(&disk), ["ide", "serial", "scheduler"]);
    let ide = &advise(&disk)[0];
    near(ide.gain, 1200.0);
    assert!(ide.evidence.contains("399 commands"), "{ide:?}");
}

#[test]
fn what_comes_in_a_row_is_a_sequence() {
    // One instruction, as libata's out-of-line iowrite8.
    let row: Vec<_> = (0x1f2..=0x1f7).map(|number| (0x7b, 0x101, port(number, 1, true), 1)).collect();
    let mut exits = row.repeat(400);
    // Another function's accesses to one of these ports are not its.
    exits.push((0x78, 0x300, Detail::Nothing, 1));
    exits.push((0x7b, 0x401, port(0x1f7, 1, true), 50));
    let report = Scene { user: true, ..Scene::default() }.report(&exits);
    let found = find(&report, "sequence-f1");
    assert_eq!(found.title, "f1 begins 6 device accesses in a row");
    assert_eq!(found.sequence, Some(RunStart::Function("f1".into())));
    assert!(found.evidence.starts_with("out 0x1f2, out 0x1f3, "), "{found}");
    assert!(found.evidence.contains("400 times a second; 97.9 % of all exits"), "{found}");
    assert!(found.evidence.contains("exits of ide, scheduler too"), "{found}");
    assert!(
        found.remedy.contains("ioplane run --") && found.remedy.contains("exits cluster --vm pid:1"),
        "{found}"
    );
    near(found.gain, 2000.0);
    near(found.rate_in(&report), 2400.0);
    assert!(!ids(&report).contains(&"sequence-f4".into()));
    // A run that is a thousandth of all is not worth a word.
    let mut rare = row.repeat(20);
    rare.push((0x78, 0x300, Detail::Nothing, 200_000));
    assert!(ids(&self::report(&rare)).iter().all(|id| !id.starts_with("sequence-")));
}

/// What KVM answers by itself the interposer never sees.
#[test]
fn a_sequence_that_kvm_answers_needs_another_device() {
    let row: Vec<_> = (0x40..=0x43).map(|number| (0x7b, 0x101, port(number, 1, true), 1)).collect();
    let found = find(&report(&row.repeat(400)), "sequence-f1");
    assert!(
        found.remedy.contains("KVM answers most of these") && found.certainty == Certainty::Low,
        "{found}"
    );
    near(found.gain, 1200.0);
}

#[test]
fn mmio_in_a_row_is_a_sequence() {
    let row: Vec<_> =
        (0..3).map(|number| (0x400, 0x101, memory(0xfebf_0000 + 4 * number, true), 1)).collect();
    let report = Scene { user: true, ..Scene::default() }.report(&row.repeat(400));
    let found = find(&report, "sequence-f1");
    assert!(
        found.evidence.starts_with("write 0xfebf0000, write 0xfebf0004, write 0xfebf0008: 400 times"),
        "{found}"
    );
    assert!(found.about.iter().all(|(kind, _)| *kind == Kind::Memory), "{found:?}");
    near(found.gain, 800.0);
}

#[test]
fn other_disks() {
    let scene = Scene { devices: bus(0x8086, 0x2922, 5), ..Scene::default() };
    let report = scene.report(&[
        (0x400, 1, memory(BAR + 0x138, true), 300),
        (0x400, 2, memory(BAR + 0x110, false), 300),
        (0x400, 3, memory(BAR + 0x110, true), 300),
        (0x400, 4, memory(BAR + 0x8, true), 300),
    ]);
    let ahci = find(&report, "ahci");
    near(ahci.gain, 900.0);
    assert!(ahci.evidence.contains("for 300 commands"), "{ahci}");
    let scene = Scene { devices: bus(0x1000, 0x0012, 1), ..Scene::default() };
    let report =
        scene.report(&[(0x400, 1, memory(BAR + 0x14, true), 300), (0x400, 1, memory(BAR + 0xc, false), 600)]);
    near(find(&report, "lsi").gain, 600.0);
    near(find(&report, "scheduler").rate_in(&report), 300.0);
}

/// Each kind of disk by what starts a request, and by nothing else of it.
#[test]
fn the_scheduler_matters_on_every_disk_that_is_busy() {
    let ide = |commands: u64, others: u64| {
        let exits = [(0x7b, 1, port(0x1f7, 1, true), commands), (0x7b, 2, port(0x1f2, 1, true), others)];
        report(&exits)
    };
    let found = find(&ide(300, 4000), "scheduler");
    assert!(found.action == Some(Action::Scheduler) && found.remedy.contains("sd*"), "{found}");
    assert!(found.evidence.contains("requests to disks: 300 exits a second (7.0 % of all)"), "{found}");
    near(found.rate_in(&ide(300, 4000)), 300.0);
    // Few a second: only where they are a large part of all.
    assert!(ids(&ide(100, 150)).contains(&"scheduler".into()));
    assert!(!ids(&ide(100, 4000)).contains(&"scheduler".into()));
    // A read of the status starts nothing.
    assert!(!ids(&report(&[(0x7b, 1, port(0x1f7, 1, false), 4000)])).contains(&"scheduler".into()));
    let ahci = Scene { devices: bus(0x8086, 0x2922, 5), ..Scene::default() };
    let ahci =
        ahci.report(&[(0x400, 1, memory(BAR + 0x138, true), 300), (0x400, 2, memory(BAR + 8, true), 900)]);
    near(find(&ahci, "scheduler").rate_in(&ahci), 300.0);
}

#[test]
fn moderation_is_for_those_that_can() {
    let busy = |device, address, count| {
        let (vendor, device, bar) = device;
        Scene { devices: bus(vendor, device, bar), ..Scene::default() }.report(&[(
            0x400,
            1,
            memory(BAR + address, false),
            count,
        )])
    };
    near(find(&busy((0x8086, 0x100e, 0), 0xc0, 9000), "moderation").gain, 5000.0);
    // With the setting it would still have so many.
    assert_eq!(ids(&busy((0x8086, 0x100e, 0), 0xc0, 3900)), ["nic", "napi"]);
    // 8139too and 8139cp have none.
    assert_eq!(ids(&busy((0x10ec, 0x8139, 1), 0x3e, 9000)), ["nic", "napi"]);
}

/// The cause and the mask, of NICs whose drivers poll; a share of all exits, and no promise.
#[test]
fn interrupts_of_a_nic_can_be_turned_on_later() {
    let of = |vendor, device, bar, exits: Exits<'_>| {
        Scene { devices: bus(vendor, device, bar), ..Scene::default() }.report(exits)
    };
    let (cause, unmask, tail) =
        (memory(BAR + 0xc0, false), memory(BAR + 0xd0, true), memory(BAR + 0x3818, true));
    let busy =
        of(0x8086, 0x10d3, 0, &[(0x400, 1, cause, 100), (0x400, 2, unmask, 100), (0x400, 3, tail, 200)]);
    let found = find(&busy, "napi");
    assert!(found.gain == 0.0 && found.action == Some(Action::Napi), "{found}");
    assert_eq!(action_of("napi"), found.action);
    assert!(found.evidence.contains("200 exits a second (50.0 % of all)"), "{found}");
    near(found.rate_in(&busy), 200.0);
    let rare = of(0x8086, 0x10d3, 0, &[(0x400, 1, cause, 100), (0x400, 3, tail, 4000)]);
    assert!(!ids(&rare).contains(&"napi".into()));
    // The driver of an NE2000 does not poll.
    let old = of(0x10ec, 0x8029, 0, &[(0x400, 1, memory(BAR + 0x7, false), 100)]);
    assert_eq!(ids(&old), ["nic"]);
    // A virtio-net whose interrupt has a cause to be read has no MSI-X.
    let shared = of(0x1af4, 0x1041, 4, &[(0x400, 1, memory(BAR + 0x1000, false), 100)]);
    assert_eq!(ids(&shared), ["napi"]);
}

#[test]
fn notifications_promise_only_what_was_seen() {
    let scene = Scene { devices: bus(0x1af4, 0x1042, 4), ..Scene::default() };
    let report = scene.report(&[(0x400, 1, memory(BAR + 0x3000, true), 5000)]);
    let notifications = find(&report, "virtio-notifications");
    assert!(notifications.certainty == Certainty::Low && notifications.evidence.contains("EVENT_IDX"));
    let scheduler = find(&report, "scheduler");
    assert!(scheduler.gain == 0.0 && scheduler.action == Some(Action::Scheduler));
    assert!(scheduler.to_string().contains("no number of exits can be promised"), "{scheduler}");
}

#[test]
fn a_local_apic_in_memory() {
    let exits = [
        (49, 1, memory(0xfee0_00b0, true), 800),
        (44, 2, Detail::Nothing, 100),
        (12, 3, Detail::Nothing, 50),
    ];
    let with =
        |apicv| Scene { isa: 1, host: HostFacts { apicv, ..HostFacts::default() }, ..Scene::default() };
    let found = find(&with(Some(false)).report(&exits), "x2apic");
    assert!(found.gain == 0.0 && found.certainty == Certainty::Low, "{found}");
    assert!(
        found.remedy.contains("cost, not count") && found.remedy.contains("enable_apicv is off"),
        "{found}"
    );
    near(found.rate_in(&with(None).report(&exits)), 900.0);
    assert!(find(&with(Some(true)).report(&exits), "x2apic").remedy.contains("inhibited"));
    assert!(find(&with(None).report(&exits), "x2apic").remedy.contains("cannot be read"));
    // As Intel's exit tells which register it was.
    let told = with(None).report(&[(44, 2, memory(0xfee0_0300, true), 100)]);
    assert_eq!(ids(&told), ["x2apic"]);
}

#[test]
fn what_a_virtual_apic_leaves() {
    for (isa, code, detail) in [
        (1, 45, Detail::Nothing),
        (1, 56, memory(0xfee0_0300, true)),
        (2, 0x401, memory(0xfee0_0300, true)),
        (2, 0x402, Detail::Nothing),
    ] {
        let scene = Scene { isa, ..Scene::default() };
        assert_eq!(ids(&scene.report(&[(code, 1, detail, 100)])), ["posted-interrupts"], "{isa} {code:#x}");
    }
    let host = HostFacts { avic: Some(true), ..HostFacts::default() };
    let scene = Scene { host, ..Scene::default() };
    let left = find(&scene.report(&[(0x402, 1, Detail::Nothing, 100)]), "posted-interrupts");
    assert!(left.gain == 0.0 && left.remedy.contains("kvm_amd.avic is on"), "{left}");
    let msr = [(0x7c, 1, Detail::Msr { index: 0x80b, write: true }, 100)];
    let off = Scene { host: HostFacts { avic: Some(false), ..HostFacts::default() }, ..Scene::default() };
    let found = find(&off.report(&msr), "posted-interrupts");
    near(found.gain, 100.0);
    assert!(found.certainty == Certainty::Fair && found.remedy.contains("turn on kvm_amd.avic"), "{found}");
    assert!(find(&scene.report(&msr), "posted-interrupts").remedy.contains("inhibited"));
}

#[test]
fn exits_without_detail_are_told_apart_by_their_sort() {
    let host = HostFacts { halt_poll_ns: Some(200_000), ..HostFacts::default() };
    let scene = Scene { ns: Some(50_000), host, ..Scene::default() };
    let report = scene.report(&[
        (0x78, 1, Detail::Nothing, 2000),
        (0x77, 2, Detail::Nothing, 1000),
        (0x60, 3, Detail::Nothing, 700),
        (0x4e, 4, Detail::Nothing, 70),
    ]);
    let halts = find(&report, "halt-polling");
    near(halts.rate_in(&report), 2000.0);
    near(find(&report, "pause-loops").rate_in(&report), 1000.0);
    assert_eq!(halts.about, [(Kind::Halt, Detail::Nothing)]);
    // Every second one was timed: 50 us each, not 25. Three quarters at least are shorter than 200 us.
    assert!(halts.evidence.contains("each for 50 us") && halts.evidence.contains("halt_poll_ns is 200000"));
    near(halts.gain, 1500.0);
    assert!(!halts.remedy.contains("halt_poll_ns") && halts.remedy.contains("in the guest"), "{halts}");
}

#[test]
fn storms() {
    let host = HostFacts { ple_gap: Some(128), ple_window: Some(4096), ..HostFacts::default() };
    let scene = Scene { spin_windows: 37, host, ..Scene::default() };
    let storm = scene
        .report(&[(0x400, 1, Detail::Fault(FaultCause::Missing), 5000), (0x77, 2, Detail::Nothing, 1000)]);
    assert_eq!(ids(&storm), ["page-faults", "pause-loops"]);
    let spins = find(&storm, "pause-loops").evidence;
    assert!(spins.contains("spin 37 times") && spins.contains("ple_gap is 128"), "{spins}");
    let balloon = Scene { devices: bus(0x1af4, 0x1045, 4), ..Scene::default() };
    let exits =
        [(0x400, 1, Detail::Fault(FaultCause::Missing), 5000), (0x400, 1, memory(BAR + 0x3000, true), 20)];
    let faults = find(&balloon.report(&exits), "page-faults");
    assert!(faults.evidence.contains("virtio-balloon at 00:03.0 was notified 20 times"), "{faults}");
    assert!(
        faults.remedy.contains("that balloon")
            && !find(&storm, "page-faults").remedy.contains("that balloon")
    );
}

/// The processor says whether a page was missing or only protected: huge pages are no remedy for the second.
#[test]
fn page_faults_by_what_the_processor_says() {
    let of = |cause: FaultCause| find(&report(&[(0x400, 1, Detail::Fault(cause), 5000)]), "page-faults");
    let missing = of(FaultCause::Missing);
    assert!(missing.certainty == Certainty::Fair && missing.remedy.contains("huge pages"), "{missing}");
    assert!(missing.evidence.contains("5000 a second not mapped, 0 write-protected"), "{missing}");
    let noted = of(FaultCause::WriteProtected);
    assert!(noted.title.contains("write-protected") && noted.remedy.contains("dirty"), "{noted}");
    assert!(noted.gain == 0.0 && !noted.remedy.contains("huge pages and"), "{noted}");
    assert_eq!(of(FaultCause::Unknown).certainty, Certainty::Low);
}

/// A processor without APIC virtualisation cannot have it turned on.
#[test]
fn what_the_processor_cannot_do_is_no_remedy() {
    let msr = [(0x7c, 1, Detail::Msr { index: 0x80b, write: true }, 100)];
    let with = |apic_capable: Option<bool>| {
        let host = HostFacts { avic: Some(false), apic_capable, ..HostFacts::default() };
        find(&Scene { host, ..Scene::default() }.report(&msr), "posted-interrupts")
    };
    let cannot = with(Some(false));
    assert!(
        cannot.gain == 0.0 && cannot.remedy.contains("the processor has no APIC virtualisation"),
        "{cannot}"
    );
    assert!(!cannot.remedy.contains("turn on kvm_amd.avic"), "{cannot}");
    let can = with(Some(true));
    assert!(can.gain > 99.0 && can.certainty == Certainty::High, "{can}");
    assert_eq!(with(None).certainty, Certainty::Fair);
}

/// OVMF puts the i440fx's ACPI registers elsewhere than SeaBIOS does.
#[test]
fn the_pm_timer_where_ovmf_puts_it() {
    let found = find(&report(&[(0x7b, 1, port(0xb008, 4, false), 3000)]), "pm-timer");
    near(found.gain, 3000.0);
}

/// Every rule that asks for a device or a register, at least once.
fn of_every_device() -> Vec<Report> {
    let pci = |devices, exits: Exits<'_>| Scene { devices, ..Scene::default() }.report(exits);
    let nic = |vendor, device, bar, offset| {
        pci(
            bus(vendor, device, bar),
            &[(0x400, 1, memory(BAR + offset, false), 9000), (0x400, 2, memory(BAR + 0x10, true), 30)],
        )
    };
    let nics = |offset: u64| {
        json!({"bus": 0, "slot": 3 + offset, "function": 0, "qdev_id": "", "id": {"vendor": 0x8086, "device": 0x100e},
            "regions": [{"bar": 0, "type": "memory", "address": BAR + 0x2_0000 * offset, "size": 0x2_0000}]})
    };
    vec![
        // Two, neither of which interrupts too often.
        pci(
            json!([{"devices": [nics(0), nics(1)]}]),
            &[(0x400, 1, memory(BAR + 0xc0, false), 3000), (0x400, 1, memory(BAR + 0x2_00c0, false), 3000)],
        ),
        report(&[
            (0x7b, 0x101, port(0x608, 4, false), 3000),
            (0x400, 0x102, memory(0xfed0_00f0, false), 3000),
            (0x7b, 0x103, port(0x40, 1, true), 3000),
            (0x7b, 0x104, port(0x80, 1, true), 3000),
            (0x7b, 0x105, port(0x1f2, 1, true), 3000),
            (0x7b, 0x106, port(0x1f7, 1, true), 300),
            (0x7b, 0x107, port(0x3f8, 1, true), 3000),
            (0x7c, 0x108, Detail::Msr { index: 0x6e0, write: true }, 3000),
            (0x7c, 0x109, Detail::Msr { index: 0x80b, write: true }, 3000),
            (0x400, 0x10a, memory(0xfee0_0380, true), 3000),
        ]),
        nic(0x8086, 0x100e, 0, 0xc0),
        nic(0x10ec, 0x8139, 1, 0x3e),
        nic(0x10ec, 0x8029, 0, 0x7),
        pci(
            bus(0x8086, 0x2922, 5),
            &[(0x400, 1, memory(BAR + 0x138, true), 300), (0x400, 2, memory(BAR + 8, true), 900)],
        ),
        pci(
            bus(0x1000, 0x12, 1),
            &[(0x400, 1, memory(BAR + 0x14, true), 300), (0x400, 2, memory(BAR + 8, true), 900)],
        ),
        pci(bus(0x1af4, 0x1042, 4), &[(0x400, 1, memory(BAR + 0x3000, true), 5000)]),
        pci(
            bus(0x1af4, 0x1045, 4),
            &[
                (0x400, 1, Detail::Fault(FaultCause::Missing), 5000),
                (0x400, 1, memory(BAR + 0x3000, true), 20),
            ],
        ),
    ]
}

/// Words are for readers: in another language, or of a device whose owner has chosen its name, the same is advised.
#[test]
fn advice_does_not_depend_on_words() {
    let mut all = BTreeSet::new();
    for mut report in of_every_device() {
        let before = advise(&report);
        for site in &mut report.sites {
            let place = site.place.as_mut().unwrap();
            // Each was the beginning of another device's name, or of another register's.
            (place.device, place.register) = ("virtio-blk IDE e1000 PIT".into(), "BAR 5 + 0x138".into());
            (site.reason_name, site.row.name) = ("HLT".into(), "acpi_pm_read+0x1".into());
        }
        let after = advise(&report);
        let core = |found: &[Finding]| {
            let core =
                |one: &Finding| (one.id.clone(), one.about.clone(), one.gain, one.certainty, one.action);
            found.iter().map(core).collect::<Vec<_>>()
        };
        assert_eq!(core(&before), core(&after));
        all.extend(before.into_iter().map(|finding| finding.id));
    }
    for id in [
        "ahci",
        "hpet",
        "ide",
        "io-delay",
        "lsi",
        "moderation",
        "napi",
        "nic",
        "page-faults",
        "pit",
        "pm-timer",
        "posted-interrupts",
        "scheduler",
        "serial",
        "tick",
        "virtio-notifications",
        "x2apic",
    ] {
        assert!(all.contains(id), "{id} is among what was compared: {all:?}");
    }
}

/// A sequence is compared by where it begins, whatever its id says.
#[test]
fn a_sequence_is_found_again_by_where_it_begins() {
    let row: Vec<_> = (0x1f2..=0x1f7).map(|number| (0x7b, 0x101, port(number, 1, true), 1)).collect();
    let report = report(&row.repeat(400));
    let found = find(&report, "sequence-f1");
    near(found.rate_in(&report), 2400.0);
    near(Finding { id: "sequence-f2".into(), ..found.clone() }.rate_in(&report), 2400.0);
    near(Finding { sequence: Some(RunStart::Address(0x101)), ..found }.rate_in(&report), 0.0);
}

/// A thousand sites are listed; what is rare adds up beyond them.
#[test]
fn rules_see_sites_that_are_not_listed() {
    let mut exits: Vec<_> = (0..1000).map(|n| (0x72, n << 8, Detail::Cpuid { leaf: n as u32 }, 2)).collect();
    exits.extend((1000..1200).map(|n| (0x7b, n << 8, port(0x608, 4, false), 1)));
    let report = report(&exits);
    assert_eq!(
        (report.sites.len(), report.sites.iter().filter(|site| site.row.count == 1).count()),
        (1000, 0)
    );
    near(report.findings.iter().find(|finding| finding.id == "pm-timer").unwrap().gain, 200.0);
}
