//! The events that a core gets from the kernel.

/// What the kernel keeps for the mailbox, and for a ring in the set. A slot's is twice its token, and one more for its completions.
const MAILBOX: u64 = u64::MAX;
const RING: u64 = u64::MAX - 1;

/// A descriptor that was readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readable {
    /// The mailbox's.
    Mailbox,
    /// The kick of the slot with that token.
    Kick(usize),
    /// The completion descriptor of the slot with that token.
    Completion(usize),
    /// The core's ring, which knows more.
    Ring,
}

impl Readable {
    pub(crate) fn to_data(self) -> u64 {
        match self {
            Readable::Mailbox => MAILBOX,
            Readable::Ring => RING,
            Readable::Kick(token) => (token as u64) << 1,
            Readable::Completion(token) => ((token as u64) << 1) | 1,
        }
    }

    pub(crate) fn of_data(data: u64) -> Self {
        match (data, data & 1) {
            (MAILBOX, _) => Readable::Mailbox,
            (RING, _) => Readable::Ring,
            (_, 0) => Readable::Kick((data >> 1) as usize),
            _ => Readable::Completion((data >> 1) as usize),
        }
    }
}
