//! Drawing rates.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table};

use super::rates::{Rates, Sort};
use crate::command::show;
use crate::command::table::Table as Text;

const CORES: [&str; 9] =
    ["CORE", "MODE", "QUEUES", "BUSY %", "EMPTY %", "ASLEEP %", "CPU %", "UNITS/S", "SLEEPS/S"];
const GROUPS: [&str; 7] = ["GROUP", "CORES", "UNITS/S", "MB/S", "BUSY %", "EMPTY %", "EMPTY/S"];
const DECISIONS: [&str; 2] = ["S AGO", "DECIDED"];
const QUEUES: [&str; 17] = [
    "DEVICE", "KIND", "Q", "VM", "CORE", "UNITS/S", "MB/S", "KICKS/S", "AVOIDED", "INTR/S", "AVOIDED",
    "WAIT99", "P50", "P99", "INT99", "ARMED %", "WHY",
];
const FUNCTIONS: [&str; 9] =
    ["PCI", "MODE", "VM", "ACCESSES/S", "HOOKED %", "INTR/S", "DMA/S", "DENIED", "STATE"];
const PORTS: [&str; 5] = ["SWITCH", "PORT", "SENT/S", "RECEIVED/S", "DROPPED/S"];

/// Decisions that the live view shows.
const SHOWN_DECISIONS: usize = 5;

type Cells = Vec<String>;

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

fn cores(rates: &Rates) -> Vec<Cells> {
    let row = |core: &super::rates::CoreRates| {
        vec![
            core.id.to_string(),
            core.notify.clone(),
            core.queues.to_string(),
            format!("{:.1}", core.busy_percent),
            format!("{:.1}", core.empty_percent),
            format!("{:.1}", core.asleep_percent),
            format!("{:.1}", core.cpu_percent),
            whole(core.units_per_s),
            whole(core.sleeps_per_s),
        ]
    };
    rates.cores.iter().map(row).collect()
}

fn groups(rates: &Rates) -> Vec<Cells> {
    let row = |group: &super::rates::GroupRates| {
        let cores: Vec<String> = group.cores.iter().map(u32::to_string).collect();
        vec![
            group.name.clone(),
            if cores.is_empty() { "-".to_owned() } else { cores.join(",") },
            whole(group.units_per_s),
            format!("{:.1}", group.mb_per_s),
            format!("{:.1}", group.busy_percent),
            format!("{:.1}", group.empty_percent),
            whole(group.empty_polls_per_s),
        ]
    };
    rates.groups.iter().map(row).collect()
}

/// The last `most` of them.
fn decisions(rates: &Rates, most: usize) -> Vec<Cells> {
    let last = &rates.decisions[rates.decisions.len().saturating_sub(most)..];
    last.iter().map(|one| vec![format!("{:.1}", show::ago(one)), one.text.clone()]).collect()
}

fn queues(rates: &Rates) -> Vec<Cells> {
    let row = |queue: &super::rates::QueueRates| {
        let core = queue.core.map_or("-".to_owned(), |core| core.to_string());
        vec![
            queue.device.clone(),
            queue.fault.clone().unwrap_or(queue.kind.to_owned()),
            queue.queue.to_string(),
            queue.vm.clone().unwrap_or("-".to_owned()),
            core,
            whole(queue.units_per_s),
            format!("{:.1}", queue.mb_per_s),
            whole(queue.kicks_per_s),
            whole(queue.kicks_avoided_per_s),
            whole(queue.interrupts_per_s),
            whole(queue.interrupts_avoided_per_s),
            whole(queue.wait_p99_us),
            whole(queue.p50_us),
            whole(queue.p99_us),
            whole(queue.interrupt_p99_us),
            queue.armed_percent.map_or("-".to_owned(), whole),
            queue.why.clone().unwrap_or("-".to_owned()),
        ]
    };
    rates.queues.iter().map(row).collect()
}

fn ports(rates: &Rates) -> Vec<Cells> {
    let row = |port: &super::rates::PortRates| {
        vec![
            port.switch.clone(),
            port.port.clone(),
            whole(port.sent_per_s),
            whole(port.received_per_s),
            whole(port.dropped_per_s),
        ]
    };
    rates.ports.iter().map(row).collect()
}

