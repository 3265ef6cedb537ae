//! What guests are made of, built once and kept in `$XDG_CACHE_HOME/ioplane` (or `~/.cache/ioplane`).
//!
//! ```text
//!   tree (debootstrap) --> guest: disk.img, vmlinux, initrd.img --copy, program put in--> each guest's own disk
//!        |--> l1: Debian's generic kernel with all its modules, and an initial RAM disk, for a KVM host inside a VM
//!        |--> batch: the modules of guest/batch for that kernel
//!        |                                                            ^ direct boot of another kernel
//!        |                                              kernel-SUITE: vmlinux, initrd.img
//!        |--> coop: the modules of guest/igbvf and guest/ixgbevf for that kernel
//!        `--> qemu: the tree with QEMU of Debian's backports, where the host's is older than 10.1
//!   database: this host's PostgreSQL and a database, a root disk for the guest's kernel
//!   linux32-PAGING: vmlinuz, initrd.img of a 32-bit guest of L1, from packages alone
//! ```
//!
//! An asset is a folder `NAME-KEY`; the key is a digest of its recipe, so a changed recipe makes a new folder and drops the
//! old one. It is built in a temporary folder under an exclusive lock, described by a `MANIFEST` (digest, size, time, path of each
//! file), then renamed. Whoever uses it checks sizes and times against the manifest, and the digests where those
//! differ or `IOPLANE_VERIFY_ASSETS` is set; what does not fit is built again.

mod batch;
mod coop;
mod database;
mod disk;
mod generic;
mod initrd;
mod kernel;
mod l1;
mod linux32;
mod newer;
mod program;
mod tree;

pub use batch::BATCH_MODULES;
pub use coop::CoopDriver;
pub use database::database;
pub use kernel::Kernel;
pub use l1::Host;
pub use linux32::{Linux32, Paging32};
pub use newer::{ENOUGH, host_version, newer_qemu};
pub use program::program;

use crate::process::run;
use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Hears what is being built, a line at a time.
pub type News<'a> = &'a dyn Fn(&str);

/// The parts of a Debian guest.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Raw disk image, bootable by SeaBIOS and by OVMF. Not to be used itself: see [`Guest::copy_to`].
    pub disk: PathBuf,
    /// The same kernel unpacked (ELF), for direct boot.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: PathBuf,
    /// The load program.
    pub program: PathBuf,
}

impl Guest {
    /// Makes everything that is missing.
    pub fn prepare(news: News<'_>) -> Result<Guest> {
        let program = program(news)?;
        let folder = asset("guest", &disk::recipe(), news, |to| disk::build(&tree::tree(news)?, to, news))?;
        Ok(Guest {
            disk: folder.join("disk.img"),
            kernel: folder.join("vmlinux"),
            initrd: folder.join("initrd.img"),
            program,
        })
    }

    /// The same guest with another kernel by direct boot.
    pub fn with(mut self, kernel: Kernel, news: News<'_>) -> Result<Guest> {
        [self.kernel, self.initrd] = match kernel {
            Kernel::Stable => return Ok(self),
            Kernel::Old => kernel::other("bookworm", news)?,
            Kernel::Newest => kernel::other("trixie-backports", news)?,
            Kernel::Generic => generic::generic(news)?,
        };
        Ok(self)
    }

    /// Its initial RAM disk with another first program, which finds `/bin/busybox` and the drivers in `/modules`.
    pub fn initrd_with(&self, script: &str) -> Result<Vec<u8>> {
        // Of two files of one name Linux takes the later one.
        let mut archive = fs::read(&self.initrd)?;
        archive.extend(initrd::Archive::with_init(script).finish());
        Ok(archive)
    }

    /// Gives a guest its own disk: a sparse copy at `to` with the load program in it.
    pub fn copy_to(&self, to: &Path) -> Result<()> {
        let (from, to) = (text(&self.disk)?, text(to)?);
        run("cp", &["--reflink=auto", "--sparse=always", from, to])?;
        disk::put_program(to, text(&self.program)?)
    }
}

