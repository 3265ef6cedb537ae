//! The shell at a guest's serial port: a way to it that a migration does not break.

use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// For anything to be printed.
const PATIENCE: Duration = Duration::from_secs(60);

/// The shell says `@@STATUS@@` after each line.
pub fn ask(socket: &Path, line: &str) -> Result<()> {
    ensure!(!line.contains('\n'), "one line");
    let mut port = UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
    port.set_read_timeout(Some(PATIENCE))?;
    port.write_all(format!("{line}\n").as_bytes())?;
    let (mut said, mut bytes) = (String::new(), [0; 512]);
    loop {
        let count = port.read(&mut bytes).with_context(|| format!("the guest has said {said:?}"))?;
        ensure!(count > 0, "QEMU has closed the serial port; the guest has said {said:?}");
        said += &String::from_utf8_lossy(&bytes[..count]);
        let ended = said.trim_end().strip_suffix("@@").and_then(|head| head.rsplit_once("@@"));
        if let Some((output, status)) = ended {
            print!("{output}");
            ensure!(status == "0", "it ended with {status}");
            return Ok(());
        }
    }
}
