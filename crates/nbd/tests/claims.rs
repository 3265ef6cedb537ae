//! Who may write an export, through schedules of claims, takeovers, releases, lies, crashes and failing disks: at no time two, and nobody comes back
//! behind a later one (docs/decisions/0052-claims.md). The oracle notices when a rule is taken out.

#![expect(clippy::disallowed_types, reason = "the test's disk is on this side of the exporter's crashes")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ioplane_nbd::claim::{
    ClaimBook, ClaimDenial, ClaimQuery, ClaimRecord, ClaimReply, ClaimStore, ClaimVerb,
};
#[cfg(feature = "mutations")]
use ioplane_nbd::mutation::Rule;

/// What survives a crash of the exporter.
#[derive(Clone, Default)]
struct Durable(Arc<Mutex<DurableState>>);

#[derive(Default)]
struct DurableState {
    record: Option<ClaimRecord>,
    /// The next one fails; if it says so, after it was written nevertheless.
    fails: Option<bool>,
}

impl ClaimStore for Durable {
    fn save(&mut self, record: &ClaimRecord) -> Result<(), String> {
        let mut state = self.0.lock().unwrap();
        let fails = state.fails.take();
        if fails != Some(false) {
            state.record = Some(ClaimRecord::decode(record.encode().as_bytes()).unwrap());
        }
        fails.map_or(Ok(()), |_| Err("no space".into()))
    }
}

impl Durable {
    fn book(&self) -> ClaimBook {
        ClaimBook::new(self.0.lock().unwrap().record.clone(), Box::new(self.clone()))
    }
}

fn dice(seed: &mut u64, sides: u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed % sides
}

const CLIENTS: u64 = 4;

/// What the clients have been told, in the order in which it was.
#[derive(Default)]
struct Told {
    /// Whose each generation is.
    holders: BTreeMap<u64, u64>,
    /// The last one has not been released.
    held: bool,
    /// A release of it failed, and may have been written all the same. Then a restarted exporter refuses its holder, and lets others in.
    doubt: bool,
    /// Claims of clients that failed, and may have been written all the same: then a restarted exporter knows them.
    failed: BTreeMap<u64, u64>,
}

impl Told {
    fn last(&self) -> Option<(u64, u64)> {
        self.holders.last_key_value().map(|(generation, client)| (*generation, *client))
    }

    /// A client was told that it is the holder.
    fn granted(&mut self, client: u64, generation: u64) -> Result<(), String> {
        match self.holders.insert(generation, client) {
            Some(other) if other != client => {
                return Err(format!("generation {generation} was granted to {other} and to {client}"));
            }
            _ => {}
        }
        let (last, _) = self.last().unwrap_or_default();
        if generation < last {
            return Err(format!("generation {generation} was granted after {last}"));
        }
        (self.held, self.doubt) = (true, false);
        Ok(())
    }

    /// A client was let in.
    fn admitted(&mut self, client: Option<(u64, u64)>) -> Result<(), String> {
        if let Some((client, generation)) = client
            && self.failed.get(&client) == Some(&generation)
            && self.last().is_none_or(|(last, _)| generation > last)
        {
            return self.granted(client, generation);
        }
        match (client, self.last()) {
            (None, _) if self.held && !self.doubt => {
                Err("somebody without a claim was let in while another one had it".into())
            }
            (None, _) => Ok(()),
            (Some((client, generation)), Some(last)) if self.held && last == (generation, client) => Ok(()),
            (Some(client), last) => {
                Err(format!("{client:?} was let in, and the last claim was {last:?}, held: {}", self.held))
            }
        }
    }
}

