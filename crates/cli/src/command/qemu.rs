//! The arguments that give a disk, a NIC or a PCI function to a QEMU.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, FunctionReport, NicReport};
use ioplane_api::size::Size;
use ioplane_api::spec::MTU;

use crate::args::Accel;
use crate::output::CommandError;

/// Major and minor number of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// From `7.2`, `11.1.3`, or all of what `--version` prints.
    pub fn of(text: &str) -> Option<Version> {
        let word = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let mut numbers = word.split('.').map(|part| part.parse::<u32>().ok());
        Some(Version(numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    /// Runs `program --version`, and waits for its end.
    pub fn ask(program: &str) -> Result<Version> {
        let output =
            Command::new(program).arg("--version").stdin(Stdio::null()).output().map_err(|error| {
                let remedy = "install it, or say --qemu-version 7.2";
                CommandError::new(Code::CommandFailed, format!("run {program} --version: {error}"), remedy)
            })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = text.lines().next().and_then(|line| line.split("version").nth(1)).and_then(Version::of);
        version.ok_or_else(|| {
            let error = format!("{program} --version does not tell");
            CommandError::new(Code::CommandFailed, error, "say --qemu-version 7.2").into()
        })
    }

    /// `reconnect-ms` came with 9.2; `reconnect` (seconds) went with 11.
    fn reconnect(self) -> &'static str {
        if self >= Version(9, 2) { "reconnect-ms=100" } else { "reconnect=1" }
    }
}

/// A value inside an option: QEMU reads two commas as one.
fn value(text: &str) -> String {
    text.replace(',', ",,")
}

/// The guest's memory: vhost-user and vfio-user need it shared. Of huge pages of that size, if one is given.
pub fn memory(Size(bytes): Size, hugetlb: Option<Size>) -> Result<Vec<String>> {
    let whole = |bytes: u64| {
        if bytes.is_multiple_of(1 << 20) { format!("{}M", bytes >> 20) } else { bytes.to_string() }
    };
    let mut backend = format!("memory-backend-memfd,id=ioplane-memory,size={},share=on", whole(bytes));
    if let Some(page) = hugetlb {
        if ![2 << 20, 1 << 30].contains(&page.0) || !bytes.is_multiple_of(page.0) {
            let error = format!("memory of {} is not made of huge pages of {page}", Size(bytes));
            let remedy = "an x86-64 host has pages of 2M and 1G; --memory must be a multiple of --hugetlb";
            return Err(CommandError::new(Code::Usage, error, remedy).into());
        }
        backend.push_str(&format!(",hugetlb=on,hugetlbsize={}", whole(page.0)));
    }
    Ok(["-object", &backend, "-machine", "memory-backend=ioplane-memory"].map(str::to_owned).to_vec())
}

fn chardev(id: &str, socket: &Path, version: Version) -> [String; 2] {
    let path = value(&socket.display().to_string());
    ["-chardev".to_owned(), format!("socket,id={id}-socket,path={path},{}", version.reconnect())]
}

fn device(mut device: String, bootindex: Option<u32>) -> [String; 2] {
    if let Some(index) = bootindex {
        device.push_str(&format!(",bootindex={index}"));
    }
    ["-device".to_owned(), device]
}

/// The arguments for one disk behind one of its sockets.
pub fn disk(disk: &DiskReport, socket: &Path, version: Version, bootindex: Option<u32>) -> Vec<String> {
    let id = format!("ioplane-{}", disk.name);
    // The size is said always: what QEMU takes without being told has changed with its versions (128, 1024).
    let blk = format!(
        "vhost-user-blk-pci,chardev={id}-socket,id={id},num-queues={},queue-size={}",
        disk.queues.len(),
        disk.queue_size
    );
    [chardev(&id, socket, version), device(blk, bootindex)].concat()
}

/// The arguments for one NIC. Under TCG its interrupts are a wire instead of messages: a QEMU that emulates the processor
/// has no irqfd, and its vhost-user NIC looks for one when the guest unmasks a message (virtio_pci_one_vector_unmask),
/// which ends QEMU with a segmentation fault.
pub fn nic(nic: &NicReport, version: Version, accel: Accel, bootindex: Option<u32>) -> Vec<String> {
    let id = format!("ioplane-{}", nic.name);
    let pairs = nic.pairs;
    let mut netdev = format!("vhost-user,id={id}-netdev,chardev={id}-socket");
    let mut net = format!(
        "virtio-net-pci,netdev={id}-netdev,id={id},mac={},rx_queue_size={size},tx_queue_size={size}",
        nic.mac,
        size = nic.queue_size
    );
    if nic.mtu != MTU {
        net.push_str(&format!(",host_mtu={}", nic.mtu));
    }
    if pairs > 1 {
        netdev.push_str(&format!(",queues={pairs}"));
        net.push_str(",mq=on");
    }
    match (accel, pairs) {
        (Accel::Tcg, _) => net.push_str(",vectors=0"),
        (Accel::Kvm, 1) => {}
        // A vector for each queue, one for changes of the configuration, one for the control queue.
        (Accel::Kvm, _) => net.push_str(&format!(",vectors={}", 2 * pairs + 2)),
    }
    let netdev = ["-netdev".to_owned(), netdev];
    [chardev(&id, &nic.socket, version), netdev, device(net, bootindex)].concat()
}

/// Since when QEMU can be the client of a vfio-user server.
pub const VFIO_USER: Version = Version(10, 1);
/// How long QEMU waits for an answer, ms. A function that is held answers when it is let go, which the daemon does after half of
/// this, unless its VM is being moved; QEMU's own 5 s are shorter.
const ANSWER: u32 = 60_000;

/// The arguments for one PCI function. QEMU migrates a guest with such a device and reports success, and the device arrives dead;
/// nothing in the protocol lets the server say no. An image format that cannot migrate makes QEMU refuse in plain words, whether or
/// not anything uses the image.
pub fn function(function: &FunctionReport, version: Version, bootindex: Option<u32>) -> Result<Vec<String>> {
    let Version(major, minor) = version;
    if version < VFIO_USER {
        let error =
            format!("QEMU {major}.{minor} has no vfio-user-pci, which PCI function {} needs", function.name);
        let remedy = "use QEMU 10.1 or later, and name it with --qemu PROGRAM (or --qemu-version 10.1)";
        return Err(CommandError::new(Code::Unsupported, error, remedy).into());
    }
    if function.guard.as_os_str().is_empty() {
        let name = &function.name;
        let why = function.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        let (error, remedy) =
            (format!("PCI function {name} is not served{why}"), format!("see `ioplane pci show {name}`"));
        return Err(CommandError::new(Code::NotServed, error, remedy).into());
    }
    let id = format!("ioplane-{}", function.name);
    let guard = serde_json::json!({
        "driver": "vdi",
        "node-name": node(&function.name),
        "read-only": true,
        "file": { "driver": "file", "filename": function.guard.display().to_string() },
    });
    let mut device = serde_json::json!({
        "driver": "vfio-user-pci",
        "id": id,
        "socket": { "type": "unix", "path": function.socket.display().to_string() },
        "x-msg-timeout": ANSWER,
    });
    if let Some(index) = bootindex {
        device["bootindex"] = index.into();
    }
    Ok(vec!["-blockdev".to_owned(), guard.to_string(), "-device".to_owned(), device.to_string()])
}

/// A name for a block node of a function's own, the guard of [`function`]: at most 31 characters, beginning with a letter.
pub fn node(name: &str) -> String {
    if name.len() <= NODE {
        return format!("unmovable-{name}");
    }
    let mut hash = std::hash::DefaultHasher::new();
    std::hash::Hash::hash(name, &mut hash);
    format!("unmovable-{:016x}", std::hash::Hasher::finish(&hash))
}

/// Characters of a name for which there is room in that of a block node.
const NODE: usize = 21;

/// One line for `$(...)`: a shell parts what is printed at blanks, expands patterns in it, and reads no quotes.
pub fn words(args: &[String], name: &str) -> Result<String> {
    let broken = |c: char| c.is_whitespace() || matches!(c, '*' | '?' | '[' | '\\');
    if let Some(arg) = args.iter().find(|arg| arg.is_empty() || arg.contains(broken)) {
        let remedy = format!(
            "give it a socket whose path has none; or let the shell read it once more: eval \"qemu-system-x86_64 ... $(ioplane \
             qemu-args {name} --quoted)\"; or read --json"
        );
        let error = format!(
            "{arg} has a blank or a sign of a pattern in it: what `$(ioplane qemu-args {name})` makes of it is something else"
        );
        return Err(CommandError::new(Code::Unsupported, error, remedy).into());
    }
    Ok(args.join(" "))
}

/// One line to be pasted into a shell, or for `eval`.
pub fn quoted(args: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    let quote = |arg: &String| {
        if arg.chars().all(plain) { arg.clone() } else { format!("'{}'", arg.replace('\'', r"'\''")) }
    };
    args.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn versions_are_read_and_decide() {
        assert_eq!(Version::of("7.2"), Some(Version(7, 2)));
        assert_eq!(Version::of(" 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)"), Some(Version(11, 1)));
        assert_eq!(Version::of("10"), Some(Version(10, 0)));
        assert_eq!(Version::of("new"), None);
        assert_eq!(Version(9, 1).reconnect(), "reconnect=1");
        assert_eq!(Version(9, 2).reconnect(), "reconnect-ms=100");
    }

    #[test]
    fn a_function_needs_a_qemu_that_can_and_is_guarded() {
        let mut function = crate::command::show::tests::function("nic1");
        let refused = super::function(&function, Version(10, 0), None).unwrap_err().to_string();
        assert!(
            refused.starts_with("QEMU 10.0 has no vfio-user-pci") && refused.contains("hint: "),
            "{refused}"
        );
        let args = super::function(&function, Version(10, 1), Some(1)).unwrap();
        assert_eq!(
            args,
            [
                "-blockdev",
                r#"{"driver":"vdi","file":{"driver":"file","filename":"/run/ioplane/unmovable.vdi"},"node-name":"unmovable-nic1","read-only":true}"#,
                "-device",
                r#"{"bootindex":1,"driver":"vfio-user-pci","id":"ioplane-nic1","socket":{"path":"/run/ioplane/nic1.sock","type":"unix"},"x-msg-timeout":60000}"#,
            ]
        );
        let nodes = ["a".repeat(40), "a".repeat(39), "9".repeat(21)].map(|name| node(&name));
        assert!(nodes.iter().all(|node| node.len() <= 31 && node.starts_with('u')), "{nodes:?}");
        assert_ne!(nodes[0], nodes[1]);
        function.name = "x".repeat(40);
        assert!(super::function(&function, Version(11, 1), None).is_ok());
        (function.guard, function.error) = (PathBuf::new(), Some("it is gone".into()));
        let refused = super::function(&function, Version(11, 1), None).unwrap_err().to_string();
        assert!(refused.contains("is not served: it is gone"), "{refused}");
    }

    /// By a shell: what it makes of the words is what they were.
    #[test]
    fn words_survive_a_substitution_or_are_refused() {
        let function = crate::command::show::tests::function("nic1");
        let args = super::function(&function, Version(10, 1), None).unwrap();
        let through = |line: &str, script: &str| -> Vec<String> {
            let mut shell = Command::new("sh");
            let shell = shell.args(["-c", script]).env("LINE", line).current_dir("/");
            let said = String::from_utf8(shell.output().unwrap().stdout).unwrap();
            said.lines().map(str::to_owned).collect()
        };
        let line = words(&args, "nic1").unwrap();
        assert_eq!(through(&line, r#"printf '%s\n' $(printf '%s\n' "$LINE")"#), args);
        let awkward = ["-chardev".to_owned(), "socket,path=/a b/*".to_owned(), "it's".to_owned()];
        let refused = words(&awkward, "nic1").unwrap_err().to_string();
        assert!(refused.contains("/a b/*") && refused.contains("--quoted"), "{refused}");
        assert_eq!(through(&quoted(&awkward), r#"eval "printf '%s\n' $LINE""#), awkward);
    }

    #[test]
    fn memory_is_shared_and_may_be_huge() {
        let of = |bytes, page| memory(Size(bytes), page).map(|args| args[1].clone());
        let plain = "memory-backend-memfd,id=ioplane-memory,size=256M,share=on";
        assert_eq!(of(256 << 20, None).unwrap(), plain);
        let huge = of(256 << 20, Some(Size(2 << 20))).unwrap();
        assert_eq!(huge, format!("{plain},hugetlb=on,hugetlbsize=2M"));
        for (bytes, page) in [(257 << 20, 2 << 20), (256 << 20, 1 << 30), (256 << 20, 4 << 20), (1 << 30, 0)]
        {
            let refused = of(bytes, Some(Size(page))).unwrap_err().to_string();
            assert!(refused.contains("multiple of --hugetlb"), "{refused}");
        }
    }

    #[test]
    fn a_line_can_be_pasted() {
        let args = ["-chardev".to_owned(), "socket,path=/a b/it's,,x".to_owned()];
        assert_eq!(quoted(&args), r"-chardev 'socket,path=/a b/it'\''s,,x'");
    }
}