/// An initial RAM disk with this machine's busybox and `script` as the first program.
pub fn busybox_initrd(script: &str) -> Result<Vec<u8>> {
    Ok(initrd::Archive::with_busybox(script)?.finish())
}

/// Where assets are kept.
pub fn cache() -> Result<PathBuf> {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) if !home.is_empty() => PathBuf::from(home).join(".cache"),
        _ => bail!("neither XDG_CACHE_HOME nor HOME is set; set one, the guests' disk is kept there"),
    };
    let folder = base.join("ioplane");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    Ok(folder)
}

/// The folder of an asset, built by `build` into a new folder if it is missing or damaged.
fn asset(
    name: &str,
    recipe: &str,
    news: News<'_>,
    build: impl FnOnce(&Path) -> Result<Vec<PathBuf>>,
) -> Result<PathBuf> {
    let cache = cache()?;
    let key: String = digest(recipe.as_bytes()).chars().take(12).collect();
    let folder = cache.join(format!("{name}-{key}"));
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        news(&format!("{name}: waiting for another process that is building it"));
        flock(&lock, FlockOperation::LockExclusive)?;
    }
    let damage = match check(&folder) {
        Ok(()) => return Ok(folder),
        Err(damage) => damage,
    };
    if folder.exists() {
        news(&format!("{name}: building again, {damage:#}"));
    }
    // Old recipes, half-built ones, and the damaged one.
    for entry in fs::read_dir(&cache)? {
        let entry = entry?;
        let old =
            entry.file_name().to_string_lossy().strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
        if old {
            fs::remove_dir_all(entry.path()).with_context(|| format!("remove {}", entry.path().display()))?;
        }
    }
    let temporary = cache.join(format!("{name}-building"));
    fs::create_dir(&temporary)?;
    let begun = std::time::Instant::now();
    let files =
        build(&temporary).with_context(|| format!("build the asset {name} in {}", temporary.display()))?;
    let mut manifest = String::new();
    for file in files {
        let (size, time) = stat(&temporary.join(&file))?;
        let sum = digest_file(&temporary.join(&file))?;
        writeln!(manifest, "{sum} {size} {time} {}", file.display())?;
    }
    fs::write(temporary.join("MANIFEST"), manifest)?;
    fs::rename(&temporary, &folder)?;
    news(&format!("{name}: built in {:.0} s", begun.elapsed().as_secs_f64()));
    Ok(folder)
}

fn check(folder: &Path) -> Result<()> {
    let manifest = fs::read_to_string(folder.join("MANIFEST")).context("it has no manifest")?;
    let always = std::env::var_os("IOPLANE_VERIFY_ASSETS").is_some();
    if manifest.is_empty() {
        bail!("its manifest is empty");
    }
    for line in manifest.lines() {
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().with_context(|| format!("its manifest has a bad line {line:?}"));
        let (sum, size, time, path) = (word()?, word()?, word()?, folder.join(word()?));
        let (found_size, found_time) =
            stat(&path).with_context(|| format!("{} is missing", path.display()))?;
        if found_size.to_string() != size {
            bail!("{} has {found_size} bytes instead of {size}", path.display());
        }
        if (always || found_time != time) && digest_file(&path)? != sum {
            bail!("{} has changed", path.display());
        }
    }
    Ok(())
}

fn stat(path: &Path) -> Result<(u64, String)> {
    let data = fs::metadata(path)?;
    Ok((data.len(), format!("{}.{}", data.mtime(), data.mtime_nsec())))
}

fn digest_file(path: &Path) -> Result<String> {
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut part = vec![0; 1 << 20];
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex(&sum.finalize())),
            length => sum.update(&part[..length]),
        }
    }
}

pub fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8; choose another folder", path.display()))
}
