//! By what the bytes of a connection are protected on their way.

/// By what the bytes of a connection are protected on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protection {
    /// Nothing of ours: a socket of this host, or a peer that does not know sums.
    None,
    /// Sums, against a network that changes bits ([`crate::sums`]).
    Sums,
    /// TLS, against whoever is on the way.
    Tls,
}