fn functions(rates: &Rates) -> Vec<Cells> {
    let or_dash = |value: Option<String>| value.unwrap_or("-".to_owned());
    let row = |function: &super::rates::FunctionRates| {
        // What its model says is of no use while it has stopped, and says more than a word otherwise.
        let states = function.states.clone().filter(|_| matches!(function.standing, "in use" | "waiting"));
        vec![
            function.name.clone(),
            function.mode.clone(),
            or_dash(function.vm.clone()),
            whole(function.accesses_per_s),
            or_dash(function.hooked_percent.map(|share| format!("{share:.1}"))),
            whole(function.interrupts_per_s),
            or_dash(function.dma_vetted_per_s.map(whole)),
            or_dash(function.denied.map(|denied| denied.to_string())),
            states.unwrap_or(function.standing.to_owned()),
        ]
    };
    rates.functions.iter().map(row).collect()
}

/// As plain text, for a look.
pub fn text(rates: &Rates) -> String {
    let table = |head: &[&'static str], rows: Vec<Cells>| {
        let mut table = Text::new(head);
        rows.into_iter().for_each(|row| table.row(row));
        table.to_string()
    };
    let mut text: String = rates.failures.iter().map(|failure| failure.words() + "\n").collect();
    text.push_str(&table(&CORES, cores(rates)));
    let more = [
        (&GROUPS[..], groups(rates)),
        (&QUEUES[..], queues(rates)),
        (&FUNCTIONS[..], functions(rates)),
        (&PORTS[..], ports(rates)),
        (&DECISIONS[..], decisions(rates, usize::MAX)),
    ];
    for (head, rows) in more {
        if !rows.is_empty() {
            text.push_str(&format!("\n{}", table(head, rows)));
        }
    }
    text
}

/// As wide as the widest of each column, and one more.
fn table(head: &[&'static str], rows: Vec<Cells>) -> Table<'static> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0) as u16 + 1
    };
    let widths: Vec<Constraint> = (0..head.len()).map(|column| Constraint::Length(width(column))).collect();
    let bold = Style::new().add_modifier(Modifier::REVERSED);
    let head = Row::new(head.to_vec()).style(bold);
    Table::new(rows.into_iter().map(Row::new), widths).header(head).column_spacing(1)
}

