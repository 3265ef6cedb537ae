//! `ioplane doctor`: what this host lacks, what follows, and what to do.

mod pci;
mod run_dir;

use std::fs::OpenOptions;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use ioplane_api::report::{FailureReport, StatusReport};
use ioplane_api::size::Size;
use ioplane_cli::client::Client;
use ioplane_cli::command::kvm::Kvm;
use ioplane_cli::command::qemu::Version;
use ioplane_cli::output::{out, print_json};
use serde::{Deserialize, Serialize};

/// How a finding weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Weight {
    /// As it should be.
    Good,
    /// It works without; slower, or with less.
    Lacking,
    /// Nothing can be served without.
    Fatal,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    weight: Weight,
    found: String,
    follows: Option<String>,
    todo: Option<String>,
}

/// Everything, and whether this host can serve at all.
#[derive(Debug, Serialize)]
struct DoctorReport {
    can_serve: bool,
    findings: Vec<Finding>,
}

fn good(name: &'static str, found: impl Into<String>) -> Finding {
    Finding { name, weight: Weight::Good, found: found.into(), follows: None, todo: None }
}

fn bad(name: &'static str, weight: Weight, found: impl Into<String>, follows: &str, todo: &str) -> Finding {
    let (follows, todo) = (Some(follows.to_owned()), Some(todo.to_owned()));
    Finding { name, weight, found: found.into(), follows, todo }
}

