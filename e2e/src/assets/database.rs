//! A root disk whose guest is a PostgreSQL under pgbench: this host's PostgreSQL, with the libraries that it needs and a database.

use super::{News, asset, text};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

const IMAGE: &str = include_str!("../../../guest/database/image.sh");
const INIT: &str = include_str!("../../../guest/database/init.sh");

/// Path of the image, made if it is missing. Not to be used itself: copy it. It boots with the kernel and the initial RAM disk of
/// [`Guest`](super::Guest), and writes what pgbench says each second to the console.
pub fn database(news: News<'_>) -> Result<PathBuf> {
    let postgres = installed()?;
    let version = fs::metadata(postgres.join("bin/postgres"))?.len();
    let recipe = format!("{}\n{version}\n{IMAGE}\n{INIT}", postgres.display());
    Ok(asset("database", &recipe, news, |to| build(&postgres, to, news))?.join("database.img"))
}

/// The newest PostgreSQL of this host, as Debian installs it.
fn installed() -> Result<PathBuf> {
    let found =
        fs::read_dir("/usr/lib/postgresql").ok().into_iter().flatten().flatten().map(|entry| entry.path());
    let found = found.filter(|folder| {
        ["postgres", "initdb", "pgbench", "pg_isready"]
            .iter()
            .all(|program| folder.join("bin").join(program).exists())
    });
    let number = |folder: &PathBuf| -> u32 {
        folder.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).unwrap_or(0)
    };
    found.max_by_key(number).context("no PostgreSQL in /usr/lib/postgresql: install the package postgresql")
}

fn build(postgres: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the image is made with chroot, as root; run this once as root, later runs find the result in the cache"
        );
    }
    news(&format!("database: an image with {}", postgres.display()));
    let root = to.join("root");
    fs::create_dir(&root)?;
    fs::write(root.join("init.sh"), INIT)?;
    let image = to.join("database.img");
    let script = to.join("image.sh");
    fs::write(&script, IMAGE)?;
    run("sh", &[text(&script)?, text(postgres)?, text(&root)?, text(&image)?])?;
    fs::remove_dir_all(&root)?;
    Ok(vec![PathBuf::from("database.img")])
}
