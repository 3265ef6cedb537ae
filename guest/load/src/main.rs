//! `ioplane-load [PATH]`: serves the host's requests over PATH, by default the virtio-serial port
//! `org.ioplane.load`, or `/dev/ttyS1` where there is no such port.

use anyhow::{Context, Result};
use ioplane_guest_load::protocol::PORT;
use ioplane_guest_load::serve::Server;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, Read, Result as IoResult};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn main() -> Result<()> {
    let path = match std::env::args_os().nth(1) {
        Some(path) => PathBuf::from(path),
        None => port(),
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}, the way to the host", path.display()))?;
    if let Ok(mut terminal) = rustix::termios::tcgetattr(&file) {
        terminal.make_raw();
        rustix::termios::tcsetattr(&file, rustix::termios::OptionalActions::Now, &terminal)?;
    }
    eprintln!("ioplane-load: listening on {}", path.display());
    let server = Server::new(Box::new(file.try_clone()?));
    server.run(&mut BufReader::new(Patient { file })).context("read requests")
}

/// A port reads as ended while no host is connected; wait for the next one instead of ending.
struct Patient {
    file: File,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        loop {
            match self.file.read(buffer)? {
                0 => std::thread::sleep(Duration::from_millis(20)),
                length => return Ok(length),
            }
        }
    }
}

/// The port's node; udev's links are not needed. A port can appear a moment after its driver.
fn port() -> PathBuf {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT {
                return Path::new("/dev").join(entry.file_name());
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    PathBuf::from("/dev/ttyS1")
}