/// Looks, and says what was seen. Success if this host can serve at all.
pub fn run(client: Option<&Client>, json: bool) -> Result<ExitCode> {
    let kvm_here = Kvm::look();
    let mut findings = vec![memfd(), io_uring(), processors(), kvm(&kvm_here)];
    findings.extend(barriers(&kvm_here));
    findings.extend([
        qemu(),
        pci::vfio_user(),
        pci::iommu(),
        pci::vfio(),
        pci::remapping(),
        locks(),
        memlock(),
        descriptors(),
        cgroup(),
        pages(),
        run_dir::look(client.map_or(Path::new(ioplane_api::SOCKET), Client::socket)),
    ]);
    // Whoever looks at a host before there is a daemon is told nothing of one.
    findings.extend(client.and_then(|client| client.get("/v1/status").ok()).iter().flat_map(daemon));
    findings.extend(client.into_iter().flat_map(pci::functions));
    let can_serve = findings.iter().all(|finding| finding.weight != Weight::Fatal);
    let report = DoctorReport { can_serve, findings };
    if json {
        print_json(&report)?;
    } else {
        out(text(&report).as_bytes())?;
    }
    Ok(if can_serve { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &DoctorReport) -> String {
    let mut text = String::new();
    for Finding { name, weight, found, follows, todo } in &report.findings {
        let mark = match weight {
            Weight::Good => "ok",
            Weight::Lacking => "lacking",
            Weight::Fatal => "FATAL",
        };
        text.push_str(&format!("{mark:<8} {name:<14} {found}\n"));
        text.extend(follows.iter().map(|line| format!("{:23} effect: {line}\n", "")));
        text.extend(todo.iter().map(|line| format!("{:23} hint: {line}\n", "")));
    }
    let verdict = if report.can_serve { "this host can serve disks" } else { "this host cannot serve disks" };
    text + &format!("\n{verdict}\n")
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// What the daemon that runs here cannot serve.
fn daemon(status: &StatusReport) -> Vec<Finding> {
    let name = "daemon";
    let failures = status.failures();
    if failures.is_empty() {
        return vec![good(name, format!("pid {}: everything is served", status.pid))];
    }
    let follows = "its guest has to wait; the others are served";
    let finding =
        |failure: &FailureReport| bad(name, Weight::Lacking, failure.words(), follows, &failure.remedy);
    failures.iter().map(finding).collect()
}

fn memfd() -> Finding {
    let name = "shared memory";
    let made = rustix::fs::memfd_create("ioplane-doctor", rustix::fs::MemfdFlags::CLOEXEC)
        .and_then(|file| rustix::fs::ftruncate(&file, 1 << 20).map(|()| file))
        .map_err(std::io::Error::from)
        .and_then(|file| {
            let mut file = std::fs::File::from(file);
            file.rewind()?;
            file.write_all(b"x")
        });
    match made {
        Ok(()) => good(name, "memfd works"),
        Err(error) => bad(
            name,
            Weight::Fatal,
            format!("memfd_create: {error}"),
            "guests cannot share their memory with the daemon, and nothing can be served",
            "allow memfd_create in this container's seccomp profile",
        ),
    }
}

fn io_uring() -> Finding {
    let name = "io_uring";
    let follows = "images are read and written by threads: more processor time for each request";
    match io_uring::IoUring::new(4) {
        Ok(_) => good(name, "works"),
        Err(error) => {
            let switch = read("/proc/sys/kernel/io_uring_disabled");
            let todo = match (switch.as_deref(), error.raw_os_error()) {
                (Some("1" | "2"), _) => "sysctl kernel.io_uring_disabled=0",
                (_, Some(12)) => {
                    "raise the limit on locked memory: ulimit -l unlimited, LimitMEMLOCK=infinity"
                }
                (_, Some(38)) => "use a kernel with io_uring (5.10 or later)",
                _ => {
                    "allow io_uring_setup, io_uring_enter and io_uring_register in this container's seccomp profile"
                }
            };
            bad(name, Weight::Lacking, format!("refused: {error}"), follows, todo)
        }
    }
}

fn processors() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if count >= 2 {
        return good("processors", format!("{count} for this process"));
    }
    bad(
        "processors",
        Weight::Lacking,
        "one for this process",
        "the I/O core and the guests share it: polling takes their time and gains nothing",
        "give this host a second one, or write notify = \"notified\" under [[core]]",
    )
}

fn kvm(kvm: &Kvm) -> Finding {
    let name = "KVM";
    let Kvm { opened, flag } = kvm;
    let follows =
        "guests run by emulation (-accel tcg): some ten times slower, and rates say little about real hosts";
    match (opened, flag) {
        (Ok(()), Some(flag)) => good(name, format!("usable ({flag})")),
        (Ok(()), None) => bad(
            name,
            Weight::Lacking,
            "/dev/kvm opens, and the processor has neither vmx nor svm: a software KVM that stock guests do not survive",
            follows,
            "use a host with VT-x or AMD-V, or nested virtualization; here say -accel tcg",
        ),
        (Err(error), Some(_)) => bad(
            name,
            Weight::Lacking,
            format!("/dev/kvm: {error}"),
            follows,
            "modprobe kvm_intel or kvm_amd, and let this user open it",
        ),
        (Err(_), None) => {
            let todo = "switch virtualization on in the firmware, or nested virtualization in the host around this one";
            bad(name, Weight::Lacking, "the processor shows neither vmx nor svm", follows, todo)
        }
    }
}

/// What TCG does to a driver's barriers (docs/measurements/tcg-barrier.md). Nothing where guests run on KVM.
fn barriers(kvm: &Kvm) -> Option<Finding> {
    (!kvm.usable()).then(|| {
        bad(
            "one vCPU",
            Weight::Lacking,
            "QEMU's emulation leaves out memory barriers when a guest can have only one vCPU",
            "now and then a kick is lost, and requests of that guest stand still until its next kick",
            "start a guest with one vCPU by -smp 1,maxcpus=2, which keeps the barriers; with more vCPUs leave thread=single out",
        )
    })
}

fn qemu() -> Finding {
    let name = "QEMU";
    match Version::ask("qemu-system-x86_64") {
        Ok(version @ Version(major, minor)) if version >= Version(5, 1) => {
            let wait = if version < Version(9, 2) {
                "; reconnects in whole seconds (9.2 and later: 0.1 s)"
            } else {
                ""
            };
            good(name, format!("{major}.{minor}{wait}"))
        }
        Ok(Version(major, minor)) => bad(
            name,
            Weight::Lacking,
            format!("{major}.{minor}"),
            "too old for in-flight requests to survive a crash of the daemon",
            "install 7.2 or later",
        ),
        Err(_) => bad(
            name,
            Weight::Lacking,
            "no qemu-system-x86_64",
            "the daemon serves any VMM with vhost-user-blk; the demo and `qemu-args` want a QEMU",
            "apt install qemu-system-x86",
        ),
    }
}

/// Where a file for a trial can be made.
fn trial() -> Option<(PathBuf, std::fs::File)> {
    let folders = [PathBuf::from("/var/lib"), std::env::temp_dir()];
    folders.into_iter().find_map(|folder| {
        let path = folder.join(format!(".ioplane-doctor-{}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).ok()?;
        let _ = std::fs::remove_file(&path);
        Some((folder, file))
    })
}

fn locks() -> Finding {
    let name = "image locks";
    let Some((folder, file)) = trial() else {
        return bad(
            name,
            Weight::Lacking,
            "no directory to try it in",
            "nothing is known",
            "run this as root",
        );
    };
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => good(name, format!("work in {}", folder.display())),
        Err(error) => bad(
            name,
            Weight::Lacking,
            format!("{}: {error}", folder.display()),
            "an image there cannot be kept from a second user, and is refused",
            "keep images on a file system with locks: ext4, xfs, btrfs, NFS 4",
        ),
    }
}

fn memlock() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match limit {
        None => good("locked memory", "no limit"),
        Some(bytes) if bytes >= 1 << 20 => good("locked memory", Size(bytes).to_string()),
        Some(bytes) => bad(
            "locked memory",
            Weight::Lacking,
            Size(bytes).to_string(),
            "on kernels before 5.12 io_uring takes from it: disks may get threads instead",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
        ),
    }
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    match limit {
        Some(count) if count < 1024 => bad(
            "open files",
            Weight::Lacking,
            count.to_string(),
            "each queue of a guest takes about ten descriptors: later disks are refused",
            "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
        ),
        limit => good("open files", limit.map_or("no limit".to_owned(), |count| count.to_string())),
    }
}

fn cgroup() -> Finding {
    let name = "cgroup limits";
    let own = read("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let folder = Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'));
    let limited = |file: &str| read(folder.join(file)).filter(|text| !text.starts_with("max"));
    let mut found = Vec::new();
    found.extend(limited("cpu.max").map(|quota| format!("cpu.max {quota}")));
    found.extend(limited("memory.max").map(|bytes| {
        let size = bytes.parse().map(|bytes| Size(bytes).to_string()).unwrap_or(bytes);
        format!("memory.max {size}")
    }));
    if found.is_empty() {
        return good(name, "none seen");
    }
    bad(
        name,
        Weight::Lacking,
        found.join(", "),
        "a polling core spends the processor quota and is then stopped for the rest of each period; disks in memory count \
         against the memory",
        "run the daemon outside of the limit, or write notify = \"notified\" under [[core]]",
    )
}

fn pages() -> Finding {
    let name = "huge pages";
    let transparent = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let chosen =
        transparent.split('[').nth(1).and_then(|rest| rest.split(']').next()).unwrap_or("never").to_owned();
    let reserved: u64 = read("/proc/sys/vm/nr_hugepages").and_then(|text| text.parse().ok()).unwrap_or(0);
    // Not needed: said, not complained of.
    good(name, format!("optional; shared memory: {chosen}, reserved: {reserved}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(kvm: &Kvm) -> String {
        text(&DoctorReport { can_serve: true, findings: barriers(kvm).into_iter().collect() })
    }

    #[test]
    fn without_kvm_a_guest_is_told_to_have_room_for_a_second_vcpu() {
        let refused = || Err(std::io::ErrorKind::PermissionDenied.into());
        let without = [
            Kvm { opened: Ok(()), flag: None },
            Kvm { opened: refused(), flag: Some("vmx") },
            Kvm { opened: refused(), flag: None },
        ];
        for kvm in &without {
            let text = shown(kvm);
            assert!(text.contains("start a guest with one vCPU by -smp 1,maxcpus=2"), "{text}");
            assert!(text.contains("leaves out memory barriers"), "{text}");
        }
        assert_eq!(shown(&Kvm { opened: Ok(()), flag: Some("svm") }), "\nthis host can serve disks\n");
    }
}
