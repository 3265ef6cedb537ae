//! Drivers that cooperate (`guest/igbvf`, `guest/ixgbevf`): Debian's source of each, our patch and our files, built for the kernel of L1 and its guests.

use super::l1::Host;
use super::{News, asset, text, tree};
use crate::process::run;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

macro_rules! sources {
    ($($path:literal),*) => { [$(($path, include_str!(concat!("../../../guest/", $path)))),*] };
}

/// Below `guest`.
const SOURCES: [(&str, &str); 9] = sources![
    "coop/build.sh",
    "coop/ioplane_coop.h",
    "coop/ioplane_coop.c",
    "igbvf/igbvf.patch",
    "igbvf/igbvf_coop.h",
    "igbvf/igbvf_coop.c",
    "ixgbevf/ixgbevf.patch",
    "ixgbevf/ixgbevf_coop.h",
    "ixgbevf/ixgbevf_coop.c"
];

/// A driver of Linux that we have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoopDriver {
    /// Of an 82576's virtual function.
    Igbvf,
    /// Of an 82599's.
    Ixgbevf,
}

impl CoopDriver {
    const ALL: [CoopDriver; 2] = [CoopDriver::Igbvf, CoopDriver::Ixgbevf];

    fn name(self) -> &'static str {
        match self {
            CoopDriver::Igbvf => "igbvf",
            CoopDriver::Ixgbevf => "ixgbevf",
        }
    }

    fn module(self) -> PathBuf {
        Path::new(self.name()).with_extension("ko")
    }
}

impl Host {
    /// The driver's module for its kernel, made if it is missing.
    pub fn cooperating(&self, driver: CoopDriver, news: News<'_>) -> Result<PathBuf> {
        let version = self.version()?;
        let recipe = [&SOURCES.map(|(_, source)| source).join("\n"), &version, "1"].join("\n");
        let folder = asset("coop", &recipe, news, |to| build(&version, &tree::tree(news)?, to, news))?;
        Ok(folder.join(driver.module()))
    }
}

fn build(version: &str, tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news(&format!(
        "coop: Debian's source of Linux {version} (150 MB), its headers and a compiler (60 MB), for the modules of guest/igbvf and guest/ixgbevf"
    ));
    let root = to.join("root");
    run("cp", &["-a", text(tree)?, text(&root)?])?;
    let _ = fs::remove_file(root.join("etc/resolv.conf"));
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy /etc/resolv.conf")?;
    for (name, source) in SOURCES {
        let place = root.join("guest").join(name);
        fs::create_dir_all(place.parent().unwrap_or(&root))?;
        fs::write(place, source)?;
    }
    // 6.12.117+deb13-amd64: linux-source-6.12.
    let series: Vec<&str> = version.split('.').take(2).collect();
    let series = series.join(".");
    let names = CoopDriver::ALL.map(CoopDriver::name);
    let folders = names.map(|name| format!("'*/drivers/net/ethernet/intel/{name}/*'")).join(" ");
    let names = names.join(" ");
    let script = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -qq update
         apt-get -qq install -y --no-install-recommends linux-headers-{version} make xz-utils patch >/dev/null 2>/tmp/said || {{ cat /tmp/said; exit 1; }}
         mkdir /source; cd /source; apt-get -qq download linux-source-{series}; dpkg-deb -x linux-source-*.deb .; rm linux-source-*.deb
         tar -xJf usr/src/linux-source-{series}.tar.xz --strip-components=1 --wildcards {folders}
         for driver in {names}; do sh /guest/coop/build.sh $driver /source /lib/modules/{version}/build /built-$driver 2>&1; done"
    );
    run("chroot", &[text(&root)?, "/bin/sh", "-c", &script]).with_context(|| {
        format!("if Debian has no linux-headers-{version} any more, remove l1-* in the cache, so that L1 gets the kernel of today")
    })?;
    for driver in CoopDriver::ALL {
        let built = root.join(format!("built-{}", driver.name())).join(driver.module());
        fs::copy(built, to.join(driver.module()))?;
    }
    fs::remove_dir_all(&root)?;
    Ok(CoopDriver::ALL.map(CoopDriver::module).into())
}
