//! A report of events that are written down here.

use ioplane_symbols::{Instruction, Symbols};

use super::*;
use crate::event::{Event, FaultCause};
use crate::profile::Thread;
use crate::vmm::VmmRow;

const KERNEL: u64 = 0xffff_ffff_8100_0000;

fn profile() -> Profile {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let mut at = 0;
    let mut add = |code: u64, rip: u64, detail: Detail, ns: u64| {
        let reason = Reason::from_kvm(2, code);
        profile.take(&mut thread, at, Event::Exit { reason, rip, vcpu: Some(0), detail });
        at += ns;
        profile.take(&mut thread, at, Event::Entry { vcpu: Some(0) });
    };
    let timer = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
    for _ in 0..30 {
        add(0x7b, KERNEL + 0x1010, timer, 2000);
    }
    for _ in 0..10 {
        add(0x78, KERNEL + 0x2020, Detail::Nothing, 1_000_000);
    }
    add(0x7b, 0x40_1018, Detail::Port { port: 0xeee0, width: 1, write: true, queue: None }, 4000);
    profile
}

fn report(seen: WatchCounts, sample: u64) -> Report {
    let function = |rip: u64| {
        let at = rip.checked_sub(KERNEL + 0x1000)?;
        (at < 0x1000).then(|| format!("acpi_pm_read+{at:#x}").into())
    };
    report_of(&profile(), seen, sample, &function)
}

/// A report with times, for tests of what reports are put to.
pub(crate) fn a_report() -> Report {
    report(WatchCounts { counted: 41, ..WatchCounts::default() }, 1)
}

fn report_of(
    profile: &Profile,
    seen: WatchCounts,
    sample: u64,
    function: &dyn Fn(u64) -> Option<GuestFunction>,
) -> Report {
    report_by(profile, seen, sample, &Names { function: Some(function), ..Names::default() })
}

fn report_by(profile: &Profile, seen: WatchCounts, sample: u64, names: &Names<'_>) -> Report {
    let vm = Vm {
        pid: 1,
        name: "web".into(),
        program: "qemu".into(),
        vcpus: 1,
        vm_fds: vec![9],
        command: Vec::new(),
    };
    let subject = Subject { vm: &vm, time: Duration::from_secs(2), seen, sample };
    Report::new(subject, profile, None, names)
}

/// Exits of these: AMD's code, address, detail, how many. They have no times.
fn untimed(exits: &[(u64, u64, Detail, u64)]) -> Profile {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    for (code, rip, detail, count) in exits {
        for at in 0..*count {
            let reason = Reason::from_kvm(2, *code);
            profile.take(&mut thread, at, Event::Exit { reason, rip: *rip, vcpu: Some(0), detail: *detail });
        }
    }
    profile.end(&mut thread);
    profile
}

#[test]
fn groups_add_up() {
    let report = report(WatchCounts { counted: 41, ..WatchCounts::default() }, 1);
    assert_eq!((report.exits, report.recorded, report.lost), (41, 41, 0));
    let first = &report.registers[0];
    assert_eq!(first.name, "ACPI power management: PM timer (q35, i440fx), in 32");
    assert_eq!((first.count, first.ns_each), (30, Some(2000)));
    let functions: Vec<_> = report.functions.iter().map(|row| (row.name.as_str(), row.count)).collect();
    assert_eq!(functions, [("acpi_pm_read", 30), ("(user space or firmware)", 1)]);
    // HLT is waiting: all of the busy time is the ports'.
    assert!((report.functions.iter().map(|row| row.host_percent).sum::<f64>() - 100.0).abs() < 1e-9);
    assert_eq!(report.reasons.iter().find(|row| row.name == "HLT").unwrap().host_percent, 0.0);
    assert!((report.functions_percent - 30.0 * 100.0 / 40.0).abs() < 1e-9);
    assert!((report.devices_percent - 30.0 * 100.0 / 31.0).abs() < 1e-9);
    assert!((report.attributed_percent - 30.0 * 100.0 / 41.0).abs() < 1e-9);
    // Nor is a vCPU's share more than all of it.
    assert!((report.by_vcpu[0].host_percent - 100.0).abs() < 1e-9, "{:?}", report.by_vcpu);
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    let text = report.to_string();
    assert!(text.contains("port 0xeee0, out 8") && text.contains("web (qemu"), "{text}");
}

