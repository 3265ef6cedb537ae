//! Who may connect to the sockets of what is served.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::refusal::Refusal;

/// Who may connect to the sockets of disks and NICs, besides the daemon's user: a VMM that runs as somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits of the sockets.
    pub mode: u32,
    /// The group that they belong to, if not the daemon's own.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    fn default() -> Self {
        SocketAccess { mode: 0o600, group: None }
    }
}

impl SocketAccess {
    /// Lets others than the daemon's user connect to a socket that was made for that one alone.
    pub fn open(self, socket: &Path) -> Result<(), Refusal> {
        if self == SocketAccess::default() {
            return Ok(());
        }
        let open = || {
            // The group first: nobody is let in by mistake between the two.
            chown(socket, None, self.group)?;
            std::fs::set_permissions(socket, std::fs::Permissions::from_mode(self.mode))
        };
        open().map_err(|error| {
            let remedy =
                "may the daemon's user give files to socket_group, and is socket_mode what you want?";
            Refusal::failed(format!("who may connect to {}: {error}", socket.display()), remedy)
        })
    }
}
