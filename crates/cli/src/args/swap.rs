//! `swap`.

use std::path::PathBuf;

use clap::Args;
use ioplane_api::size::Size;
use ioplane_api::spec::{DirectWord, EngineWord, NbdUri};

/// Where a disk's bytes are to live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapTarget {
    /// An image or a block device.
    Path(PathBuf),
    /// Memory of the daemon.
    Memory,
    /// An export of an NBD server.
    Remote(NbdUri),
}

fn target(text: &str) -> Result<SwapTarget, String> {
    match text {
        "memory" => Ok(SwapTarget::Memory),
        uri if uri.contains("://") => uri
            .parse()
            .map(SwapTarget::Remote)
            .map_err(|error| format!("{error}; write a path that looks like a URI as ./{uri}")),
        path => Ok(SwapTarget::Path(path.into())),
    }
}

/// A swap to begin, or to end.
#[derive(Debug, Args)]
pub struct SwapArgs {
    /// Name of the disk
    pub name: String,
    /// Where to: a path (made if it is not there), the URI of an NBD export, or `memory`
    #[arg(long, value_name = "TARGET", value_parser = target, required_unless_present = "cancel")]
    pub to: Option<SwapTarget>,
    /// Copy at most so many bytes per second, such as 50M [default: as fast as it goes]
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<Size>,
    /// If the guest writes faster than the copy gets ahead, let its writes make at most so many bytes per second to be copied again, such as 50M, until
    /// little is left [default: mirror after three passes, however much is left]
    #[arg(long, value_name = "BYTES")]
    pub hold: Option<Size>,
    /// What is at the target may be lost: an image that holds something, a device, an export
    #[arg(long)]
    pub overwrite: bool,
    /// Whether the new image's I/O goes past the host's page cache
    #[arg(long, value_name = "WHEN")]
    pub direct: Option<DirectWord>,
    /// Who does the new image's I/O
    #[arg(long, value_name = "WHO")]
    pub engine: Option<EngineWord>,
    /// Fail requests when the new export's server has not been reachable for so many seconds [default: never, they wait]
    #[arg(long, value_name = "SECONDS")]
    pub timeout_s: Option<u64>,
    /// Do not wait for the end: `ioplane disk show` tells how far it is
    #[arg(long)]
    pub detach: bool,
    /// End the swap that is under way: the disk goes on with the backing that it has
    #[arg(long, conflicts_with_all = ["to", "rate", "hold", "overwrite", "direct", "engine", "timeout_s", "detach"])]
    pub cancel: bool,
}
