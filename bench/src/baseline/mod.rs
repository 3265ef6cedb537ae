//! `NAME --baseline BINARY`: a benchmark of two builds in turn, one of them made before a change and one after it.
//!
//! ```text
//!   pair 1: before, after    pair 2: after, before    ...    --figures of both--> figures::compare: ratio, interval, verdict
//!     each with processes of its own: started, connected, checked, measured in turn (the other one is frozen), ended
//! ```
//!
//! What serves comes from the two builds; what drives it is this program, the same for both. Each pair starts its processes anew,
//! because where a process lies in memory can change its speed by more than a code change does, and that belongs to the interval.
//! The loads of figures that come out slower are measured in a second series of pairs, since among two hundred figures a few seem
//! slower by chance.

mod interrupt;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ioplane_figures::compare::{Comparison, ROOM};
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use ioplane_figures::report::{envelope, setup_lines};
use serde_json::{Map, Value, json};

use crate::served::Place;
use interrupt::{Interrupt, Interrupted};

/// Exit code of a comparison that was not finished.
const NOT_MEASURED: u8 = 2;
/// As a shell says that a program was ended by SIGINT.
const INTERRUPTED: u8 = 130;

/// Options of a benchmark that can compare.
#[derive(Debug, clap::Args)]
pub struct Against {
    /// Compare with another build: alternating pairs of short runs, ratio and interval of each figure, exit code 1 if one is slower.
    /// A build of ioplane; for network and elvis a build of ioplane-bench
    #[arg(long, value_name = "BINARY")]
    baseline: Option<PathBuf>,
    /// Pairs of runs; half of them begin with the baseline
    #[arg(long, default_value_t = 10, requires = "baseline", value_parser = clap::value_parser!(u32).range(10..=1000))]
    pairs: u32,
}

/// The two builds, as indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The baseline.
    Before,
    /// This build.
    After,
}

impl Side {
    pub const BOTH: [Side; 2] = [Side::Before, Side::After];

    pub fn name(self) -> &'static str {
        match self {
            Side::Before => "before",
            Side::After => "after",
        }
    }
}

pub struct Pair<'a> {
    binaries: [&'a Path; 2],
    /// Whose turn comes first, of each load.
    pub order: [Side; 2],
    /// Where what serves runs.
    pub place: &'a Place,
    wanted: Option<&'a BTreeSet<String>>,
    interrupt: &'a Interrupt,
}

impl Pair<'_> {
    /// The program that serves.
    pub fn binary(&self, side: Side) -> &Path {
        self.binaries[side as usize]
    }

    /// Whether a load is to be measured: one with a figure whose key begins with `key`.
    pub fn wants(&self, key: &str) -> bool {
        self.wanted.is_none_or(|wanted| wanted.iter().any(|figure| figure.starts_with(key)))
    }

    /// To be asked before each round.
    ///
    /// # Errors
    /// After Ctrl-C.
    pub fn go_on(&self) -> Result<()> {
        self.interrupt.check()
    }
}

/// A benchmark that can be run in pairs.
pub struct Paired<'a> {
    pub name: &'static str,
    /// Arguments of its program that end well if the program can serve.
    pub serves: [&'static str; 2],
    /// The program of this build.
    pub after: PathBuf,
    /// Runs one pair: the `figures` of each side.
    pub run: &'a dyn Fn(&Pair<'_>) -> Result<[Value; 2]>,
}

impl Against {
    /// The other build, if there is one to compare with.
    pub fn baseline(&self) -> Option<&Path> {
        self.baseline.as_deref()
    }

    /// Compares, prints, and says by exit code whether a figure is slower.
    pub fn compare(&self, json: bool, paired: &Paired<'_>) -> ExitCode {
        match self.measure(paired) {
            Ok((comparison, setup)) => {
                if json {
                    let name = format!("{}-baseline", paired.name);
                    println!("{:#}", envelope(&name, &setup, comparison.json()));
                } else {
                    println!("{}\n{}", setup_lines(&setup, 24), comparison.table());
                }
                eprint!("{}", comparison.summary());
                ExitCode::from(u8::from(!comparison.slower().is_empty()))
            }
            Err(error) if error.is::<Interrupted>() => {
                eprintln!("interrupted: nothing is compared, what was started is ended");
                ExitCode::from(INTERRUPTED)
            }
            Err(error) => {
                eprintln!("Error: {error:?}");
                ExitCode::from(NOT_MEASURED)
            }
        }
    }