/// Who tells when threads have no processor also tells where the time went; the parts are all of it.
#[test]
fn where_the_time_went() {
    let of = |switches: bool| {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        profile.switches = switches;
        let reason = Reason::from_kvm(2, 0x7b);
        for at in (0..100_000).step_by(1000) {
            for (after, event) in [
                (0, Event::Exit { reason, rip: KERNEL, vcpu: Some(0), detail: Detail::Nothing }),
                (100, Event::SwitchedOut { preempted: true }),
                (150, Event::SwitchedIn),
                (200, Event::UserSpace),
                (400, Event::Entry { vcpu: Some(0) }),
            ] {
                profile.take(&mut thread, at + after, event);
            }
        }
        report_of(&profile, WatchCounts { counted: 100, ..WatchCounts::default() }, 1, &|_| None)
    };
    let report = of(true);
    let parts = HostParts { kvm_ns: 15_000, vmm_ns: 20_000, preempted_ns: 5_000, blocked_ns: 0 };
    assert_eq!((report.sites[0].row.parts, report.reasons[0].parts), (Some(parts), Some(parts)));
    let times = report.sites[0].times.unwrap();
    assert!(times.median_ns.abs_diff(400) < 26 && times.max_ns == 400, "{times:?}");
    assert!(report.to_string().contains("37.5   50.0      12.5       0.0"), "{report}");
    let untold = of(false);
    assert_eq!((untold.sites[0].row.parts, untold.reasons[0].parts), (None, None));
    assert!(!untold.to_string().contains("preempt"), "{untold}");
}

#[test]
fn what_was_lost_is_said() {
    let report = report(WatchCounts { counted: 82, ..WatchCounts::default() }, 1);
    assert_eq!((report.exits, report.lost), (82, 41));
    assert!(report.notes[0].contains("41 exits (50.00 %)"), "{:?}", report.notes);
}

#[test]
fn a_sample_is_scaled() {
    // One hundredth of the two seconds; 41 were recorded of 82.
    let recorded = (Duration::from_millis(20), 10);
    let whole = report(WatchCounts { counted: 41, recorded, ..WatchCounts::default() }, 100);
    assert_eq!((whole.exits, whole.lost, whole.registers[0].count), (4100, 0, 3000));
    assert_eq!((whole.registers[0].ns_each, whole.registers[0].host_ns), (Some(2000), 6_000_000));
    assert!(whole.notes[0].contains("20 ms in 10 slices"), "{:?}", whole.notes);
    let half = report(WatchCounts { counted: 82, recorded, ..WatchCounts::default() }, 100);
    assert_eq!((half.exits, half.lost, half.registers[0].count), (8200, 4100, 3000));
}

#[test]
fn numbers_are_no_names() {
    let profile = untimed(&[
        (0x7c, KERNEL, Detail::Msr { index: 0x12345, write: true }, 10),
        (0x7c, KERNEL, Detail::Msr { index: 0x6e0, write: true }, 10),
        (0x7b, KERNEL, Detail::Nothing, 20),
        (0x72, KERNEL, Detail::Cpuid { leaf: 1 }, 100),
        (0x81, KERNEL, Detail::Hypercall { number: 99 }, 100),
        (0x400, KERNEL, Detail::Fault(FaultCause::Missing), 100),
    ]);
    let function = |_: u64| Some("f+0x1".to_owned().into());
    let report = report_of(&profile, WatchCounts { counted: 680, ..WatchCounts::default() }, 1, &function);
    assert!((report.devices_percent - 25.0).abs() < 1e-9, "{}", report.devices_percent);
    // Of 680, 340 were lost, and 30 of the rest are about a register without a name.
    let attributed = 310.0 * 100.0 / 680.0;
    assert!((report.attributed_percent - attributed).abs() < 1e-9, "{}", report.attributed_percent);
}

#[test]
fn interrupts_are_charged_to_no_function() {
    let timer = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
    let exits =
        [(0x60, KERNEL, Detail::Nothing, 50), (0x64, KERNEL, Detail::Nothing, 7), (0x7b, KERNEL, timer, 30)];
    let function = |_: u64| Some("acpi_pm_read+0xd".to_owned().into());
    let report =
        report_of(&untimed(&exits), WatchCounts { counted: 87, ..WatchCounts::default() }, 1, &function);
    let rows: Vec<_> =
        report.functions.iter().map(|row| (row.name.as_str(), row.count, row.unnamed)).collect();
    assert_eq!(rows, [("(interrupts, which come anywhere)", 57, true), ("acpi_pm_read", 30, false)]);
}

