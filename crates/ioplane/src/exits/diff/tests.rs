//! Recordings of events that are written down here.

use std::time::Duration;

use ioplane_exits::{Detail, Event, Names, Profile, Reason, Subject, Thread, WatchCounts};
use ioplane_kvmstat::Vm;
use ioplane_symbols::GuestFunction;

use super::*;

const TIMER: Detail = Detail::Port { port: 0x608, width: 4, write: false, queue: None };
const IDE: Detail = Detail::Port { port: 0x1f7, width: 1, write: true, queue: None };
/// AMD's codes.
const PORT: u64 = 0x7b;
const HALT: u64 = 0x78;
/// Its functions are known; below it none is.
const KERNEL: u64 = 0xffff_ffff_8100_0000;

/// Code, address, about what, how many, and how long each takes in ns where that is known.
type Exits = (u64, u64, Detail, u64, Option<u64>);

/// Two seconds of these exits. Each 256 bytes of the kernel are a function.
fn recorded(exits: &[Exits]) -> ExitRecording {
    let (mut profile, mut thread, mut at) = (Profile::default(), Thread::default(), 0);
    for (code, rip, detail, count, ns) in exits {
        for _ in 0..*count {
            let reason = Reason::from_kvm(2, *code);
            profile.take(&mut thread, at, Event::Exit { reason, rip: *rip, vcpu: Some(0), detail: *detail });
            if let Some(ns) = ns {
                at += ns;
                profile.take(&mut thread, at, Event::Entry { vcpu: Some(0) });
            }
        }
    }
    profile.end(&mut thread);
    let function = |rip: u64| {
        (rip >= KERNEL).then(|| GuestFunction { name: format!("f{:x}", rip >> 8), offset: rip & 0xff })
    };
    let vm = Vm {
        pid: 1,
        name: "web".into(),
        program: "qemu".into(),
        vcpus: 1,
        vm_fds: vec![9],
        command: Vec::new(),
    };
    let names = Names { function: Some(&function), ..Names::default() };
    let seen = WatchCounts::default();
    let subject = Subject { vm: &vm, time: Duration::from_secs(2), seen, sample: 1 };
    ExitRecording::new(Report::new(subject, &profile, None, &names))
}

/// The same without times.
fn recording(exits: &[(u64, u64, Detail, u64)]) -> ExitRecording {
    let untimed: Vec<_> =
        exits.iter().map(|(code, rip, detail, count)| (*code, *rip, *detail, *count, None)).collect();
    recorded(&untimed)
}

/// 31 exits that take time, and ten halts of a millisecond each.
fn timed() -> ExitRecording {
    recorded(&[
        (PORT, KERNEL, TIMER, 30, Some(2000)),
        (HALT, KERNEL + 0x100, Detail::Nothing, 10, Some(1_000_000)),
        (PORT, KERNEL + 0x200, IDE, 1, Some(4000)),
    ])
}

fn diff(before: &ExitRecording, after: &ExitRecording) -> ExitDiff {
    ExitDiff::new(before, after, &[]).unwrap()
}

fn checks(before: &ExitRecording, after: &ExitRecording, limits: &[&str]) -> Result<ExitDiff, String> {
    let limits: Vec<_> = limits.iter().map(|limit| ExitLimit::parse(limit).unwrap()).collect();
    ExitDiff::new(before, after, &limits)
}

#[test]
fn what_changed_most_comes_first() {
    let before = recording(&[(PORT, KERNEL, TIMER, 100), (HALT, KERNEL + 0x100, Detail::Nothing, 40)]);
    let after = recording(&[(HALT, KERNEL + 0x100, Detail::Nothing, 44), (PORT, KERNEL + 0x200, IDE, 10)]);
    let diff = diff(&before, &after);
    assert_eq!((diff.all.before, diff.all.after, diff.all.change), (70.0, 27.0, -43.0));
    let reasons: Vec<_> = diff.reasons.iter().map(|row| (row.reason.as_str(), row.change.change)).collect();
    assert_eq!(reasons, [("I/O instruction", -45.0), ("HLT", 2.0)]);
    let sites: Vec<_> = diff.sites.iter().map(|row| (row.register.as_str(), row.change.ratio)).collect();
    assert_eq!(sites[0], ("ACPI power management: PM timer (q35, i440fx), in 32", Some(0.0)));
    assert_eq!((sites[1].1, sites[2]), (None, ("", Some(1.1))));
    let text = diff.to_string();
    for word in ["gone", "new", "-50.0", "(all)", " s, 140 exits"] {
        assert!(text.contains(word), "{word:?} in {text}");
    }
    assert!(diff.notes.is_empty(), "{:?}", diff.notes);
}

