//! Why a frame was dropped.

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a frame was dropped; counted on one port, see [`crate::PortReading`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum DropReason { $($(#[$doc])* $name,)* }

        impl DropReason {
            /// Every cause.
            pub const ALL: &[DropReason] = &[$(DropReason::$name,)*];

            /// The stable name: of metrics, and for people.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$name => $text,)* }
            }
        }
    };
}

causes! {
    /// Shorter than an Ethernet header. Counted on the sender.
    Runt = "runt",
    /// Longer than the MTU of its sender or receiver and not to be segmented, or than [`crate::LONGEST`].
    Giant = "giant",
    /// Not a frame that anybody may send: its source is a group, or nobody. Counted on the sender.
    Malformed = "malformed",
    /// What the offload header says is not so. Counted on the sender.
    Offload = "offload",
    /// Its source is the address of another port. Counted on the sender.
    Spoofed = "spoofed",
    /// A VLAN that its sender (counted there) or its receiver (there) is not in.
    Vlan = "vlan",
    /// Sender and receiver are both isolated. Counted on the sender.
    Isolated = "isolated",
    /// No buffer was empty: the receiver does not take its frames fast enough. Counted on the receiver.
    Full = "full",
    /// The receiver's guest has no buffer for it. Counted on the receiver.
    NoBuffer = "no_buffer",
    /// Flooding is over the sender's budget. Counted on the sender.
    Storm = "storm",
    /// Its source was seen at too many places: a loop, or a thief. Counted on the sender.
    Loop = "loop",
    /// Not for this receiver: its filter, or an address that no switch forwards.
    Filtered = "filtered",
    /// The sender's or the receiver's link is down.
    Down = "down",
    /// There is no other port that it could go to. Counted on the sender.
    NoPath = "no_path",
    /// It waited for its receiver when the daemon was upgraded. Counted on the receiver.
    Upgrade = "upgrade",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_in_order() {
        for (at, cause) in DropReason::ALL.iter().enumerate() {
            assert_eq!(*cause as usize, at);
            assert_eq!(DropReason::ALL.iter().filter(|other| other.name() == cause.name()).count(), 1);
        }
    }
}
