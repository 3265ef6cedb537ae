//! What is in flight, in its order, and what a predecessor left to be taken again.

use std::collections::VecDeque;

use super::RingFault;
use crate::trial::ReplayPermit;

/// The requests taken and not returned, by their heads.
#[derive(Debug)]
pub(super) struct InFlightSet {
    /// For each head: zero, or one more than the count of requests taken before it.
    order: Box<[u64]>,
    taken: u64,
    count: u16,
}

impl InFlightSet {
    pub(super) fn new(size: u16) -> Self {
        InFlightSet { order: vec![0; usize::from(size)].into(), taken: 0, count: 0 }
    }

    /// Whether `head` is in flight; `None` if there is no such head.
    #[inline]
    pub(super) fn holds(&self, head: u16) -> Option<bool> {
        self.order.get(usize::from(head)).map(|order| *order != 0)
    }

    #[inline]
    pub(super) fn count(&self) -> u16 {
        self.count
    }

    #[inline]
    pub(super) fn add(&mut self, head: u16) {
        self.taken += 1;
        self.order[usize::from(head)] = self.taken;
        self.count += 1;
    }

    #[inline]
    pub(super) fn remove(&mut self, head: u16) {
        self.order[usize::from(head)] = 0;
        self.count -= 1;
    }

    /// All of them in their order. Allocates.
    pub(super) fn heads(&self) -> Vec<u16> {
        let mut heads: Vec<u16> =
            (0..self.order.len() as u16).filter(|head| self.order[usize::from(*head)] != 0).collect();
        heads.sort_by_key(|head| self.order[usize::from(*head)]);
        heads
    }
}

/// The requests that are to be taken again before anything new.
#[derive(Debug)]
pub(super) struct Replay {
    heads: VecDeque<u16>,
    /// Those of them that were in hand when the process died.
    suspects: Vec<u16>,
    /// The suspect that is being tried, and whether its used element is written.
    trial: Option<(u16, bool, ReplayPermit)>,
}

impl Replay {
    /// Refuses heads that a ring of `size` does not have, or that come twice: they may be hostile input.
    pub(super) fn new(heads: Vec<u16>, suspects: Vec<u16>, size: u16) -> Result<Self, RingFault> {
        let mut seen = vec![false; usize::from(size)];
        for head in &heads {
            match seen.get_mut(usize::from(*head)) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(RingFault::HeadInFlight(*head)),
                None => return Err(RingFault::BadDescriptor(*head)),
            }
        }
        Ok(Replay { heads: heads.into(), suspects, trial: None })
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    pub(super) fn heads(&self) -> &VecDeque<u16> {
        &self.heads
    }

    /// The next one, if it may be taken now: not while it is a suspect and another suspect is being tried, see
    /// [`crate::trial`].
    #[cold]
    pub(super) fn next(&mut self) -> Option<u16> {
        let head = *self.heads.front()?;
        if self.suspects.contains(&head) {
            let trial = ReplayPermit::begin()?;
            self.trial = Some((head, false, trial));
            self.suspects.retain(|suspect| *suspect != head);
        }
        self.heads.pop_front()
    }

    /// The one that was taken last is the next again.
    #[cold]
    pub(super) fn rewind(&mut self, head: u16) {
        self.heads.push_front(head);
        if self.trial.as_ref().is_some_and(|(tried, ..)| *tried == head) {
            self.trial = None;
            self.suspects.push(head);
        }
    }

    /// The used element of `head` is written.
    #[inline]
    pub(super) fn completed(&mut self, head: u16) {
        if let Some((tried, done, _)) = &mut self.trial {
            *done |= *tried == head;
        }
    }

    /// What was completed is in nobody's hands any more: the next suspect may be tried.
    #[inline]
    pub(super) fn published(&mut self) {
        if let Some((_, true, _)) = self.trial {
            self.trial = None;
        }
    }

    /// Nothing is being tried any more.
    pub(super) fn let_go(&mut self) {
        self.trial = None;
    }
}