/// Wherever interrupts arrive, they are neither named nor missing.
#[test]
fn interrupts_count_in_no_share() {
    let timer = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
    let function = |rip: u64| (rip == KERNEL).then(|| "acpi_pm_read+0xd".to_owned().into());
    // A host interrupt, and an interrupt window.
    for code in [0x60, 0x64] {
        for place in [KERNEL, KERNEL + 0x1000, 0x40_1000] {
            let exits =
                [(code, place, Detail::Nothing, 50), (0x7b, KERNEL, timer, 30), (0x7b, 0x40_1000, timer, 10)];
            let seen = WatchCounts { counted: 100, ..WatchCounts::default() };
            let report = report_of(&untimed(&exits), seen, 1, &function);
            // Of 50 that the guest caused 30 are named, 10 are user space's and 10 are lost.
            let shares = (report.attributed_percent, report.functions_percent);
            assert!(
                (shares.0 - 60.0).abs() < 1e-9 && (shares.1 - 100.0).abs() < 1e-9,
                "{code:#x} {place:#x}: {shares:?}"
            );
        }
    }
}

#[test]
fn a_kernel_of_32_bits_is_no_user_space() {
    let timer = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
    let profile = untimed(&[
        (0x7b, 0xc064_42dd, timer, 30),
        (0x7b, 0xf800_0000, timer, 10),
        (0x7b, 0xb7f0_0000, timer, 5),
    ]);
    let function = |rip: u64| (rip == 0xc064_42dd).then(|| "acpi_pm_read+0xd".to_owned().into());
    let report = report_of(&profile, WatchCounts { counted: 45, ..WatchCounts::default() }, 1, &function);
    assert!((report.functions_percent - 75.0).abs() < 1e-9, "{}", report.functions_percent);
    let rows: Vec<_> = report.functions.iter().map(|row| (row.name.as_str(), row.count)).collect();
    assert_eq!(rows, [("acpi_pm_read", 30), ("(user space or firmware)", 5)]);
}

#[test]
fn the_picture_is_of_all_exits() {
    let sites: Vec<_> = (0..1500)
        .map(|n| (0x7b, n, Detail::Port { port: 0x608, width: 4, write: false, queue: None }, 1))
        .collect();
    let report =
        report_of(&untimed(&sites), WatchCounts { counted: 2000, ..WatchCounts::default() }, 1, &|_| None);
    assert_eq!(report.sites.len(), 1000);
    let picture = report.svg();
    for title in [
        "all exits: 2000 exits (100.00 %)<",
        "I/O instruction: 1500 exits (75.00 %)<",
        "(sites too rare to be listed): 500 exits (25.00 %)<",
        "(lost): 500 exits (25.00 %)<",
    ] {
        assert!(picture.contains(title), "{title} in {picture}");
    }
    assert!(!picture.contains("host time"), "none was timed: {picture}");
    let timed = self::report(WatchCounts { counted: 41, ..WatchCounts::default() }, 1).svg();
    assert!(timed.contains("30 exits (73.17 %), 2.0 us of host time each"), "{timed}");
}

#[test]
fn runs_are_told_with_their_ports() {
    let out = |port: u16| Detail::Port { port, width: 1, write: true, queue: None };
    let row: Vec<_> = (0x1f2..=0x1f7).map(|port| (0x7b, KERNEL, out(port), 1)).collect();
    let profile = untimed(&row.repeat(40));
    let function = |_: u64| Some("iowrite8+0x1".to_owned().into());
    let report = report_of(&profile, WatchCounts { counted: 240, ..WatchCounts::default() }, 1, &function);
    assert_eq!(report.runs.len(), 1);
    let run = &report.runs[0];
    assert_eq!((run.rip, run.times, run.longer), (KERNEL, 40, false));
    assert_eq!(run.accesses, (0x1f2..=0x1f7).map(out).collect::<Vec<_>>());
    assert!((run.rate - 20.0).abs() < 1e-9 && run.start() == RunStart::Function("iowrite8".into()));
    // A sample is whole while it lasts.
    let recorded = (Duration::from_secs(1), 500);
    let sample =
        report_of(&profile, WatchCounts { counted: 240, recorded, ..WatchCounts::default() }, 2, &function);
    assert_eq!((sample.runs[0].times, sample.exits), (80, 480));
}

#[test]
fn a_page_of_large_numbers_can_be_read() {
    let report = report(WatchCounts { counted: 1_234_567, ..WatchCounts::default() }, 1);
    let page = report.html();
    assert!(page.contains("1\u{202f}234\u{202f}567") && !page.contains("1234567 </dd>"), "{page}");
}

#[test]
fn json_comes_back() {
    let report = report(WatchCounts { counted: 41, ..WatchCounts::default() }, 1);
    let text = serde_json::to_string(&report).unwrap();
    let again: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(again.sites, report.sites);
    assert_eq!(again.exits, 41);
}

