//! Disks that fail on plan.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::gate::{Judge, Verdict, gate};
use crate::channel::{Backing, BackingInfo, Fault, IoChannel, Op, StorageError};
use crate::orphan::OrphanedIo;

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in Op")]
pub enum OpKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl OpKind {
    /// The kind of `op`.
    pub fn of(op: &Op<'_>) -> Self {
        match op {
            Op::Read { .. } => OpKind::Read,
            Op::Write { .. } => OpKind::Write,
            Op::Flush => OpKind::Flush,
            Op::Discard { .. } => OpKind::Discard,
            Op::WriteZeroes { .. } => OpKind::WriteZeroes,
        }
    }
}

/// Which operations of a kind, counted from 1 over all channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// This one.
    Nth(u64),
    /// This one and all that follow.
    From(u64),
    /// Every so many.
    Every(u64),
}

/// A failure to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Of which kind.
    pub op: OpKind,
    /// Which of them.
    pub when: When,
    /// How it fails.
    pub errno: i32,
    /// Not at once, but when it is reaped.
    pub late: bool,
}

/// A disk whose operations fail as planned; one that fails has done nothing. The others pass.
#[derive(Debug)]
pub struct Fail {
    below: Arc<dyn Backing>,
    judge: Arc<Plan>,
    orphans: Arc<OrphanedIo>,
}

#[derive(Debug)]
struct Plan {
    failures: Vec<Failure>,
    seen: [AtomicU64; 5],
}

impl Judge for Plan {
    fn judge(&self, op: &Op<'_>) -> Verdict {
        let kind = OpKind::of(op);
        let number = self.seen[kind as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let meets = |failure: &&Failure| {
            failure.op == kind
                && match failure.when {
                    When::Nth(n) => number == n,
                    When::From(n) => number >= n,
                    When::Every(n) => n > 0 && number.is_multiple_of(n),
                }
        };
        match self.failures.iter().find(meets) {
            Some(failure) if failure.late => Verdict::FailLater(Fault::of_errno(failure.errno)),
            Some(failure) => Verdict::Fail(Fault::of_errno(failure.errno)),
            None => Verdict::Pass,
        }
    }
}

impl Fail {
    /// Puts `failures` in front of `below`.
    pub fn new(below: Arc<dyn Backing>, failures: Vec<Failure>) -> Arc<Self> {
        let judge = Arc::new(Plan { failures, seen: Default::default() });
        Arc::new(Fail { below, judge, orphans: Arc::default() })
    }

    /// How many operations of `kind` have come so far.
    pub fn seen(&self, kind: OpKind) -> u64 {
        self.judge.seen[kind as usize].load(Ordering::Relaxed)
    }
}

impl Backing for Fail {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        Ok(gate(&*self.below, depth, &self.judge, &self.orphans)?.0)
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.orphans.wait_quiet(deadline) && self.below.wait_quiet(deadline)
    }
}
