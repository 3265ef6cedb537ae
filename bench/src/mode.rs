//! How the I/O core of ioplane learns of requests, as a contender.

/// Each is a contender of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    Polled,
    Adaptive,
    Notified,
}

impl Mode {
    /// All.
    pub const ALL: [Mode; 3] = [Mode::Polled, Mode::Adaptive, Mode::Notified];
    /// Those that each build has, however old.
    pub const OF_EACH_BUILD: [Mode; 2] = [Mode::Polled, Mode::Notified];

    /// As the configuration has it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Polled => "polled",
            Mode::Adaptive => "adaptive",
            Mode::Notified => "notified",
        }
    }

    /// The contender's name. Polled has the short one: its figures were the first, and keep their keys.
    pub fn contender(self) -> &'static str {
        if self == Mode::Polled { "ioplane" } else { self.word() }
    }
}
