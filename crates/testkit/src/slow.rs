//! A disk that is slow in the kernel, for processes of ours that are put in its group: what they have asked for lands long
//! after they were killed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device on a file of its own, and a control group whose processes read and write it slowly.
#[derive(Debug)]
pub struct SlowDisk {
    device: String,
    group: PathBuf,
}

impl SlowDisk {
    /// A disk of `bytes`, in a file in `folder`, with `speed` bytes a second in each direction. The error says what this host
    /// lacks: the test that wanted it has to say loudly that it did not run.
    pub fn new(folder: &Path, bytes: u64, speed: u64) -> Result<Self, String> {
        let image = folder.join("slow.img");
        let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(bytes).map_err(|error| error.to_string())?;
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output();
        let made = made.map_err(|error| format!("losetup: {error}"))?;
        if !made.status.success() {
            return Err(format!("no loop device: {}", String::from_utf8_lossy(&made.stderr).trim()));
        }
        let device = String::from_utf8_lossy(&made.stdout).trim().to_owned();
        let mut disk = SlowDisk { device, group: PathBuf::new() };
        disk.group = disk.limit(speed)?;
        Ok(disk)
    }

    /// Makes the control group: version 1 or 2, whichever has the controller here.
    fn limit(&self, speed: u64) -> Result<PathBuf, String> {
        let number = std::fs::metadata(&self.device).map_err(|error| error.to_string())?.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let name = format!("ioplane-slow-{}-{}", std::process::id(), number.replace(':', "-"));
        let old = [
            ("blkio.throttle.read_bps_device", format!("{number} {speed}")),
            ("blkio.throttle.write_bps_device", format!("{number} {speed}")),
        ];
        let new = [("io.max", format!("{number} rbps={speed} wbps={speed}"))];
        let places: [(&str, &[(&str, String)]); 3] =
            [("/sys/fs/cgroup/blkio", &old), ("/sys/fs/cgroup", &new), ("/sys/fs/cgroup/unified", &new)];
        let mut tried = Vec::new();
        for (root, limits) in places {
            let _ = std::fs::write(format!("{root}/cgroup.subtree_control"), "+io");
            let group = Path::new(root).join(&name);
            if std::fs::create_dir(&group).is_err() {
                tried.push(format!("no groups in {root}"));
                continue;
            }
            match limits.iter().try_for_each(|(file, limit)| std::fs::write(group.join(file), limit)) {
                Ok(()) => return Ok(group),
                Err(error) => {
                    let _ = std::fs::remove_dir(&group);
                    tried.push(format!("{root}: {error}"));
                }
            }
        }
        Err(format!("no way to make a disk slow: {}", tried.join("; ")))
    }

    /// Path of the block device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Puts a process into the group.
    pub fn slows(&self, process: u32) -> std::io::Result<()> {
        std::fs::write(self.group.join("cgroup.procs"), process.to_string())
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
        let _ = std::fs::remove_dir(&self.group);
    }
}
