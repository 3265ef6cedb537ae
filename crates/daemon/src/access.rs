//! Who may connect to the sockets of what is served.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::refusal::Refusal;

/// Who may connect to the sockets of disks and NICs, besides the daemon's user: a VMM that runs as somebody else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits of the sockets, if somebody has asked for some: see [`SocketAccess::bits`].
    pub mode: Option<u32>,
    /// The group that they belong to, if not the daemon's own.
    pub group: Option<u32>,
}

impl SocketAccess {
    /// Permission bits of the sockets: a group without a mode may read and write.
    pub fn bits(self) -> u32 {
        self.mode.unwrap_or(if self.group.is_some() { 0o660 } else { 0o600 })
    }

    /// Whether `socket_mode` makes other bits of them than in `old`: not if only the default is another, as it is with a group.
    pub fn asks_other_bits(self, old: SocketAccess) -> bool {
        self.mode != old.mode && self.bits() != old.bits()
    }

    /// Lets others than the daemon's user connect to a socket that was made for that one alone.
    pub fn open(self, socket: &Path) -> Result<(), Refusal> {
        if self.group.is_none() && self.bits() == 0o600 {
            return Ok(());
        }
        let open = || {
            // The group first: nobody is let in by mistake between the two.
            chown(socket, None, self.group)?;
            std::fs::set_permissions(socket, std::fs::Permissions::from_mode(self.bits()))
        };
        open().map_err(|error| {
            let remedy =
                "may the daemon's user give files to socket_group, and is socket_mode what you want?";
            Refusal::failed(format!("who may connect to {}: {error}", socket.display()), remedy)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::SocketAccess;

    #[test]
    fn only_a_mode_that_was_asked_for_differs() {
        let access = |mode, group| SocketAccess { mode, group };
        let (none, group) = (access(None, None), access(None, Some(1)));
        assert_eq!((none.bits(), group.bits()), (0o600, 0o660));
        assert!(!group.asks_other_bits(none) && !none.asks_other_bits(group));
        assert!(!access(Some(0o660), Some(1)).asks_other_bits(group), "it says what was so");
        assert!(access(Some(0o666), Some(1)).asks_other_bits(group));
        assert!(none.asks_other_bits(access(Some(0o666), None)));
    }
}
