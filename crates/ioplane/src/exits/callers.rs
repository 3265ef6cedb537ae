//! `ioplane exits callers`: who in the guest calls the functions that cause most exits. KVM tells the instruction only; the guest's own
//! kernel counts stacks, by kprobes that a small script sets and removes, or records them, by breakpoints where kprobes are refused.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ioplane_cli::args::CallersArgs;
use ioplane_cli::output::print;
use ioplane_plain::plain;
use serde::Serialize;

use super::reach::Reach;
use super::{interrupted, usage, watch};

/// What runs in the guest.
const CALLERS: &str = include_str!("../../../../guest/tune/callers.sh");
/// So many functions are asked about, if none is named; and so many at most.
const FIRST: usize = 3;
const MOST: usize = 5;
/// The guest's script has a minute; it also starts and ends.
const LONGEST: Duration = Duration::from_secs(30);
/// So much of a stack is shown, of so many stacks.
const DEPTH: usize = 6;
const STACKS: usize = 8;

/// Who calls one function.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Callers {
    function: String,
    /// What has counted in the guest.
    counted_by: Option<CountedBy>,
    /// Exits a second that it causes, where that was measured.
    exits: Option<f64>,
    /// How often it was called, by whomever, while the guest looked.
    calls: u64,
    /// Of these, those whose stacks found no room.
    dropped: u64,
    /// Most first.
    stacks: Vec<Stack>,
    /// Why there are none.
    refused: Option<&'static str>,
}

/// What the guest's kernel has let be set at a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CountedBy {
    Kprobe,
    Breakpoint,
}

/// The functions that have called each other, the last one first.
#[derive(Debug, PartialEq, Serialize)]
struct Stack {
    frames: Vec<String>,
    calls: u64,
    percent: f64,
}

/// Looks which functions are the worst, unless they are named, and asks the guest who calls them.
pub(super) fn run(args: &CallersArgs, json: bool) -> Result<()> {
    ensure!(
        args.watch.time <= LONGEST,
        usage(format!("--for is {} s at most here: the guest waits for it", LONGEST.as_secs()))
    );
    let reach = Reach::new(&args.reach, &args.watch.which)?;
    let mut wanted: Vec<(String, Option<f64>)> =
        args.functions.iter().map(|name| (name.clone(), None)).collect();
    if wanted.is_empty() {
        ensure!(
            args.watch.symbols.is_some(),
            usage("name the functions, or give --symbols FILE to find out which cause most exits")
        );
        let report = watch(&args.watch, None)?;
        let known = report.functions.iter().filter(|row| !row.unnamed);
        wanted = known.take(FIRST).map(|row| (row.name.clone(), Some(row.rate))).collect();
        ensure!(
            !wanted.is_empty(),
            "no exit came from a function of the guest's kernel: {}",
            report.notes.join("; ")
        );
    }
    if interrupted()?.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was done in the guest");
    }
    ensure!(wanted.len() <= MOST, usage(format!("{MOST} functions at most")));
    let places: Vec<String> = wanted.iter().map(|(name, _)| place(name)).collect::<Result<_>>()?;
    for (index, place) in places.iter().enumerate() {
        ensure!(!places[..index].contains(place), usage(format!("{place} is named twice")));
    }
    let seconds = args.watch.time.as_secs_f64().ceil().max(1.0).to_string();
    let done = reach.run(CALLERS, [&places.join(","), &seconds])?;
    ensure!(
        done.status == 0,
        "in the guest it ended with {}: {}{}",
        done.status,
        done.said,
        done.error.trim()
    );
    let found = read(&done.said, &wanted, &places)?;
    print(json, &found, |found| found.iter().map(Callers::text).collect())
}

/// `function [module]` as kprobes call it. Nothing that a shell would understand otherwise.
fn place(name: &str) -> Result<String> {
    let place = match name.split_once(" [") {
        Some((function, module)) => format!("{}:{function}", module.trim_end_matches(']')),
        None => name.to_owned(),
    };
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | ':');
    if place.is_empty() || !place.chars().all(good) || place.len() > 200 {
        bail!(usage(format!("{:?} is no name of a function", plain(name))));
    }
    Ok(place)
}

/// `module:function` as stacks and symbols have it.
fn spelling(name: &str) -> String {
    match name.split_once(':') {
        Some((module, function)) => format!("{function} [{module}]"),
        None => name.to_owned(),
    }
}

