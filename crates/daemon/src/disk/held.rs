//! An image that was published is claimed by whoever writes it. While somebody holds that claim the image is not a local disk's, also if nobody publishes
//! it at the moment: its holder has a guest that goes on when it is published again (docs/decisions/0052-claims.md).

use ioplane_api::refusal::Code;
use ioplane_api::spec::BackingSpec;
use ioplane_nbd::claim::{ClaimRecord, date};

use super::Opened;
use crate::context::Opener;
use crate::ledger;
use crate::refusal::Refusal;

/// Refuses an image that somebody else holds, for a disk that is to write it. Asked once its lock is ours: whoever published it before grants nothing any
/// more. Blocks.
pub fn check(opened: &Opened, backing: &BackingSpec, owner: &Opener) -> Result<(), Refusal> {
    // An export has its own claim, and nobody has memory.
    let BackingSpec::File { path, .. } = backing else { return Ok(()) };
    if opened.backing.info().read_only {
        return Ok(());
    }
    let last = ledger::last(backing, opened.backing.file(), &owner.state_dir)?;
    let Some(ClaimRecord { generation, holder, name, since, .. }) = last.filter(|last| last.held) else {
        return Ok(());
    };
    // It was published while this disk used it, and the daemon or its host has gone down before that was settled. By TLS a host's name is before.
    let own = holder.rsplit_once('/').map_or(&*holder, |(_, own)| own);
    if owner.claims.is_holder((&owner.name, &owner.socket), own) {
        return Ok(());
    }
    let path = path.display();
    let since = date(since);
    Err(Refusal::conflict(
        format!("{path} was published, and is held by {name} (generation {generation}) since {since}: its guest would lose what this disk writes"),
        format!(
            "publish it (`ioplane publish disk NAME --path {path}`), then: remove that disk there; or use it from here as well, by `ioplane disk add --remote`; or, if its holder is gone, `ioplane publish release NAME`. To use it as a disk of this host afterwards: `ioplane publish remove NAME`"
        ),
    )
    .coded(Code::Taken)
    .at(backing.field()))
}
