//! The library in a few lines: `profile VM SECONDS [SAMPLE]` prints a VM's exits as JSON.

use std::time::Duration;

use ioplane_exits::{Names, Report, Subject, Watch, WatchOptions};
use ioplane_kvmstat::Vm;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let vm = Vm::choose(words.first().map(String::as_str))?;
    let sample = words.get(2).map_or(Ok(1), |word| word.parse())?;
    let mut watch = Watch::start(vm, WatchOptions { sample, ..WatchOptions::default() })?;
    eprintln!("watching, {:?}", watch.refused());
    watch.turn(Duration::from_secs(words.get(1).map_or(Ok(5), |word| word.parse())?))?;
    let time = watch.stop()?;
    let subject = Subject { vm: watch.vm(), time, seen: watch.seen(), sample };
    let report = Report::new(subject, watch.profile(), watch.kernel(), &Names::default());
    let report = Report { vmm: watch.vmm(), ..report };
    println!("{}", serde_json::to_string_pretty(&report)?);
    eprint!("{report}");
    Ok(())
}