/// One schedule; what is wrong with it.
fn schedule(mut seed: u64) -> Result<(), String> {
    let durable = Durable::default();
    let mut book = durable.book();
    let mut told = Told::default();
    let mut remembered: BTreeMap<u64, u64> = BTreeMap::new();
    let holder = |client: u64| format!("holder-{client}");
    for now in 0..120 {
        let client = dice(&mut seed, CLIENTS);
        let own = remembered.get(&client).copied();
        let verb = match dice(&mut seed, 12) {
            0..=2 => own.map_or(ClaimVerb::Ask, ClaimVerb::Own),
            3 => ClaimVerb::TakeOver,
            4 => own.map_or(ClaimVerb::Ask, ClaimVerb::Release),
            5 => {
                // The exporter dies: what it has answered was answered.
                book = durable.book();
                continue;
            }
            6 => {
                durable.0.lock().unwrap().fails = Some(dice(&mut seed, 2) == 0);
                continue;
            }
            // A client that lies, and one whose memory was restored from a backup.
            7 => ClaimVerb::Own(
                told.last().map_or(1, |(last, _)| last + dice(&mut seed, 3)).saturating_sub(1).max(1),
            ),
            8 => {
                if book.admits(None).is_ok() {
                    told.admitted(None)?;
                }
                continue;
            }
            9 if dice(&mut seed, 3) == 0 => {
                // A person.
                match book.release(now) {
                    Ok(()) => told.held = false,
                    Err(_) => told.doubt = true,
                }
                continue;
            }
            _ => {
                // A connection of whoever believes that it is the holder, and of one that believes what it likes.
                let generation = own.unwrap_or_else(|| told.last().map_or(1, |(last, _)| last));
                if book.admits(Some((&holder(client), generation))).is_ok() {
                    told.admitted(Some((client, generation)))?;
                }
                continue;
            }
        };
        let query = ClaimQuery { holder: holder(client), verb, name: format!("client {client}") };
        let query = ClaimQuery::of(&query.to_string()).unwrap();
        let reply = ClaimReply::of(&book.ask(&query, 0, now).to_string()).unwrap();
        // The answer may not arrive. Then nobody was told; what the exporter has done, it has done.
        let arrives = dice(&mut seed, 8) > 0;
        match (reply, verb) {
            (ClaimReply::Granted(generation), ClaimVerb::Own(_)) => {
                told.admitted(Some((client, generation)))?
            }
            (ClaimReply::Granted(generation), _) => {
                told.granted(client, generation)?;
                if arrives {
                    remembered.insert(client, generation);
                }
            }
            (ClaimReply::Released(_), _) => {
                told.held = false;
                if arrives {
                    remembered.remove(&client);
                }
            }
            // It may be written all the same: then a restarted exporter refuses everybody but that one.
            (ClaimReply::Refused(refusal), ClaimVerb::Release(_)) => {
                told.doubt |= refusal.why == ClaimDenial::Failed;
            }
            (ClaimReply::Refused(refusal), _) if refusal.why == ClaimDenial::Failed => {
                told.failed.insert(client, refusal.generation + 1);
            }
            (ClaimReply::Refused(_), _) => {}
        }
    }
    Ok(())
}

const SEEDS: u64 = 2000;

