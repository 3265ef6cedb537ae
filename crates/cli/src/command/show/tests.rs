//! Reports for tests, and what people read of them.

use std::collections::BTreeMap;

use ioplane_api::report::{
    EventReport, FunctionReport, QuiesceReport, RegionReport, ServedState, Stage, TrafficReport,
    WatchFaultReport, WatchReport,
};

use super::{device, pci};

/// A mediated function of the host that nobody uses.
pub fn function(name: &str) -> FunctionReport {
    FunctionReport {
        name: name.to_owned(),
        state: ServedState::Served,
        error: None,
        remedy: None,
        retry: None,
        origin: "added".to_owned(),
        connected: false,
        connections: 0,
        vm: None,
        socket: format!("/run/ioplane/{name}.sock").into(),
        mode: "virtual".to_owned(),
        host: Some("0000:00:05.0".to_owned()),
        model: Some("rtl8139".to_owned()),
        id: Some("10ec:8139".to_owned()),
        on_fault: Some("dma=stop,register=ignore".to_owned()),
        switch: None,
        tap: None,
        mac: None,
        guard: "/run/ioplane/unmovable.vdi".into(),
        stage: Stage::Running,
        held_ms: None,
        front_end_faults: BTreeMap::new(),
        last_front_end_fault: None,
        traffic: TrafficReport::default(),
        watch: None,
        chip: None,
        hardware_faults: BTreeMap::new(),
        not_reset: None,
        unusable: None,
        no_replay: None,
        physical: None,
        step: None,
        port: None,
        cooperation: None,
        mapped_pages: None,
    }
}

fn fault() -> WatchFaultReport {
    WatchFaultReport {
        name: "descriptor-outside".into(),
        cause: "dma".into(),
        count: 2,
        last: "descriptor 3 points at 0xfee00000".into(),
    }
}

#[test]
fn functions_are_listed_with_what_is_wrong_with_them() {
    let mut stopped = function("nic1");
    stopped.connected = true;
    stopped.watch =
        Some(WatchReport { stopped: true, denied: 1, faults: vec![fault()], ..WatchReport::default() });
    let mut soft = function("soft");
    (soft.mode, soft.host, soft.on_fault) = ("emulated".into(), None, None);
    (soft.switch, soft.stage) = (Some("lan".into()), Stage::Held);
    let text = pci::functions(&[stopped, soft]);
    let expected = "\
NAME  STATE    MODE      BACKEND                 VM  ORIGIN  SOCKET
nic1  STOPPED  virtual   0000:00:05.0 (rtl8139)   -  added   /run/ioplane/nic1.sock
soft  held     emulated  rtl8139 on switch lan    -  added   /run/ioplane/soft.sock
nic1 has been stopped: descriptor 3 points at 0xfee00000
  hint: restart the guest; to be less strict: ioplane pci add --on-fault
";
    assert_eq!(text, expected);
}

#[test]
fn one_function_is_shown_whole() {
    let mut one = function("nic1");
    one.held_ms = Some(12_300);
    one.stage = Stage::Held;
    one.traffic = TrafficReport {
        reads: 7,
        writes: 5,
        memory_bytes: 1 << 30,
        memory_ranges: 2,
        ..TrafficReport::default()
    };
    one.watch = Some(WatchReport {
        states: ["receive", "transmit"]
            .map(|r| RegionReport { region: r.into(), state: "Idle".into() })
            .into(),
        reusable: true,
        accesses: 200,
        hooked: 30,
        hooked_percent: 15.0,
        shadow_page: true,
        dma_vetted: 4,
        dma_bytes: 4096,
        interrupts: 9,
        interrupts_given: 8,
        denied: 2,
        faults: vec![fault()],
        events: vec![EventReport { number: 1, at_us: 5, what: "transmit: Idle -> Run by TxPoll".into() }],
        ..WatchReport::default()
    });
    let expected = "\
nic1: 0000:00:05.0 (rtl8139), virtual, held
  socket            /run/ioplane/nic1.sock
  VM                none; 0 so far
  vendor:device     10ec:8139
  on a fault        dma=stop,register=ignore
  held              resumes by itself in 12.3 s: ioplane pci resume nic1
  states            receive Idle | transmit Idle (reusable)
  accesses          200, hooked 30 (15.0 %)
  shadow page       in use: reads of registers do not exit
  DMA vetted        4, 4K
  denied            2
                    2 descriptor-outside (dma): descriptor 3 points at 0xfee00000
  interrupts        9, 8 given
                    transmit: Idle -> Run by TxPoll
  from the VMM      7 reads, 5 writes
  guest memory      1G in 2 ranges
";
    assert_eq!(pci::function(&one), expected);
}

#[test]
fn how_a_function_came_to_rest_is_said() {
    let mut report = QuiesceReport {
        name: "nic1".into(),
        drained: true,
        waited_us: 1500,
        reason: None,
        connected: true,
        held_ms: 30_000,
    };
    assert!(pci::quiesced(&report).starts_with("nic1 was drained after 1.5 ms; its guest waits."));
    (report.drained, report.reason) = (false, Some("frames are being sent".into()));
    assert!(pci::quiesced(&report).starts_with("nic1 was suspended (frames are being sent) after 1.5 ms"));
    let alone = pci::quiesced(&QuiesceReport { connected: false, drained: true, ..report });
    assert!(alone.starts_with("nic1 was drained after 1.5 ms; no VM is connected: one that"), "{alone}");
}

#[test]
fn why_no_frames_pass_is_said() {
    for (set, up, connected, said) in [
        ("up", true, true, "up; frames pass"),
        ("up", false, false, "up; no frames pass, as no VM is connected"),
        ("up", false, true, "up; no frames pass, as the guest's driver has not started the NIC"),
        ("down", false, true, "down; no frames pass"),
        ("down", false, false, "down; no frames pass"),
    ] {
        assert_eq!(device::link(set, up, connected), said);
    }
}

#[test]
fn hole_10_a_function_that_takes_no_guest_says_so_and_what_to_do() {
    let mut one = function("nic1");
    one.unusable = Some("0000:00:05.0 has not come out of its reset in 100 ms".into());
    let text = pci::functions(&[one]);
    let told = "nic1 takes no guest: 0000:00:05.0 has not come out of its reset in 100 ms\n";
    assert!(text.contains(" UNUSABLE ") && text.contains(told), "{text}");
    assert!(text.contains("ioplane pci reset nic1"), "{text}");
}
