//! The exporter's book of one export: which claim was granted last, and who may write by it.

use super::{ClaimDenial, ClaimQuery, ClaimRecord, ClaimRefusal, ClaimReply, ClaimVerb, readable};
use crate::mutation::{Rule, removed};

/// Where a claim is kept.
pub trait ClaimStore: Send {
    /// Writes it down. Whatever happens to the host after this has returned well, the record is there. Blocks.
    fn save(&mut self, record: &ClaimRecord) -> Result<(), String>;
}

/// Which claim was granted last. Whoever has the book asks it before every connection.
pub struct ClaimBook {
    record: Option<ClaimRecord>,
    store: Box<dyn ClaimStore>,
    /// The last record was not saved well, and may be there all the same.
    unsure: bool,
}

impl ClaimBook {
    /// `record`: what was written down, if anything was.
    pub fn new(record: Option<ClaimRecord>, store: Box<dyn ClaimStore>) -> ClaimBook {
        ClaimBook { record, store, unsure: false }
    }

    /// The claim that was granted last.
    pub fn record(&self) -> Option<&ClaimRecord> {
        self.record.as_ref()
    }

    /// Somebody holds the export.
    pub fn is_held(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.held)
    }

    fn refusal(&self, why: ClaimDenial) -> ClaimRefusal {
        let (generation, since, name) =
            self.record.as_ref().map_or((0, 0, ""), |last| (last.generation, last.since, last.name.as_str()));
        ClaimRefusal { why, generation, since, name: name.to_owned() }
    }

    /// Whether a client may write: one with a claim, as holder and generation, or one without.
    pub fn admits(&self, client: Option<(&str, u64)>) -> Result<(), ClaimRefusal> {
        let Some((holder, generation)) = client else {
            let held = self.is_held() && !removed(Rule::RefuseWithout);
            return if held { Err(self.refusal(ClaimDenial::Held)) } else { Ok(()) };
        };
        let Some(last) = &self.record else { return Err(self.refusal(ClaimDenial::Unknown)) };
        if generation > last.generation {
            return Err(self.refusal(ClaimDenial::Unknown));
        }
        if generation < last.generation && removed(Rule::RefuseLower) {
            return Ok(());
        }
        let same = generation == last.generation;
        if last.held && same && (holder == last.holder || removed(Rule::RefuseEqual)) {
            return Ok(());
        }
        Err(self.refusal(if last.held { ClaimDenial::Held } else { ClaimDenial::Released }))
    }

    /// Carries out what a client asks for. `others`: clients without a claim that are connected. `now`: seconds since 1970. When another one
    /// becomes the holder, or nobody is, the caller ends all connections that were there before it lets anybody in. Blocks.
    pub fn ask(&mut self, query: &ClaimQuery, others: usize, now: u64) -> ClaimReply {
        if let Err(refusal) = self.settle() {
            return ClaimReply::Refused(refusal);
        }
        let asked = match query.verb {
            ClaimVerb::Own(generation) => self.admits(Some((&query.holder, generation))).map(|()| generation),
            ClaimVerb::Release(generation) => {
                let outcome = self.admits(Some((&query.holder, generation))).and_then(|()| self.release(now));
                return match outcome {
                    Ok(()) => ClaimReply::Released(generation),
                    Err(refusal) => ClaimReply::Refused(refusal),
                };
            }
            ClaimVerb::Ask | ClaimVerb::TakeOver => self.next(query, others, now),
        };
        match asked {
            Ok(generation) => ClaimReply::Granted(generation),
            Err(refusal) => ClaimReply::Refused(refusal),
        }
    }

    fn next(&mut self, query: &ClaimQuery, others: usize, now: u64) -> Result<u64, ClaimRefusal> {
        let takes_over = query.verb == ClaimVerb::TakeOver;
        let last = match &self.record {
            // It did not hear the answer, or has lost what it knew.
            Some(last) if last.held && last.holder == query.holder => return Ok(last.generation),
            Some(last) if last.held && !takes_over => return Err(self.refusal(ClaimDenial::Held)),
            last => last.as_ref().map_or(0, |last| last.generation),
        };
        if others > 0 && !takes_over {
            let name = format!("{others} connections");
            return Err(ClaimRefusal { name, ..self.refusal(ClaimDenial::Shared) });
        }
        let generation = last.checked_add(1).ok_or_else(|| self.refusal(ClaimDenial::Exhausted))?;
        let (holder, name) = (query.holder.clone(), readable(&query.name));
        self.write(ClaimRecord { generation, holder, name, since: now, held: true })?;
        Ok(generation)
    }

    /// Nobody holds the export any more. Blocks.
    pub fn release(&mut self, now: u64) -> Result<(), ClaimRefusal> {
        match &self.record {
            Some(last) if last.held => self.write(ClaimRecord { held: false, since: now, ..last.clone() }),
            _ => Ok(()),
        }
    }

    /// Nothing is answered that a restart could take back.
    fn settle(&mut self) -> Result<(), ClaimRefusal> {
        match &self.record {
            Some(last) if self.unsure => self.write(last.clone()),
            _ => Ok(()),
        }
    }

    /// Durable first, then in force.
    fn write(&mut self, record: ClaimRecord) -> Result<(), ClaimRefusal> {
        if !removed(Rule::ClaimDurable) {
            let saved = self.store.save(&record);
            self.unsure = saved.is_err();
            saved
                .map_err(|why| ClaimRefusal { name: readable(&why), ..self.refusal(ClaimDenial::Failed) })?;
        }
        self.record = Some(record);
        Ok(())
    }
}
