//! VERSION: what both sides can do.

use ioplane_memory::MAX_REGIONS;
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::connection::{Message, Reply};
use super::fault::ClientFault;
use super::spec::{self, Version};

/// What the client said of itself, as far as it matters here. What is unknown is ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Theirs {
    capabilities: Capabilities,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Capabilities {
    max_msg_fds: Option<u64>,
    max_data_xfer_size: Option<u64>,
    ioplane_shadow_pages: bool,
}

#[derive(Debug, Serialize)]
struct Ours {
    capabilities: Offered,
}

#[derive(Debug, Serialize)]
struct Offered {
    max_msg_fds: usize,
    max_data_xfer_size: u32,
    max_dma_maps: usize,
    pgsizes: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ioplane_shadow_pages: bool,
}

/// What was agreed on.
#[derive(Debug, Clone, Copy)]
pub struct Agreed {
    /// Descriptors that the client takes with one message.
    pub files: usize,
    /// The client maps shadow pages.
    pub shadows: bool,
    /// Most bytes of data in one message to the client.
    pub transfer: usize,
}

/// Agrees on a version and capabilities; `shadows` says whether there are shadow pages to offer.
pub fn negotiate(message: &Message, shadows: bool) -> Result<(Agreed, Reply), ClientFault> {
    message.check_files(0)?;
    let (version, data) = message.split::<Version>()?;
    if version.major != spec::MAJOR {
        return Err(ClientFault::BadVersion(version.major, version.minor));
    }
    if data.len() > spec::MAX_VERSION {
        return Err(ClientFault::BadCapabilities(format!("{} bytes of them", data.len())));
    }
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let text = data[..end].trim_ascii();
    let theirs: Theirs = if text.is_empty() {
        Theirs::default()
    } else {
        serde_json::from_slice(text).map_err(|e| ClientFault::BadCapabilities(e.to_string()))?
    };
    // The default of the protocol is one.
    let files = theirs.capabilities.max_msg_fds.unwrap_or(1).min(spec::MAX_FILES as u64) as usize;
    // The default of the protocol is more than a message of ours has.
    let transfer = theirs.capabilities.max_data_xfer_size.unwrap_or(u64::MAX);
    let transfer = transfer.min(spec::MAX_TRANSFER.into()) as usize;
    let agreed = Agreed { files, shadows: shadows && theirs.capabilities.ioplane_shadow_pages, transfer };
    let ours = Ours {
        capabilities: Offered {
            max_msg_fds: spec::MAX_FILES,
            max_data_xfer_size: spec::MAX_TRANSFER,
            max_dma_maps: MAX_REGIONS,
            pgsizes: ioplane_memory::PAGE,
            ioplane_shadow_pages: agreed.shadows,
        },
    };
    // The lesser minor version of both: ours is the least that there is.
    let version = Version { major: spec::MAJOR, minor: spec::MINOR };
    let mut body = version.as_bytes().to_vec();
    body.extend(serde_json::to_vec(&ours).map_err(|e| ClientFault::BadCapabilities(e.to_string()))?);
    body.push(0);
    Ok((agreed, Reply { body, files: Vec::new() }))
}
