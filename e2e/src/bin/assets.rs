//! `ioplane-e2e-assets [--qemu]`: makes what test guests are made of, with progress, and says where it is. With `--qemu` also
//! the tree with a newer QEMU, where the host's own is older than 9.2.

use anyhow::{Result, bail};
use ioplane_e2e::Accelerator;
use ioplane_e2e::assets::{Guest, host_version, newer_qemu};
use std::time::Instant;

fn main() -> Result<()> {
    let qemu = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--qemu") => true,
        Some(other) => bail!("unknown argument {other:?}; usage: ioplane-e2e-assets [--qemu]"),
    };
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let guest = Guest::prepare(&news)?;
    println!("disk     {}", guest.disk.display());
    println!("kernel   {}", guest.kernel.display());
    println!("initrd   {}", guest.initrd.display());
    println!("program  {}", guest.program.display());
    println!("guests   run on {}", Accelerator::detect());
    let (major, minor) = host_version()?;
    println!("qemu     {major}.{minor}");
    if qemu {
        match newer_qemu(&news)? {
            Some(tree) => println!("newer    {}", tree.display()),
            None => println!("newer    not needed"),
        }
    }
    Ok(())
}
