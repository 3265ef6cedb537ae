//! The runner that needs no coverage and no nightly: random and mutated inputs for a bounded time, from a seed that is
//! said, so that a run can be had again. Inputs that give a new signature are mutated further.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Target;

/// Longest input.
const LONGEST: usize = 4096;
/// Inputs that are kept to be mutated.
const KEPT: usize = 4096;
/// An input that takes longer hangs.
const HANG: Duration = Duration::from_secs(30);

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    /// Inputs run.
    pub runs: u64,
    /// Different signatures.
    pub signatures: usize,
    /// Where the input is that made the target panic, and what it said.
    pub finding: Option<(PathBuf, String)>,
}

/// SplitMix64: the same numbers from the same seed, everywhere.
pub struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// A random input: the seeds of every run, and of the corpora of cargo-fuzz.
pub fn fresh(rng: &mut Rng) -> Vec<u8> {
    let len = [64, 256, 1024, 3000][rng.below(4)] + rng.below(64);
    // Small numbers make the usual choices: a part of the bytes is zero.
    let zeros = rng.below(4);
    (0..len).map(|_| if rng.below(8) < zeros { 0 } else { rng.next() as u8 }).collect()
}

fn mutated(rng: &mut Rng, kept: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = kept[rng.below(kept.len())].clone();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(bytes.len());
        match rng.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            1 if !bytes.is_empty() => bytes[at] = rng.next() as u8,
            2 if !bytes.is_empty() => bytes[at] = [0, 1, 2, 0x7f, 0x80, 0xff][rng.below(6)],
            3 => bytes.insert(at, rng.next() as u8),
            4 if bytes.len() > 1 => drop(bytes.remove(at)),
            5 => {
                let other = &kept[rng.below(kept.len())];
                let from = rng.below(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            _ => {
                let more = 1 + rng.below(32);
                bytes.extend((0..more).map(|_| rng.next() as u8));
            }
        }
    }
    bytes.truncate(LONGEST);
    bytes
}

/// Runs `target` for `time` from `seed`. Stops at the first finding; its input goes into `artifacts`.
pub fn run(target: Target, time: Duration, seed: u64, artifacts: &Path) -> Outcome {
    let (mut rng, started) = (Rng(seed), Instant::now());
    let (mut seen, mut kept): (HashSet<u64>, Vec<Vec<u8>>) = (HashSet::new(), Vec::new());
    let watch = Watch::begin(target.name);
    let mut runs = 0;
    while started.elapsed() < time {
        let input =
            if kept.is_empty() || rng.below(4) == 0 { fresh(&mut rng) } else { mutated(&mut rng, &kept) };
        watch.turn(&input, artifacts);
        runs += 1;
        match catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            Ok(signature) => {
                if seen.insert(signature) {
                    if kept.len() < KEPT {
                        kept.push(input);
                    } else {
                        let place = rng.below(KEPT);
                        kept[place] = input;
                    }
                }
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                let path = write(target.name, "crash", &input, artifacts);
                let finding = Some((path, text.unwrap_or_default()));
                return Outcome { runs, signatures: seen.len(), finding };
            }
        }
    }
    Outcome { runs, signatures: seen.len(), finding: None }
}

fn write(target: &str, kind: &str, input: &[u8], artifacts: &Path) -> PathBuf {
    let folder = artifacts.join(target);
    let _ = std::fs::create_dir_all(&folder);
    let mut signature = crate::Signature::default();
    input.iter().for_each(|byte| signature.saw(&byte.to_string()));
    let path = folder.join(format!("{kind}-{:016x}", signature.value()));
    if let Err(error) = std::fs::write(&path, input) {
        eprintln!("{}: {error}", path.display());
    }
    path
}

/// Ends the process if one input takes too long: it is written down first.
struct Watch {
    turns: Arc<AtomicU64>,
    input: Arc<std::sync::Mutex<(Vec<u8>, PathBuf)>>,
}

impl Watch {
    fn begin(target: &'static str) -> Self {
        let watch = Watch { turns: Arc::default(), input: Arc::default() };
        let (turns, input) = (Arc::downgrade(&watch.turns), watch.input.clone());
        std::thread::spawn(move || {
            let (mut last, mut since) = (0, Instant::now());
            while let Some(turns) = turns.upgrade() {
                let now = turns.load(Ordering::Acquire);
                drop(turns);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > HANG {
                    if let Ok(input) = input.lock() {
                        let path = write(target, "hang", &input.0, &input.1);
                        eprintln!("{target}: an input hangs: {}", path.display());
                    }
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        watch
    }

    fn turn(&self, bytes: &[u8], artifacts: &Path) {
        if let Ok(mut input) = self.input.lock() {
            input.0.clear();
            input.0.extend_from_slice(bytes);
            input.1 = artifacts.to_owned();
        }
        self.turns.fetch_add(1, Ordering::AcqRel);
    }
}