/// The whole screen. What does not fit below is cut off: sorting brings up what matters.
pub fn draw(frame: &mut Frame<'_>, rates: &Rates, sort: Sort) {
    let (cores, queues, ports, functions) = (cores(rates), queues(rates), ports(rates), functions(rates));
    let (groups, decisions) = (groups(rates), decisions(rates, SHOWN_DECISIONS));
    let height = |rows: &[Cells]| Constraint::Length(if rows.is_empty() { 0 } else { rows.len() as u16 + 2 });
    let failures: Vec<Line<'_>> = rates.failures.iter().map(|failure| Line::from(failure.words())).collect();
    let failed = Constraint::Length(if failures.is_empty() { 0 } else { failures.len() as u16 + 1 });
    let (upper, beside) = (height(&cores), height(&functions));
    let (grouped, decided) = (height(&groups), height(&decisions));
    let parts =
        [Constraint::Length(2), failed, upper, decided, grouped, height(&ports), beside, Constraint::Min(3)];
    let [title, errors, upper, decided, grouped, middle, beside, lower] =
        Layout::vertical(parts).areas(frame.area());
    let line = format!(
        "ioplane {}   {:.1} s   sorted by {}   q quits, s sorts   times in microseconds",
        rates.version,
        rates.seconds,
        sort.word()
    );
    frame.render_widget(Paragraph::new(Line::from(line)), title);
    frame.render_widget(Paragraph::new(failures).style(Style::new().add_modifier(Modifier::BOLD)), errors);
    frame.render_widget(table(&CORES, cores), upper);
    if !decisions.is_empty() {
        frame.render_widget(table(&DECISIONS, decisions), decided);
    }
    if !groups.is_empty() {
        frame.render_widget(table(&GROUPS, groups), grouped);
    }
    if !ports.is_empty() {
        frame.render_widget(table(&PORTS, ports), middle);
    }
    if !functions.is_empty() {
        frame.render_widget(table(&FUNCTIONS, functions), beside);
    }
    frame.render_widget(table(&QUEUES, queues), lower);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use ioplane_api::report::{RegionReport, StatusReport, WatchReport};

    fn status(requests: u64, frames: u64) -> StatusReport {
        let counts = |count: u64, unit: &str| {
            format!(
                r#""{unit}": {count}, "bytes": {}, "kicks": {}, "kicks_avoided": {}, "kicks_per_{one}": 0, "interrupts": {},
                   "interrupts_per_{one}": 0, "interrupts_avoided": 7, "faults": 0, "p50_us": 12, "p99_us": 340,
                   "wait_p50_us": 1, "wait_p99_us": 9, "interrupt_p50_us": 2, "interrupt_p99_us": 6"#,
                count * 4096,
                count / 100,
                count / 10,
                count / 2,
                one = unit.trim_end_matches('s'),
            )
        };
        let disk_counts = format!(
            r#"{}, "bytes_read": 0, "bytes_written": 0, "replayed": 0,
               "errors": {{"io": 0, "space": 0, "request": 0, "unsupported": 0}}"#,
            counts(requests, "requests")
        );
        let port = format!(
            r#"{{"name": "net0", "uplink": false, "up": true, "isolated": false, "mac": null, "learned": 0, "waiting": 0,
                "sent_frames": {frames}, "sent_bytes": 0, "sent_drops": {{"storm": {}}}, "received_frames": 0,
                "received_bytes": 0, "received_drops": {{}}}}"#,
            frames / 4
        );
        let choice = format!(
            r#"{{"choice": "armed", "reason": "long_gaps", "for_us": 5, "spin_us": 0, "counts": [
                 {{"choice": "polled", "reason": "none", "why": "", "times": 1, "us": {requests}}},
                 {{"choice": "armed", "reason": "long_gaps", "why": "", "times": 1, "us": {}}}]}}"#,
            requests * 3
        );
        let text = format!(
            r#"{{"version": "0.1.0", "pid": 1, "uptime_s": 5, "config": "/x",
               "disks": [{{"name": "root", "state": "served", "error": null, "remedy": null, "origin": "config",
                 "connected": true, "connections": 1, "vm": {{"pid": 7, "name": "web"}}, "socket": "/r", "size": 1,
                 "backing": {{"kind": "memory", "path": null, "engine": null, "why_threads": null, "direct": null}},
                 "read_only": false, "serial": "s", "queue_size": 128, "core": null, "features": 0,
                 "front_end_faults": {{}}, "last_front_end_fault": null, "totals": {{{disk_counts}}},
                 "queues": [{{"index": 0, "size": 128, "core": 0, "fault": null, "choice": {choice}, {disk_counts}}}]}}],
               "switches": [{{"name": "lan", "origin": "config", "uplink": null, "uplink_core": null, "error": null,
                 "remedy": null, "ports": [{port}], "learned": 0}}],
               "nics": [{{"name": "net0", "state": "served", "error": null, "remedy": null, "origin": "added",
                 "connected": true, "connections": 1, "vm": {{"pid": 7, "name": "web"}}, "socket": "/n", "switch": "lan",
                 "mac": "02:00:00:00:00:01", "isolated": false, "vlan": "all", "pairs": 1, "queue_size": 256, "mtu": 1500,
                 "link": "up", "core": null, "features": 0, "front_end_faults": {{}}, "last_front_end_fault": null,
                 "port": {port}, "received": {{{zero}}}, "sent": {{{some}}},
                 "queues": [{{"index": 1, "role": "transmit", "size": 256, "core": 0, "fault": null, {some}}}]}}],
               "cores": [{{"id": 0, "cpu": null, "cpu_refused": null, "notify": "polled", "spin_us": 1, "yield_policy": "yields",
                 "queues": 3, "awake": 3, "busy_percent": 42.5, "sleeps": 0, "wakes": 0, "units": {requests}, "cpu_us": 0,
                 "age_us": 9}}]}}"#,
            zero = counts(0, "frames"),
            some = counts(frames, "frames"),
        );
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn a_screen_shows_cores_ports_and_queues_in_order() {
        let mut rates = Rates::between(&status(1000, 100), &status(3000, 20_100), 2.0);
        let mut terminal = Terminal::new(TestBackend::new(130, 14)).unwrap();
        let mut screen = |rates: &mut Rates, sort| {
            rates.sort(sort);
            terminal.draw(|frame| draw(frame, rates, sort)).unwrap();
            let text = terminal.backend().to_string();
            text.lines().map(|line| line.trim_matches('"').trim_end().to_owned()).collect::<Vec<_>>()
        };
        let lines = screen(&mut rates, Sort::Rate);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(lines[0].starts_with("ioplane 0.1.0   2.0 s   sorted by rate   q quits"), "{lines:#?}");
        assert_eq!(words(&lines[3]), ["0", "polled", "3", "42.5", "0.0", "0.0", "0.0", "1000", "0"]);
        assert_eq!(words(&lines[6]), ["lan", "net0", "10000", "0", "2500"]);
        let nic = [
            "net0", "transmit", "1", "web", "0", "10000", "41.0", "100", "1000", "5000", "0", "9", "12",
            "340", "6", "-", "-",
        ];
        let disk = [
            "root",
            "disk",
            "0",
            "web",
            "0",
            "1000",
            "4.1",
            "10",
            "100",
            "500",
            "0",
            "9",
            "12",
            "340",
            "6",
            "75",
            "long_gaps",
        ];
        assert_eq!(
            (words(&lines[9]), words(&lines[10])),
            (nic.map(str::to_owned).into(), disk.map(str::to_owned).into())
        );
        assert!(screen(&mut rates, Sort::Name)[0].contains("sorted by name"));
        rates.queues.reverse();
        let by_name = screen(&mut rates, Sort::Name);
        assert!(by_name[9].starts_with("net0") && by_name[10].starts_with("root"), "{by_name:#?}");
    }

    #[test]
    fn functions_have_what_their_monitor_saw() {
        let look = |accesses: u64, stopped| {
            let mut mediated = show::tests::function("card");
            mediated.connected = true;
            mediated.watch = Some(WatchReport {
                states: vec![RegionReport { region: "transmit".into(), state: "Idle".into() }],
                reusable: true,
                stopped,
                accesses,
                hooked: accesses / 4,
                hooked_percent: 25.0,
                interrupts: accesses / 10,
                dma_vetted: accesses / 2,
                denied: 3,
                ..WatchReport::default()
            });
            let mut direct = show::tests::function("as-is");
            direct.mode = "passthrough".into();
            (direct.traffic.reads, direct.traffic.writes) = (accesses, accesses);
            let mut status = status(0, 0);
            status.functions = vec![mediated, direct];
            status
        };
        let mut rates = Rates::between(&look(1000, false), &look(3000, false), 2.0);
        rates.sort(Sort::Rate);
        let mut terminal = Terminal::new(TestBackend::new(110, 18)).unwrap();
        terminal.draw(|frame| draw(frame, &rates, Sort::Rate)).unwrap();
        for shown in [text(&rates), terminal.backend().to_string()] {
            let row = |name: &str| {
                let line =
                    shown.lines().map(|line| line.trim_matches('"')).find(|line| line.starts_with(name));
                let line = line.unwrap_or_else(|| panic!("{name} is not in\n{shown}"));
                line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ")
            };
            assert_eq!(row("card"), "card virtual - 1000 25.0 100 500 3 transmit Idle (reusable)");
            assert_eq!(row("as-is"), "as-is passthrough - 2000 - 0 - - waiting");
            assert!(shown.find("as-is") < shown.find("card"), "by their rate:\n{shown}");
        }
        // None in between: the share is that of before. What has stopped says so.
        let rates = Rates::between(&look(3000, false), &look(3000, true), 1.0);
        let shown = text(&rates);
        let line = shown.lines().find(|line| line.starts_with("card")).unwrap_or_default();
        assert!(line.contains("25.0") && line.ends_with("STOPPED"), "{shown}");
        let began_anew = Rates::between(&look(3000, false), &look(10, false), 1.0);
        assert_eq!(began_anew.functions[0].accesses_per_s, 0.0);
    }

    /// After so many ms, of which the core had work for 30 %, found nothing for 60 % and slept for 10 %; a third of each is one group's.
    fn grouped(ms: u64) -> StatusReport {
        let mut status = status(ms, ms * 10);
        let core = &mut status.cores[0];
        (core.busy_us, core.empty_us, core.slept_us) = (ms * 300, ms * 600, ms * 100);
        let used = format!(r#""busy_us": {}, "empty_us": {}, "empty_polls": {ms}"#, ms * 100, ms * 200);
        let unused = r#""busy_us": 7, "empty_us": 7, "empty_polls": 7"#;
        let group = format!(
            r#"{{"name": "tenant", "origin": "config", "weight": 1, "disks": ["root"], "nics": ["other"], "used": {{{used}}},
               "used_per_core": [{{"core": 0, {used}}}, {{"core": 3, {unused}}}]}}"#
        );
        status.groups = vec![serde_json::from_str(&group).unwrap()];
        let decision = |number: u64| {
            let text = format!("root queue 0 moves, decision {number}.");
            let decision =
                format!(r#"{{"number": {number}, "at_ms": 0, "decision": "move", "text": "{text}"}}"#);
            serde_json::from_str(&decision).unwrap()
        };
        status.decisions = (0..7).map(decision).collect();
        status
    }

    #[test]
    fn the_time_of_cores_is_told_of_each_core_and_group_and_what_was_decided_with_it() {
        let rates = Rates::between(&grouped(1000), &grouped(3000), 2.0);
        let mut terminal = Terminal::new(TestBackend::new(130, 30)).unwrap();
        terminal.draw(|frame| draw(frame, &rates, Sort::Rate)).unwrap();
        let (screen, text) = (terminal.backend().to_string(), text(&rates));
        for shown in [&screen, &text] {
            let row = |head: &str| {
                let mut lines = shown.lines().map(|line| line.trim_matches('"').trim());
                lines
                    .find(|line| line.starts_with(head))
                    .and_then(|_| lines.next())
                    .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" "))
            };
            assert_eq!(row("CORE ").as_deref(), Some("0 polled 3 30.0 60.0 10.0 0.0 1000 0"), "{shown}");
            // The disk's requests, and no NIC's frames: that one is in another group.
            assert_eq!(row("GROUP").as_deref(), Some("tenant 0 1000 4.1 10.0 20.0 1000"), "{shown}");
            assert!(shown.contains("decision 6."), "{shown}");
        }
        // All of them in a text, and the last ones on the screen.
        assert!(text.contains("decision 0.") && !screen.contains("decision 1."), "{screen}");
        let said = crate::command::show::status(&grouped(1000));
        assert!(said.contains("DECIDED") && said.contains("decision 0."), "{said}");
        assert!(said.contains("tenant"), "{said}");
        let shown = crate::command::show::group(&grouped(1000).groups[0]);
        assert!(
            shown.contains("0.10 s with work; 0.20 s of polling that found nothing, 1000 polls"),
            "{shown}"
        );
        assert!(shown.contains("  of core 3"), "{shown}");
    }

    #[test]
    fn a_core_that_has_said_nothing_has_the_share_that_it_said_last() {
        let rates = Rates::between(&grouped(3000), &grouped(3000), 2.0);
        let core = &rates.cores[0];
        assert_eq!((core.busy_percent, core.empty_percent, core.asleep_percent), (42.5, 0.0, 0.0));
        assert_eq!((rates.groups[0].cores.len(), rates.groups[0].busy_percent), (0, 0.0));
    }

    #[test]
    fn a_small_terminal_is_no_reason_to_fail() {
        let rates = Rates::between(&status(0, 0), &status(5, 5), 1.0);
        for (width, height) in [(1, 1), (10, 2), (80, 5)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &rates, Sort::Rate)).unwrap();
        }
    }

    #[test]
    fn what_began_anew_has_no_rate() {
        let rates = Rates::between(&status(1000, 100), &status(10, 200), 1.0);
        assert_eq!(rates.queues[0].units_per_s, 0.0);
        assert_eq!(rates.queues[1].units_per_s, 100.0);
        assert!(text(&rates).contains("DROPPED/S"));
    }
}
