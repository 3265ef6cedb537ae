//! Two hosts on one machine: a network namespace and a cable to it, which can be pulled.

use std::process::Command;

use anyhow::Result;

use crate::uplink::ip;

/// The far host's address. Nothing else is in its network.
pub const FAR: &str = "198.18.7.2";
const NEAR: &str = "198.18.7.1";

/// A namespace that stands for another host, and the cable between it and this one. Both go with the value.
#[derive(Debug)]
pub struct Cable {
    space: String,
    near: String,
}

impl Cable {
    /// Lays one; `name` is at most 10 characters, and no other test's.
    pub fn lay(name: &str) -> Result<Cable> {
        let (space, near) = (format!("{name}-far"), format!("{name}0"));
        ip(&format!("netns add {space}"))?;
        let cable = Cable { space, near };
        let Cable { space, near } = &cable;
        ip(&format!("link add {near} type veth peer name far0 netns {space}"))?;
        ip(&format!("address add {NEAR}/30 dev {near}"))?;
        ip(&format!("-n {space} address add {FAR}/30 dev far0"))?;
        ip(&format!("link set {near} up"))?;
        ip(&format!("-n {space} link set lo up"))?;
        cable.plug()?;
        Ok(cable)
    }

    /// The namespace's name.
    pub fn space(&self) -> &str {
        &self.space
    }

    /// Packets are lost from now on; no connection hears of it.
    pub fn pull(&self) -> Result<()> {
        ip(&format!("-n {} link set far0 down", self.space))
    }

    /// Packets arrive again.
    pub fn plug(&self) -> Result<()> {
        ip(&format!("-n {} link set far0 up", self.space))
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        // With the namespace its end goes, and with that the near one.
        let _ = ip(&format!("netns delete {}", self.space));
        let _ = Command::new("ip").args(["link", "delete", &self.near]).output();
    }
}