/// Takes the script's words apart.
fn read(said: &str, wanted: &[(String, Option<f64>)], places: &[String]) -> Result<Vec<Callers>> {
    let mut all: Vec<Callers> = wanted
        .iter()
        .map(|(name, exits)| Callers {
            function: plain(&spelling(name)),
            exits: *exits,
            ..Callers::default()
        })
        .collect();
    let index = |place: &str| places.iter().position(|own| own == place);
    let mut probes: BTreeMap<&str, usize> = BTreeMap::new();
    let mut stacks: Vec<BTreeMap<Vec<String>, u64>> = vec![BTreeMap::new(); all.len()];
    let mut hits: Vec<Option<u64>> = vec![None; all.len()];
    let (mut now, mut frames): (Option<usize>, Option<Vec<String>>) = (None, None);
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["refused", place] => {
                let refused = all.get_mut(index(place).context("the guest speaks of another function")?);
                refused.into_iter().for_each(|callers| callers.refused = Some(REFUSED));
            }
            [how @ ("probe" | "breakpoint"), number, place] => {
                let index = index(place).context("the guest speaks of another function")?;
                let by = if how == "probe" { CountedBy::Kprobe } else { CountedBy::Breakpoint };
                all[index].counted_by = Some(by);
                probes.insert(number, index);
            }
            ["histogram", number] => (now, frames) = (probes.get(number).copied(), None),
            // Both once before the histogram and, if it is short, once at its end.
            ["Hits:", number] => {
                if let (Some(now), Ok(number)) = (now, number.parse()) {
                    hits[now] = Some(number);
                }
            }
            ["Dropped:", number] => {
                if let (Some(now), Ok(number)) = (now, number.parse()) {
                    all[now].dropped = number;
                }
            }
            ["{", _] => frames = Some(Vec::new()),
            ["}", "hitcount:", number] => {
                if let (Some(now), Some(frames), Ok(number)) = (now, frames.take(), number.parse::<u64>()) {
                    let calls = stacks[now].entry(above(frames, &all[now].function)).or_default();
                    *calls = calls.saturating_add(number);
                }
            }
            [place, ..] => {
                if let Some(frames) = frames.as_mut().filter(|frames| frames.len() < 64) {
                    let name = place.split('+').next().unwrap_or(place);
                    let module = words.get(1).filter(|word| word.starts_with('['));
                    frames.push(module.map_or(name.to_owned(), |module| format!("{name} {module}")));
                }
            }
            [] => {}
        }
    }
    for ((callers, stacks), hits) in all.iter_mut().zip(stacks).zip(hits) {
        ensure!(
            hits.is_some() || callers.refused.is_some(),
            "the guest says nothing of {}",
            callers.function
        );
        callers.calls = hits.unwrap_or(0).saturating_add(callers.dropped);
        let whole = callers.calls.max(1) as f64;
        let stack = |(frames, calls): (Vec<String>, u64)| Stack {
            frames,
            calls,
            percent: calls as f64 * 100.0 / whole,
        };
        callers.stacks = stacks.into_iter().map(stack).collect();
        callers.stacks.sort_by(|a, b| b.calls.cmp(&a.calls).then_with(|| a.frames.cmp(&b.frames)));
    }
    Ok(all)
}

const REFUSED: &str = "the guest's kernel lets neither a kprobe nor a breakpoint be set: there is none such, others have its name, kprobes may never be there, \
     or it is not compiled for tracing and the guest has no perl, or its four breakpoints are in use; name functions that you suspect of calling it";

/// The frames above the function itself and what traces it.
fn above(mut frames: Vec<String>, function: &str) -> Vec<String> {
    if let Some(own) = frames.iter().take(8).position(|frame| frame == function) {
        frames.drain(..=own);
    }
    frames.truncate(DEPTH);
    frames
}

