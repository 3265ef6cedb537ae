//! An image that was published is claimed by whoever writes it. While somebody holds that claim the image is not a local disk's, also if nobody publishes
//! it at the moment: its holder has a guest that goes on when it is published again (docs/decisions/0052-claims.md).

use ioplane_api::refusal::Code;
use ioplane_api::spec::BackingSpec;
use ioplane_nbd::claim::{ClaimRecord, date};

use super::Opened;
use crate::context::Opener;
use crate::ledger;
use crate::refusal::Refusal;

/// What a disk gets an image for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// It is what the disk has been on: its own claim is settled.
    Itself,
    /// It takes the place of another backing, whose guest knows nothing of what the holder has written, whoever that is.
    InPlace,
}

/// Refuses an image that somebody else holds, for a disk that is to write it. Asked once its lock is ours: whoever published it before grants nothing any
/// more. A claim of the disk's own is released. Blocks.
pub fn check(
    opened: &Opened,
    backing: &BackingSpec,
    opening: Opening,
    owner: &Opener,
) -> Result<(), Refusal> {
    // An export has its own claim, and nobody has memory.
    let BackingSpec::File { path, .. } = backing else { return Ok(()) };
    if opened.backing.info().read_only {
        return Ok(());
    }
    let image = opened.backing.file();
    let last = ledger::last(backing, image, &owner.state_dir)?;
    let Some(ClaimRecord { generation, holder, name, since, .. }) = last.filter(|last| last.held) else {
        return Ok(());
    };
    if opening == Opening::Itself && is_own(&holder, owner) {
        // It was published while this disk used it, and the daemon or its host has gone down before that was settled. Nobody uses that export any more.
        ledger::release(backing, image, &owner.state_dir)?;
        tracing::info!(disk = owner.name, image = %path.display(), generation, "its own claim is settled");
        return Ok(());
    }
    let path = path.display();
    let since = date(since);
    let copy = ledger::undo(backing)
        .map_or_else(String::new, |undo| format!(". If this is a copy of the image that is held: {undo}"));
    Err(Refusal::conflict(
        format!("{path} was published, and is held by {name} (generation {generation}) since {since}: its guest would lose what this disk writes"),
        format!(
            "publish it (`ioplane publish disk NAME --path {path}`), then: remove that disk there; or use it from here as well, by `ioplane disk add --remote`; or, if its holder is gone, `ioplane publish release NAME`. To use it as a disk of this host afterwards: `ioplane publish remove NAME`{copy}"
        ),
    )
    .coded(Code::Taken)
    .at(backing.field()))
}

/// Whether `holder` is this disk.
fn is_own(holder: &str, owner: &Opener) -> bool {
    let this_host = || owner.identity.show().ok().map(|shown| shown.host.name);
    of_this_host(holder, this_host)
        .is_some_and(|own| owner.claims.is_holder((&owner.name, &owner.socket), own))
}

/// What a holder calls itself, if it is one of this host: exporters put the host before it that they know by its certificate.
fn of_this_host(holder: &str, this_host: impl FnOnce() -> Option<String>) -> Option<&str> {
    match holder.rsplit_once('/') {
        Some((host, own)) => (this_host()? == host).then_some(own),
        None => Some(holder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_of_another_host_is_another_one_whatever_it_calls_itself() {
        let own = |holder| of_this_host(holder, || Some("host-a".into()));
        assert_eq!(own("3f-1"), Some("3f-1"));
        assert_eq!(own("host-a/3f-1"), Some("3f-1"));
        assert_eq!((own("host-b/3f-1"), own("host-a.example/3f-1"), own("/3f-1")), (None, None, None));
        assert_eq!(of_this_host("host-a/3f-1", || None), None, "this host has no name");
    }
}