    fn measure(&self, paired: &Paired<'_>) -> Result<(Comparison, Map<String, Value>)> {
        let begin = Instant::now();
        let before = self.baseline.as_deref().context("no baseline")?;
        let before = before.canonicalize().with_context(|| format!("--baseline {}", before.display()))?;
        for binary in [&before, &paired.after] {
            can_serve(binary, paired.serves)?;
        }
        if before == paired.after {
            eprintln!("both builds are {}: only noise is measured", before.display());
        }
        let interrupt = Interrupt::watch()?;
        let cpus = Cpus::choose()?;
        machine::pin(cpus.front)?;
        let place = Place { cpus, room: CpuRoom::new(cpus.back) };
        let mut comparison = Comparison::default();
        let series = |wanted: Option<&BTreeSet<String>>, comparison: &mut Comparison| -> Result<()> {
            for number in 0..self.pairs {
                let begin = Instant::now();
                let order = if number % 2 == 0 { Side::BOTH } else { [Side::After, Side::Before] };
                let pair = Pair {
                    binaries: [&before, &paired.after],
                    order,
                    place: &place,
                    wanted,
                    interrupt: &interrupt,
                };
                let outcome = (paired.run)(&pair);
                // What Ctrl-C breaks is no failure of the run.
                interrupt.check()?;
                let [before, after] = outcome.with_context(|| format!("pair {}", number + 1))?;
                comparison.add(&before, &after, wanted.is_some());
                let first = order[0].name();
                eprintln!("pair {} of {}, {first} first: {:.0?}", number + 1, self.pairs, begin.elapsed());
            }
            Ok(())
        };
        series(None, &mut comparison)?;
        let slower = comparison.slower();
        if !slower.is_empty() {
            eprintln!("{} figures seem slower: as many pairs of their loads again", slower.len());
            series(Some(&slower), &mut comparison)?;
        }
        let mut setup = Map::new();
        for (key, value) in [
            ("before", json!(before)),
            ("after", json!(paired.after)),
            ("pairs", json!(self.pairs)),
            ("measured_again", json!(slower.len())),
            ("interval", json!("of the median ratio, exact (binomial), 95 % or more")),
            ("unclear_beyond", json!(format!("{:.0} % slower", ROOM * 100.0))),
            ("bound_by", json!(place.room.describe())),
            ("seconds", json!(begin.elapsed().as_secs())),
        ] {
            setup.insert(key.into(), value);
        }
        Ok((comparison, setup))
    }
}

/// Whether `binary` is the program that the benchmark starts.
fn can_serve(binary: &Path, serves: [&str; 2]) -> Result<()> {
    let status = Command::new(binary).args(serves).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.with_context(|| format!("starting {}", binary.display()))?;
    ensure!(
        status.success(),
        "{} is not the program that this benchmark starts ('{}' fails): exitless and neighbour compare builds of ioplane, network and elvis builds of ioplane-bench",
        binary.display(),
        serves.join(" ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Options {
        #[command(flatten)]
        against: Against,
    }

    fn parse(words: &[&str]) -> Result<Against, clap::Error> {
        Options::try_parse_from(std::iter::once("bench").chain(words.iter().copied()))
            .map(|options| options.against)
    }

    #[test]
    fn fewer_than_ten_pairs_are_refused() {
        assert_eq!(parse(&["--baseline", "a"]).unwrap().pairs, 10);
        assert!(parse(&["--baseline", "a", "--pairs", "9"]).is_err());
        assert!(parse(&["--pairs", "12"]).is_err(), "without a baseline");
        assert_eq!(parse(&[]).unwrap().baseline(), None);
    }

    #[test]
    fn a_program_that_does_not_serve_is_refused() {
        assert!(can_serve(Path::new("/bin/false"), ["serve", "--help"]).is_err());
        assert!(can_serve(Path::new("/nowhere"), ["serve", "--help"]).is_err());
        assert!(can_serve(Path::new("/bin/true"), ["serve", "--help"]).is_ok());
    }

    /// A benchmark whose builds need `times` microseconds, and which writes down whose turn was first.
    fn comparison(times: [f64; 2], json: bool) -> (ExitCode, Vec<Side>) {
        let orders = std::sync::Mutex::new(Vec::new());
        let run = |pair: &Pair<'_>| -> Result<[Value; 2]> {
            pair.go_on()?;
            orders.lock().unwrap().push(pair.order[0]);
            assert_eq!(pair.binary(Side::After), Path::new("/bin/true"));
            Ok(times.map(|time| json!({ "depth1": { "p50_us": time } })))
        };
        let compare = || {
            let against = parse(&["--baseline", "/bin/true"]).unwrap();
            let paired =
                Paired { name: "made-up", serves: ["serve", "--help"], after: "/bin/true".into(), run: &run };
            against.compare(json, &paired)
        };
        // It pins its thread.
        let code = std::thread::scope(|scope| scope.spawn(compare).join().unwrap());
        (code, orders.into_inner().unwrap())
    }

    #[test]
    fn each_side_is_first_in_half_of_the_pairs() {
        let (code, orders) = comparison([1.0, 1.0], true);
        assert_eq!(code, ExitCode::SUCCESS);
        assert_eq!(orders.len(), 10);
        assert_eq!(orders.iter().filter(|first| **first == Side::Before).count(), 5);
    }

    #[test]
    fn slower_is_measured_again_and_then_a_failure() {
        let (code, orders) = comparison([1.0, 1.2], false);
        assert_eq!(code, ExitCode::from(1));
        assert_eq!(orders.len(), 20);
        assert_eq!(comparison([1.2, 1.0], false).0, ExitCode::SUCCESS);
    }
}