impl Callers {
    fn text(&self) -> String {
        let exits = self.exits.map_or(String::new(), |rate| format!(" causes {rate:.1} exits a second and"));
        if let Some(why) = self.refused {
            return format!("{}: {why}\n\n", self.function);
        }
        let by = match self.counted_by {
            Some(CountedBy::Breakpoint) => " (by a breakpoint)",
            Some(CountedBy::Kprobe) | None => "",
        };
        let mut text = format!("{}{exits} was called {} times{by}\n", self.function, self.calls);
        for Stack { frames, percent, .. } in self.stacks.iter().take(STACKS) {
            text += &format!("{percent:>7.2} %  {}\n", frames.join(" <- "));
        }
        if self.dropped > 0 {
            text += &format!(
                "{:>7.2} %  stacks that found no room\n",
                self.dropped as f64 * 100.0 / self.calls.max(1) as f64
            );
        }
        if self.stacks.len() > STACKS {
            text += &format!("      ...  {} more\n", self.stacks.len() - STACKS);
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "refused native_write_msr\nprobe 0 ioread8\nprobe 1 hot:tick\nhistogram 0\nTotals:\n    Hits: 40\n    Entries: 2\n\
        # event histogram\n#\n# trigger info: hist:keys=common_stacktrace:vals=hitcount [active]\n#\n\n\
        { common_stacktrace:\n         kprobe_ftrace_handler+0x1/0x2\n         ioread8+0x5/0x40\n         ata_sff_check_status+0xe/0x10 [libata]\n\
         \x20        ata_wait+0x3b/0xa0 [libata]\n} hitcount:         30\n\
        { common_stacktrace:\n         vp_interrupt+0x1/0x9\n} hitcount:         10\n\nTotals:\n    Hits: 40\n    Dropped: 5\n\
        histogram 1\nTotals:\n    Hits: 2\n{ common_stacktrace:\n  x+0x0/0x1\n";

    fn names(names: &[&str]) -> Vec<(String, Option<f64>)> {
        names.iter().map(|name| ((*name).to_owned(), None)).collect()
    }

    #[test]
    fn a_guest_s_words_become_callers() {
        let wanted = names(&["ioread8", "native_write_msr", "tick [hot]"]);
        let places: Vec<String> = wanted.iter().map(|(name, _)| place(name).unwrap()).collect();
        assert_eq!(places[2], "hot:tick");
        let found = read(SAID, &wanted, &places).unwrap();
        let stacks: Vec<_> =
            found[0].stacks.iter().map(|s| (s.frames.join(" "), s.calls, s.percent)).collect();
        assert_eq!(
            stacks,
            [
                ("ata_sff_check_status [libata] ata_wait [libata]".into(), 30, 3000.0 / 45.0),
                ("vp_interrupt".into(), 10, 1000.0 / 45.0),
            ]
        );
        assert_eq!((found[0].calls, found[1].refused, found[2].calls), (45, Some(REFUSED), 2));
        // Cut in the middle of a stack.
        assert_eq!(found[2].stacks, []);
        assert!(found[0].text().contains("11.11 %  stacks that found no room"));
        assert!(found[0].text().contains("66.67 %  ata_sff_check_status [libata] <- ata_wait [libata]"));
    }

    #[test]
    fn a_breakpoint_s_words_are_understood_too() {
        let said = "breakpoint 0 iowrite16\nhistogram 0\nTotals:\n    Hits: 8\n    Dropped: 2\n\
            { stacktrace:\n    iowrite16+0x0\n    vp_notify+0x15\n    p9_virtio_request+0x1c2 [9pnet_virtio]\n} hitcount: 8\n";
        let (wanted, places) = (names(&["iowrite16"]), vec!["iowrite16".to_owned()]);
        let found = &read(said, &wanted, &places).unwrap()[0];
        assert_eq!((found.calls, found.dropped, found.counted_by), (10, 2, Some(CountedBy::Breakpoint)));
        let text = "iowrite16 was called 10 times (by a breakpoint)\n  80.00 %  vp_notify <- p9_virtio_request [9pnet_virtio]\n\
                    \x20 20.00 %  stacks that found no room\n\n";
        assert_eq!(found.text(), text);
    }

    #[test]
    fn a_name_is_only_a_name() {
        assert_eq!(place("foo.isra.0").unwrap(), "foo.isra.0");
        for bad in ["", "a;reboot", "$(a)", "a b", "a,b", "a [b;c]", "a\n", &"x".repeat(300)] {
            assert!(place(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn another_s_words_are_refused_or_mean_nothing() {
        let (wanted, places) = (names(&["a"]), vec!["a".to_owned()]);
        assert!(read("probe 0 b\n", &wanted, &places).is_err());
        let odd =
            "histogram 7\nHits: 3\n} hitcount: 4\nprobe 0 a\nhistogram 0\nHits: many\n{ x:\n} hitcount: -1\n";
        assert!(read(odd, &wanted, &places).unwrap_err().to_string().contains("says nothing of a"));
        assert_eq!(read(&format!("{odd}Hits: 7\n"), &wanted, &places).unwrap()[0].stacks, []);
        let much = "{ x:\n b+0x1\n} hitcount: 18446744073709551615\n".repeat(2);
        let many = format!("probe 0 a\nhistogram 0\nHits: 18446744073709551615\nDropped: 9\n{much}");
        assert_eq!(read(&many, &wanted, &places).unwrap()[0].stacks[0].calls, u64::MAX);
    }
}
