//! `verify`.

use std::path::PathBuf;

use clap::Args;
use ioplane_api::size::Size;
use ioplane_api::spec::NbdUri;

/// The other copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerifyTarget {
    /// An image or a block device.
    Path(PathBuf),
    /// An export of an NBD server, or a device of the directory.
    Remote(NbdUri),
}

/// How the name of a device begins: a bare word is a file.
const DEVICE: &str = "device:";

fn target(text: &str) -> Result<VerifyTarget, String> {
    let remote = |text: &str| text.parse().map(VerifyTarget::Remote);
    if let Some(name) = text.strip_prefix(DEVICE) {
        let device =
            |target: &VerifyTarget| matches!(target, VerifyTarget::Remote(uri) if uri.device().is_some());
        let named = remote(name).map_err(|error| error.to_string()).ok();
        return named.filter(device).ok_or_else(|| {
            format!("`{name}` is no name of a device; write a path that begins so as ./{text}")
        });
    }
    match text.contains("://") {
        true => {
            remote(text).map_err(|error| format!("{error}; write a path that looks like a URI as ./{text}"))
        }
        false => Ok(VerifyTarget::Path(text.into())),
    }
}

/// A comparison to begin, or to end.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Name of the disk
    pub name: String,
    /// With what: a path, the URI of an NBD export, or device:NAME as `ioplane devices` has it [default: what the disk was on before it was swapped]
    #[arg(long, value_name = "COPY", value_parser = target)]
    pub with: Option<VerifyTarget>,
    /// Read at most so many bytes of each copy per second, such as 50M [default: as fast as it goes]
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<Size>,
    /// Do not wait for the end: `ioplane disk show` tells how far it is
    #[arg(long)]
    pub detach: bool,
    /// End the comparison that is under way
    #[arg(long, conflicts_with_all = ["with", "rate", "detach"])]
    pub cancel: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_told_apart() {
        assert_eq!(target("old.img"), Ok(VerifyTarget::Path("old.img".into())));
        assert_eq!(target("data"), Ok(VerifyTarget::Path("data".into())));
        assert_eq!(target("./device:x"), Ok(VerifyTarget::Path("./device:x".into())));
        for remote in ["nbds://host-a/data", "nbd+unix:///data?socket=/run/x.sock"] {
            assert_eq!(target(remote), Ok(VerifyTarget::Remote(remote.parse().unwrap())));
        }
        assert_eq!(target("device:data"), Ok(VerifyTarget::Remote("data".parse().unwrap())));
        for bad in ["http://host/data", "device:", "device:-x", "device:nbd://host/data"] {
            assert!(target(bad).unwrap_err().contains("./"), "{bad}");
        }
    }
}
