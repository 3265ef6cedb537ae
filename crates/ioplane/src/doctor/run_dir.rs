//! The run directory: whether the daemon can make its sockets there, and who else could.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Finding, Weight, bad, good};

const NAME: &str = "run directory";
const ELSEWHERE: &str =
    "run the daemon as root, or give it another place: --socket, or run_dir under [daemon]";

/// The directory of the control socket, which holds the other sockets too if the configuration has no `run_dir`.
pub fn look(socket: &Path) -> Finding {
    let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = folder.display();
    let unusable = |found: String| {
        bad(NAME, Weight::Lacking, found, "the daemon cannot make its sockets there", ELSEWHERE)
    };
    let meta = match std::fs::metadata(folder) {
        Ok(meta) => meta,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return absent(folder),
        Err(error) => return unusable(format!("{shown}: {error}")),
    };
    if !meta.is_dir() {
        return unusable(format!("{shown} is not a directory"));
    }
    let owner = if meta.uid() == 0 { "root".to_owned() } else { format!("user {}", meta.uid()) };
    let found = format!("{shown}: owned by {owner}, mode {:04o}", meta.mode() & 0o7777);
    if let Err(error) = rustix::fs::access(folder, rustix::fs::Access::WRITE_OK) {
        return unusable(format!("{found}: {error}"));
    }
    let foreign = ![0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    if foreign || meta.mode() & 0o022 != 0 {
        let follows = "whoever may write there can put a socket of their own in the place of the daemon's";
        let todo = format!("chown root {shown}; chmod go-w {shown}");
        return bad(NAME, Weight::Lacking, format!("{found}: others may write there"), follows, &todo);
    }
    good(NAME, format!("{found}, writable"))
}

/// A directory that is not there: the daemon makes it where it can.
fn absent(folder: &Path) -> Finding {
    let there = folder.ancestors().skip(1).find(|above| above.exists()).unwrap_or(Path::new("."));
    let shown = folder.display();
    match rustix::fs::access(there, rustix::fs::Access::WRITE_OK) {
        Ok(()) => good(NAME, format!("{shown}: not there yet; the daemon makes it")),
        Err(error) => {
            let found = format!("{shown} is not there, and {}: {error}", there.display());
            bad(NAME, Weight::Lacking, found, "the daemon cannot make it", ELSEWHERE)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn said(socket: &Path) -> (Weight, String) {
        let finding = look(socket);
        (finding.weight, finding.found)
    }

    #[test]
    fn what_a_run_directory_lacks_is_said() {
        let folder = tempfile::tempdir().unwrap();
        // Whatever the umask is.
        set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        let (weight, found) = said(&folder.path().join("control.sock"));
        assert!(weight == Weight::Good && found.ends_with("mode 0700, writable"), "{found}");
        assert!(found.contains(": owned by "), "{found}");

        let (weight, found) = said(&folder.path().join("run/ioplane/control.sock"));
        assert!(
            weight == Weight::Good && found.ends_with("run/ioplane: not there yet; the daemon makes it"),
            "{found}"
        );

        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (weight, found) = said(&file.join("control.sock"));
        assert!(weight == Weight::Lacking && found.ends_with("file is not a directory"), "{found}");

        set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let (weight, found) = said(&folder.path().join("control.sock"));
        assert!(weight == Weight::Lacking && found.ends_with("mode 0777: others may write there"), "{found}");
    }
}