#[test]
fn another_offset_in_the_same_function_is_the_same_site() {
    let before = recording(&[(PORT, KERNEL + 1, TIMER, 10), (PORT, KERNEL + 5, TIMER, 10)]);
    let after = recording(&[(PORT, KERNEL + 9, TIMER, 30)]);
    let diff = diff(&before, &after);
    assert_eq!(diff.sites.len(), 1, "{:?}", diff.sites);
    assert_eq!((diff.sites[0].change.before, diff.sites[0].change.after), (10.0, 15.0));
}

#[test]
fn what_makes_two_recordings_differ_by_themselves_is_said() {
    let mut before = recording(&[(PORT, 0x1000, TIMER, 10)]);
    let mut after = recording(&[(PORT, 0x2000, TIMER, 10)]);
    before.machine.processor = "other".into();
    after.report.sample = 100;
    before.report.lost = 5;
    let notes = diff(&before, &after).notes;
    for (note, word) in notes.iter().zip(["compare counts, not times", "5 of 10 exits", "a sample", "100 %"])
    {
        assert!(note.contains(word), "{word:?} in {notes:?}");
    }
    assert_eq!(notes.len(), 4);
    let mut newer = before.clone();
    newer.machine.kernel = "9.9".into();
    assert!(diff(&before, &newer).notes[0].contains("kernels differ"));
}

#[test]
fn limits_are_checked_for_all_and_by_name() {
    let before = recording(&[(PORT, KERNEL, TIMER, 100), (HALT, KERNEL + 0x100, Detail::Nothing, 100)]);
    let after = recording(&[(PORT, KERNEL, TIMER, 120), (HALT, KERNEL + 0x100, Detail::Nothing, 100)]);
    let failed = |limit: &str| checks(&before, &after, &[limit]).unwrap().failed();
    assert!(failed("exits/s>+9%") && !failed("exits/s>+11%"));
    assert!(failed("exits/s[I/O instruction]>+19%") && !failed("exits/s[I/O instruction]>+21%"));
    assert!(
        failed("exits/s[ACPI power management: PM timer (q35, i440fx), in 32]>59")
            && !failed("exits/s[HLT]>+0")
    );
    let function = format!("exits/s[{}]>+5", before.report.functions[0].name);
    assert!(failed(&function), "{function}");
    // What neither has is none, and that is said.
    let absent = checks(&before, &after, &["exits/s[nothing]>+0%", "exits/s>1"]).unwrap();
    assert!(absent.checks[0].absent && !absent.checks[0].failed && absent.checks[1].failed);
    let text = absent.to_string();
    assert!(text.contains("neither recording") && text.contains("FAILED  exits/s>1"), "{text}");
}

/// A guest that sleeps longer has no dearer exits.
#[test]
fn waiting_is_no_time_of_an_exit() {
    let recording = timed();
    let all = diff(&recording, &recording).all;
    // 30 of 2 us and one of 4; ten halts of a millisecond each.
    assert!(all.us_after.is_some_and(|us| (us - 64.0 / 31.0).abs() < 0.01), "{all:?}");
    let named = checks(&recording, &recording, &["us/exit[HLT]>999"]).unwrap();
    assert!(named.failed(), "{named}");
}

/// A limit that cannot be checked has not passed.
#[test]
fn a_time_that_is_not_known_is_no_pass() {
    let untimed = recording(&[(PORT, KERNEL, TIMER, 10)]);
    let timed = timed();
    assert!(checks(&timed, &untimed, &["us/exit>1000"]).unwrap_err().contains("the second recording"));
    assert!(checks(&untimed, &timed, &["us/exit>+1%"]).unwrap_err().contains("the first recording"));
    assert!(!checks(&untimed, &timed, &["us/exit>999999"]).unwrap().failed());
    assert!(!checks(&timed, &timed, &["us/exit>+0%"]).unwrap().failed());
}

#[test]
fn a_recording_s_words_do_not_reach_the_terminal() {
    let mut bad = recording(&[(PORT, KERNEL, TIMER, 10)]);
    let evil = "\u{1b}]0;x\u{7}\n";
    (bad.report.vm, bad.machine.name, bad.machine.kernel) = (evil.into(), evil.into(), evil.into());
    (bad.report.reasons[0].name, bad.report.sites[0].reason_name) = (evil.into(), evil.into());
    let text = checks(&bad, &bad, &["exits/s[\u{1b}]>1"]).unwrap().to_string();
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}