#[test]
fn there_is_one_writer_at_a_time() {
    for seed in 1..=SEEDS {
        schedule(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

fn ask(book: &mut ClaimBook, holder: &str, verb: ClaimVerb) -> ClaimReply {
    book.ask(&ClaimQuery { holder: holder.into(), verb, name: format!("disk of {holder}") }, 0, 7)
}

fn denied(reply: ClaimReply) -> (ClaimDenial, u64, String) {
    match reply {
        ClaimReply::Refused(refusal) => (refusal.why, refusal.generation, refusal.name),
        other => panic!("{other}"),
    }
}

#[test]
fn a_claim_has_one_holder_until_it_is_released_or_taken_over() {
    let mut book = Durable::default().book();
    assert_eq!(book.admits(None), Ok(()));
    assert_eq!(ask(&mut book, "a", ClaimVerb::Ask), ClaimReply::Granted(1));
    assert_eq!(ask(&mut book, "a", ClaimVerb::Ask), ClaimReply::Granted(1), "the answer was lost");
    assert_eq!(denied(ask(&mut book, "b", ClaimVerb::Ask)), (ClaimDenial::Held, 1, "disk of a".into()));
    assert_eq!(denied(ask(&mut book, "b", ClaimVerb::Own(1))), (ClaimDenial::Held, 1, "disk of a".into()));
    assert_eq!(book.admits(None).unwrap_err().why, ClaimDenial::Held);
    assert_eq!(ask(&mut book, "b", ClaimVerb::TakeOver), ClaimReply::Granted(2));
    assert_eq!(ask(&mut book, "b", ClaimVerb::TakeOver), ClaimReply::Granted(2), "the answer was lost");
    assert_eq!(denied(ask(&mut book, "a", ClaimVerb::Own(1))), (ClaimDenial::Held, 2, "disk of b".into()));
    assert_eq!(
        denied(ask(&mut book, "a", ClaimVerb::Release(1))),
        (ClaimDenial::Held, 2, "disk of b".into())
    );
    assert_eq!(ask(&mut book, "b", ClaimVerb::Release(2)), ClaimReply::Released(2));
    assert_eq!(book.admits(None), Ok(()));
    assert_eq!(denied(ask(&mut book, "b", ClaimVerb::Own(2))).0, ClaimDenial::Released);
    assert_eq!(ask(&mut book, "c", ClaimVerb::Ask), ClaimReply::Granted(3));
    let query = ClaimQuery { holder: "d".into(), verb: ClaimVerb::TakeOver, name: "d".into() };
    assert_eq!(book.ask(&query, 5, 7), ClaimReply::Granted(4), "a takeover ends them");
    book.release(8).unwrap();
    let query = ClaimQuery { verb: ClaimVerb::Ask, ..query };
    assert_eq!(denied(book.ask(&query, 5, 7)).0, ClaimDenial::Shared);
}

/// Numbers go up by one for each claim, whatever a client says.
#[test]
fn nobody_can_use_the_numbers_up() {
    let mut book = Durable::default().book();
    for generation in [1, 2, u64::MAX - 1, u64::MAX] {
        assert_eq!(denied(ask(&mut book, "a", ClaimVerb::Own(generation))).0, ClaimDenial::Unknown);
        assert_eq!(denied(ask(&mut book, "a", ClaimVerb::Release(generation))).0, ClaimDenial::Unknown);
    }
    assert_eq!(ask(&mut book, "a", ClaimVerb::Ask), ClaimReply::Granted(1));
    for generation in [2, u64::MAX] {
        assert_eq!(denied(ask(&mut book, "a", ClaimVerb::Own(generation))).0, ClaimDenial::Unknown);
    }
    assert_eq!(ask(&mut book, "b", ClaimVerb::TakeOver), ClaimReply::Granted(2));
    // Where a record says that there are none left.
    let durable = Durable::default();
    durable.0.lock().unwrap().record = Some(ClaimRecord {
        generation: u64::MAX,
        holder: "a".into(),
        name: "a".into(),
        since: 0,
        held: true,
    });
    let mut book = durable.book();
    assert_eq!(ask(&mut book, "a", ClaimVerb::Own(u64::MAX)), ClaimReply::Granted(u64::MAX));
    assert_eq!(denied(ask(&mut book, "b", ClaimVerb::TakeOver)).0, ClaimDenial::Exhausted);
    assert_eq!(book.admits(Some(("a", u64::MAX))), Ok(()), "it goes on");
}

#[test]
fn what_cannot_be_made_durable_is_not_granted() {
    let durable = Durable::default();
    let mut book = durable.book();
    durable.0.lock().unwrap().fails = Some(false);
    assert_eq!(denied(ask(&mut book, "a", ClaimVerb::Ask)), (ClaimDenial::Failed, 0, "no space".into()));
    assert_eq!(book.record(), None);
    assert_eq!(ask(&mut book, "b", ClaimVerb::Ask), ClaimReply::Granted(1));
}

#[cfg(feature = "mutations")]
const WITHOUT: &str = "IOPLANE_WITHOUT_RULE";
#[cfg(feature = "mutations")]
const RULES: [Rule; 4] = [Rule::ClaimDurable, Rule::RefuseLower, Rule::RefuseEqual, Rule::RefuseWithout];

/// Each rule in a process of its own: beside it, others run with all of them.
#[cfg(feature = "mutations")]
#[test]
fn each_rule_is_needed() {
    for rule in RULES {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "without_a_rule", "--nocapture"])
            .env(WITHOUT, format!("{rule:?}"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "{rule:?}: {said}{}", String::from_utf8_lossy(&child.stderr));
        assert!(said.contains(&format!("without {rule:?}: seed")), "{said}");
    }
}

#[cfg(feature = "mutations")]
#[test]
fn without_a_rule() {
    let Ok(name) = std::env::var(WITHOUT) else { return };
    let rule = *RULES.iter().find(|rule| format!("{rule:?}") == name).unwrap();
    ioplane_nbd::mutation::remove(Some(rule));
    let wrong = (1..=SEEDS).find_map(|seed| schedule(seed).err().map(|wrong| (seed, wrong)));
    ioplane_nbd::mutation::remove(None);
    let Some((seed, wrong)) = wrong else { panic!("nobody notices that {rule:?} is gone") };
    println!("without {rule:?}: seed {seed}: {wrong}");
}
