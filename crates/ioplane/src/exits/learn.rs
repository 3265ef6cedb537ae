//! `ioplane exits learn`: what names are made of, from the guest itself, in a directory that `--symbols` takes.

use std::path::Path;

use anyhow::{Context, Result, bail};
use ioplane_cli::args::LearnArgs;
use ioplane_cli::output::print_done;
use ioplane_exits::GuestRegions;
use ioplane_plain::plain;
use ioplane_symbols::Symbols;
use serde::Serialize;

use super::reach::Reach;
use super::write;

/// What runs in the guest.
const LEARN: &str = include_str!("../../../../guest/tune/learn.sh");
/// Six times what a kernel with all modules has. QEMU's guest agent cuts at 16 MiB by itself.
const LIMIT: u64 = 64 << 20;
/// The files, in the order in which the script reads them.
const PARTS: [&str; 3] = ["kallsyms", "iomem", "ioports"];

/// What was learned.
#[derive(Debug, Serialize)]
struct Learned {
    directory: String,
    functions: usize,
    regions: usize,
    /// What the reader must know of the names.
    notes: Vec<String>,
}

pub(super) fn run(args: &LearnArgs, json: bool) -> Result<()> {
    let reach = Reach::new(&args.reach, &args.which)?;
    let learned = learn(&reach, &args.names, LIMIT)?;
    print_done(json, &learned, |learned| {
        let Learned { directory, functions, regions, notes } = learned;
        let mut text = format!(
            "{functions} functions and {regions} regions of devices are in {directory}: use --symbols {directory}\n"
        );
        text.extend(notes.iter().map(|note| format!("note: {note}\n")));
        text
    })
}

/// Reads all in the guest, and looks whether it can be used before anything is written.
fn learn(reach: &Reach, directory: &Path, limit: u64) -> Result<Learned> {
    let done = reach.run_up_to(LEARN, ["read", "all"], limit)?;
    if done.status != 0 {
        bail!("the guest's names cannot be read: {}", done.error.trim());
    }
    let [kallsyms, iomem, ioports] = parts(&done.said)?;
    let at = |name: &str| directory.join(name);
    let symbols = Symbols::parse(kallsyms.as_bytes(), &at("kallsyms"))?;
    let regions = GuestRegions::parse(ioports, iomem, directory)?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("{} cannot be made", plain(&directory.display().to_string())))?;
    for (name, text) in PARTS.into_iter().zip([kallsyms, iomem, ioports]) {
        write(&at(name), text)?;
    }
    let mut notes = symbols.notes.clone();
    if regions.is_empty() {
        notes.push("the guest hides the addresses of its devices: its names are the functions only; run the script as root in the guest".into());
    }
    let directory = plain(&directory.display().to_string());
    Ok(Learned { directory, functions: symbols.len(), regions: regions.len(), notes })
}

/// The texts between the script's marks. Without the last mark something is missing.
fn parts(said: &str) -> Result<[&str; 3]> {
    let mut rest = said.strip_prefix("== kallsyms\n");
    let mut parts = [""; 3];
    for (part, next) in parts.iter_mut().zip(["== iomem\n", "== ioports\n", "== end\n"]) {
        // A mark is a line of its own; each text ends its last line, or is empty.
        (*part, rest) = match rest.and_then(|rest| rest.split_once(next)) {
            Some((part, rest)) if part.is_empty() || part.ends_with('\n') => (part, Some(rest)),
            _ => bail!(
                "what the guest says is not what guest/tune/learn.sh reads, or it is cut off after {} bytes ({} MiB are read; QEMU's guest agent \
                 sends 16 MiB at most: use --ssh, --directory or --via)",
                said.len(),
                LIMIT >> 20
            ),
        };
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    const KALLSYMS: &str = "ffffffff81000000 T _stext\nffffffff81000010 t acpi_pm_read\nffffffff82000000 D data\n\
                            ffffffffc0000000 t probe\t[planted]\n";

    /// A guest with these files, reached by a command, and where its names go.
    fn guest(kallsyms: &str) -> (tempfile::TempDir, Reach, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let proc = folder.path().join("proc");
        fs::create_dir(&proc).unwrap();
        fs::write(proc.join("kallsyms"), kallsyms).unwrap();
        fs::write(proc.join("iomem"), "fea40000-fea4ffff : 0000:01:00.0\n").unwrap();
        fs::write(proc.join("ioports"), "0060-0060 : keyboard\n0700-070f : odd\n").unwrap();
        let reach = Reach::Command(vec!["env".into(), format!("IOPLANE_TUNE_PROC={}", proc.display())]);
        let names = folder.path().join("names/web");
        (folder, reach, names)
    }

    #[test]
    fn names_come_from_the_guest_and_are_used() {
        let (_folder, reach, names) = guest(KALLSYMS);
        let learned = learn(&reach, &names, LIMIT).unwrap();
        assert_eq!((learned.functions, learned.regions, learned.notes.len()), (3, 3, 0), "{learned:?}");
        let kallsyms = fs::read_to_string(names.join("kallsyms")).unwrap();
        assert!(
            kallsyms.contains("acpi_pm_read") && !kallsyms.contains(" D data"),
            "functions only: {kallsyms}"
        );
        // A second time they are replaced.
        assert_eq!(learn(&reach, &names, LIMIT).unwrap().functions, 3);
        let words = ["ioplane", "exits", "--symbols", names.to_str().unwrap()];
        let naming = super::super::tests::naming_of(&words);
        assert_eq!(
            naming.symbols.unwrap().function(0xffff_ffff_8100_0014).unwrap().to_string(),
            "acpi_pm_read+0x4"
        );
        let odd = naming.devices.name(ioplane_exits::Detail::Port {
            port: 0x701,
            width: 1,
            write: true,
            queue: None,
        });
        assert_eq!(odd.unwrap().device, "odd");
    }

    /// Nothing that cannot be used replaces what was there.
    #[test]
    fn what_cannot_be_used_is_said_and_not_written() {
        let hidden = "0000000000000000 T _stext\n0000000000000000 t a\n";
        for (kallsyms, limit, wanted) in [
            (hidden, LIMIT, "kptr_restrict"),
            (KALLSYMS, 60, "cut off after 60 bytes"),
            ("", LIMIT, "names no function"),
        ] {
            let (_folder, reach, names) = guest(kallsyms);
            let error = format!("{:#}", learn(&reach, &names, limit).unwrap_err());
            assert!(error.contains(wanted) && !names.exists(), "{wanted:?} in {error}");
        }
        let (folder, reach, names) = guest(KALLSYMS);
        fs::remove_file(folder.path().join("proc/ioports")).unwrap();
        let error = format!("{:#}", learn(&reach, &names, LIMIT).unwrap_err());
        assert!(error.contains("ioports cannot be read"), "{error}");
    }

    #[test]
    fn marks_are_lines_of_their_own() {
        assert_eq!(parts("== kallsyms\na\n== iomem\n== ioports\nb\n== end\n").unwrap(), ["a\n", "", "b\n"]);
        assert!(parts("== kallsyms\na== iomem\n== ioports\n== end\n").is_err());
        assert!(parts("").is_err() && parts("hello\n== end\n").is_err());
    }
}
