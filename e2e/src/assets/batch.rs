//! The Linux modules of `guest/batch`, built for the kernel of L1 and its guests with the compiler and the headers that Debian has for it.

use super::l1::Host;
use super::{News, asset, text, tree};
use crate::process::run;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

const SOURCES: [(&str, &str); 4] = [
    ("Makefile", include_str!("../../../guest/batch/Makefile")),
    ("ioplane_batch.h", include_str!("../../../guest/batch/ioplane_batch.h")),
    ("ioplane_batch.c", include_str!("../../../guest/batch/ioplane_batch.c")),
    ("ioplane_ata.c", include_str!("../../../guest/batch/ioplane_ata.c")),
];
/// What comes out of them, in the order in which they are loaded.
pub const BATCH_MODULES: [&str; 2] = ["ioplane_batch.ko", "ioplane_ata.ko"];

impl Host {
    /// A folder with [`BATCH_MODULES`] for its kernel, made if it is missing.
    pub fn batch_modules(&self, news: News<'_>) -> Result<PathBuf> {
        let version = self.version()?;
        let recipe = [&SOURCES.map(|(_, source)| source).join("\n"), &version, "1"].join("\n");
        asset("batch", &recipe, news, |to| build(&version, &tree::tree(news)?, to, news))
    }
}

fn build(version: &str, tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news(&format!(
        "batch: the modules of guest/batch for Linux {version}, with its headers and a compiler (60 MB)"
    ));
    let root = to.join("root");
    run("cp", &["-a", text(tree)?, text(&root)?])?;
    let _ = fs::remove_file(root.join("etc/resolv.conf"));
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy /etc/resolv.conf")?;
    fs::create_dir(root.join("batch"))?;
    for (name, source) in SOURCES {
        fs::write(root.join("batch").join(name), source)?;
    }
    let script = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -qq update
         apt-get -qq install -y --no-install-recommends linux-headers-{version} make >/dev/null 2>/tmp/said || {{ cat /tmp/said; exit 1; }}
         make -C /batch KERNEL=/lib/modules/{version}/build 2>&1"
    );
    run("chroot", &[text(&root)?, "/bin/sh", "-c", &script]).with_context(|| {
        format!("if Debian has no linux-headers-{version} any more, remove l1-* in the cache, so that L1 gets the kernel of today")
    })?;
    for name in BATCH_MODULES {
        fs::copy(root.join("batch").join(name), to.join(name))?;
    }
    fs::remove_dir_all(&root)?;
    Ok(BATCH_MODULES.map(PathBuf::from).into())
}