#[test]
fn the_page_needs_nothing_else_and_guests_cannot_write_into_it() {
    let mut report = report(WatchCounts { counted: 41, ..WatchCounts::default() }, 1);
    report.vm = "<script>alert(1)</script>\u{7}".into();
    report.sites[0].row.name = "a\"><img src=x>".into();
    let page = report.html();
    assert!(!page.contains("<script>alert") && !page.contains("<img"), "{page}");
    assert!(page.contains("PM timer") && page.contains("<svg") && page.contains("pm-timer"));
    // The name space is no address to load from.
    let links = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!links.contains("http:") && !links.contains("https:") && !links.contains("url("));
    assert!(!report.svg().contains('\u{7}'));
}

/// Programs read how sure the names are; they do not parse notes.
#[test]
fn how_sure_the_names_are_is_a_field() {
    let (start, end) = (KERNEL + 0x1000, KERNEL + 0x2000);
    let list = format!("{start:x} T acpi_pm_read\n{end:x} T other\nffffffffc0000000 t probe [module]\n");
    let told = |rip: u64| {
        let mut symbols = Symbols::parse(list.as_bytes(), "kallsyms".as_ref()).unwrap();
        let fit = symbols.fit([(rip, Instruction::Port)]);
        let seen = WatchCounts { counted: 41, ..WatchCounts::default() };
        let names = Names { symbols: Some(fit), ..Names::default() };
        serde_json::to_value(report_by(&profile(), seen, 1, &names)).unwrap()["symbols"].clone()
    };
    let fits = told(KERNEL + 0x1010);
    assert_eq!(
        (&fits["confidence"], &fits["matched"], &fits["seen"]),
        (&"low".into(), &1.into(), &1.into()),
        "{fits}"
    );
    let other = told(KERNEL - 0x10_0000);
    assert_eq!((&other["confidence"], &other["matched"]), (&"none".into(), &0.into()), "{other}");
    let without = serde_json::to_value(a_report()).unwrap();
    assert!(without.get("symbols").is_none());
}

#[test]
fn a_guest_of_the_guest_has_a_row_and_no_function() {
    let (mut profile, mut thread) = (Profile::default(), Thread::default());
    let timer = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
    for nested in [true, false] {
        let reason = Reason::from_kvm(2, 0x7b);
        profile.take(
            &mut thread,
            1,
            Event::Exit { reason, rip: KERNEL + 0x1010, vcpu: Some(0), detail: timer },
        );
        if nested {
            profile.take(&mut thread, 2, Event::Nested);
        }
        profile.take(&mut thread, 3, Event::Entry { vcpu: Some(0) });
    }
    let function = |rip: u64| (rip >= KERNEL).then(|| "acpi_pm_read+0x10".to_owned().into());
    let report = report_of(&profile, WatchCounts { counted: 2, ..WatchCounts::default() }, 1, &function);
    let functions: Vec<_> = report.functions.iter().map(|row| (row.name.as_str(), row.count)).collect();
    assert_eq!(functions, [("(a guest of this guest)", 1), ("acpi_pm_read", 1)]);
    assert_eq!(report.functions.iter().map(|row| row.unnamed).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn functions_of_the_vmm_are_a_table_of_their_own() {
    let row = |name: &str, samples: u64, unnamed: bool| VmmRow {
        name: name.into(),
        samples,
        percent: samples as f64 * 10.0,
        unnamed,
    };
    let time = VmmTime {
        samples: 10,
        interval_ns: 5_025_126,
        outside: 1,
        stripped: vec!["qemu".into()],
        unread: vec!["libc.so.6".into()],
        functions: vec![row("ioctl [libc.so.6]", 7, false), row("[<qemu>]+0x1234", 2, true)],
        ..VmmTime::default()
    };
    let report = Report { vmm: Some(time), ..a_report() };
    let text = report.to_string();
    let head = "in the VMM: 10 samples of its vCPU threads in user space, one in 5 ms, 1 outside its programs; \
                addresses stand for local functions of qemu: stripped; files that did not let themselves be read: libc.so.6\n         7  70.00  ioctl [libc.so.6]\n";
    assert!(text.contains(head), "{text}");
    let html = report.html();
    assert!(html.contains("<h2>In the VMM</h2>") && html.contains("[&lt;qemu&gt;]+0x1234"), "{html}");
    let json = serde_json::to_value(&report).unwrap();
    let unnamed = |at: usize| json["vmm"]["functions"][at].get("unnamed").cloned();
    assert_eq!((unnamed(0), unnamed(1)), (None, Some(true.into())));
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    assert!(serde_json::to_value(a_report()).unwrap().get("vmm").is_none());
}
