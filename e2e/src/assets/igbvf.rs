//! The igbvf that cooperates (`guest/igbvf`): Debian's source of it, our patch and our file, built for the kernel of L1 and its guests.

use super::l1::Host;
use super::{News, asset, text, tree};
use crate::process::run;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

const SOURCES: [(&str, &str); 4] = [
    ("build.sh", include_str!("../../../guest/igbvf/build.sh")),
    ("igbvf.patch", include_str!("../../../guest/igbvf/igbvf.patch")),
    ("ioplane_coop.h", include_str!("../../../guest/igbvf/ioplane_coop.h")),
    ("ioplane_coop.c", include_str!("../../../guest/igbvf/ioplane_coop.c")),
];
const MODULE: &str = "igbvf.ko";

impl Host {
    /// The module for its kernel, made if it is missing.
    pub fn cooperating_igbvf(&self, news: News<'_>) -> Result<PathBuf> {
        let version = self.version()?;
        let recipe = [&SOURCES.map(|(_, source)| source).join("\n"), &version, "1"].join("\n");
        let folder = asset("igbvf", &recipe, news, |to| build(&version, &tree::tree(news)?, to, news))?;
        Ok(folder.join(MODULE))
    }
}

fn build(version: &str, tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news(&format!(
        "igbvf: Debian's source of Linux {version} (150 MB), its headers and a compiler (60 MB), for the module of guest/igbvf"
    ));
    let root = to.join("root");
    run("cp", &["-a", text(tree)?, text(&root)?])?;
    let _ = fs::remove_file(root.join("etc/resolv.conf"));
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy /etc/resolv.conf")?;
    fs::create_dir(root.join("igbvf"))?;
    for (name, source) in SOURCES {
        fs::write(root.join("igbvf").join(name), source)?;
    }
    // 6.12.117+deb13-amd64: linux-source-6.12.
    let series: Vec<&str> = version.split('.').take(2).collect();
    let series = series.join(".");
    let script = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -qq update
         apt-get -qq install -y --no-install-recommends linux-headers-{version} make xz-utils patch >/dev/null 2>/tmp/said || {{ cat /tmp/said; exit 1; }}
         mkdir /source; cd /source; apt-get -qq download linux-source-{series}; dpkg-deb -x linux-source-*.deb .; rm linux-source-*.deb
         tar -xJf usr/src/linux-source-{series}.tar.xz --strip-components=1 --wildcards '*/drivers/net/ethernet/intel/igbvf/*'
         sh /igbvf/build.sh /source /lib/modules/{version}/build /built 2>&1"
    );
    run("chroot", &[text(&root)?, "/bin/sh", "-c", &script]).with_context(|| {
        format!("if Debian has no linux-headers-{version} any more, remove l1-* in the cache, so that L1 gets the kernel of today")
    })?;
    fs::copy(root.join("built").join(MODULE), to.join(MODULE))?;
    fs::remove_dir_all(&root)?;
    Ok(vec![PathBuf::from(MODULE)])
}
