//! What a poll may cost, and has cost.

/// What one poll may cost, and what it has cost so far. The last request that it takes may go over: that counts as well, so that whoever divides the core
/// among queues knows of it. In the time that it takes to copy so many bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct PollCost {
    most: u64,
    spent: u64,
}

impl PollCost {
    /// Nothing is spent yet of `most`.
    #[inline]
    pub fn of(most: u64) -> Self {
        PollCost { most, spent: 0 }
    }

    /// Something was done that cost so much.
    #[inline]
    pub fn spend(&mut self, cost: u64) {
        self.spent += cost;
    }

    /// What may still be spent.
    #[inline]
    pub fn left(&self) -> u64 {
        self.most.saturating_sub(self.spent)
    }

    /// Whether nothing more is to be begun.
    #[inline]
    pub fn is_used_up(&self) -> bool {
        self.spent >= self.most
    }

    /// All of it, also what went over.
    #[inline]
    pub fn spent(&self) -> u64 {
        self.spent
    }
}
