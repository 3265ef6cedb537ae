//! Reads symbols on a thread of its own. A mapped file may be of a file system in user space, or of a server that is gone, and keep its reader for ever.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use ioplane_symbols::ProgramSymbols;

use super::Code;

/// So long is waited for all files that a report is about.
const PATIENCE: Duration = Duration::from_secs(10);
/// Where Linux distributions put files with names for stripped programs.
const DEBUG_FILES: &str = "/usr/lib/debug";

/// A file that a process has mapped: where it may be found, and what it then is.
#[derive(Clone, Debug)]
pub(super) struct Mapped {
    /// By the mapping first, which is the very file, also if another has its name by now or it is in a container; then by its path.
    places: [String; 2],
    inode: u64,
    path: PathBuf,
}

impl Mapped {
    /// Nothing where no file is mapped.
    pub fn of(pid: u32, code: &Code) -> Option<Mapped> {
        let places = [
            format!("/proc/{pid}/map_files/{:x}-{:x}", code.start, code.end),
            format!("/proc/{pid}/root{}", code.key.path),
        ];
        let mapped = Mapped { places, inode: code.key.inode, path: PathBuf::from(&code.key.path) };
        (mapped.inode != 0).then_some(mapped)
    }

    fn open(&self) -> Option<File> {
        self.places.iter().find_map(|path| regular(path, self.inode))
    }
}

/// What is read of a file.
type Found = Option<ProgramSymbols>;

#[derive(Debug)]
enum Ask {
    /// Open it now: the process may end, or the file be replaced.
    Open(usize, Mapped),
    /// Read what is open.
    Read,
}

enum Answer {
    Symbols(usize, Found),
    AllRead,
}

/// The thread, as others see it. It ends with this value, or with the process if a file keeps it.
#[derive(Debug)]
pub(super) struct Reader {
    ask: Sender<Ask>,
    answers: Receiver<Answer>,
    patience: Duration,
    /// It did not answer in time, and is asked no more.
    stuck: bool,
}

impl Reader {
    /// Nothing if there can be no more threads.
    pub fn start() -> Option<Reader> {
        Reader::with(PATIENCE, Mapped::open, symbols)
    }

    fn with<F: Send + 'static>(
        patience: Duration,
        open: impl Fn(&Mapped) -> Option<F> + Send + 'static,
        read: impl Fn(F, &Path) -> Found + Send + 'static,
    ) -> Option<Reader> {
        let (ask, asked) = channel();
        let (answer, answers) = channel();
        let run = move || {
            let mut opened = Vec::new();
            for ask in asked {
                match ask {
                    Ask::Open(file, mapped) => opened.push((file, open(&mapped), mapped)),
                    Ask::Read => {
                        let answered = |answer: &Sender<Answer>, of: Answer| answer.send(of).is_ok();
                        let all = opened.drain(..).all(|(file, open, mapped)| {
                            let found = open.and_then(|open| read(open, &mapped.path));
                            answered(&answer, Answer::Symbols(file, found))
                        });
                        if !all || !answered(&answer, Answer::AllRead) {
                            return;
                        }
                    }
                }
            }
        };
        Builder::new().name("symbols".into()).spawn(run).ok()?;
        Some(Reader { ask, answers, patience, stuck: false })
    }

    /// Has it opened, whenever that ends.
    pub fn open(&self, file: usize, mapped: Mapped) {
        // A reader that has ended answers nothing.
        let _ = self.ask.send(Ask::Open(file, mapped));
    }

    /// Hands over what was read of the files that were opened since the last time. Whether that is all of them.
    pub fn read(&mut self, mut take: impl FnMut(usize, Found)) -> bool {
        if self.stuck || self.ask.send(Ask::Read).is_err() {
            return false;
        }
        let end = Instant::now() + self.patience;
        loop {
            match self.answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Answer::Symbols(file, found)) => take(file, found),
                Ok(Answer::AllRead) => return true,
                Err(_) => {
                    self.stuck = true;
                    return false;
                }
            }
        }
    }
}

/// A regular file only: opening a device can do something.
fn regular(path: &str, inode: u64) -> Option<File> {
    let same = |status: fs::Metadata| status.is_file() && status.ino() == inode;
    fs::metadata(path).ok().filter(|status| same(status.clone()))?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().ok().is_some_and(same).then_some(file)
}

/// A file's, with those of its debug file where one is installed.
fn symbols(file: File, path: &Path) -> Found {
    let mut symbols = ProgramSymbols::read(file, path).ok()?;
    if let Some(debug) = symbols.debug_file() {
        let path = PathBuf::from(DEBUG_FILES).join(debug);
        if let Some(debug) = File::open(&path).ok().and_then(|file| ProgramSymbols::read(file, &path).ok()) {
            symbols.take_names(debug);
        }
    }
    Some(symbols)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_plain::ProcMapping;

    fn mapped(line: &str) -> Option<Mapped> {
        Mapped::of(std::process::id(), &Code::of(ProcMapping::parse(line).unwrap()).unwrap())
    }

    #[test]
    fn files_that_cannot_be_read_are_not_opened() {
        assert!(mapped("1000-2000 r-xp 00000000 00:00 7 /tmp/qemu (deleted)").unwrap().open().is_none());
        assert!(mapped("1000-2000 r-xp 00000000 00:00 0 [vdso]").is_none());
    }

    #[test]
    fn only_regular_files_are_opened() {
        let inode = fs::metadata("/dev/null").unwrap().ino();
        assert!(regular("/dev/null", inode).is_none());
        let own = std::env::current_exe().unwrap();
        let inode = fs::metadata(&own).unwrap().ino();
        assert!(regular(&own.to_string_lossy(), inode).is_some());
        assert!(regular(&own.to_string_lossy(), inode + 1).is_none());
    }

    #[test]
    fn a_file_that_keeps_its_reader_is_waited_for_once() {
        let (release, released) = channel::<()>();
        // The second one is of a server that is gone.
        let open = |mapped: &Mapped| Some(mapped.inode);
        let read = move |inode: u64, _: &Path| {
            if inode == 2 {
                let _ = released.recv();
            }
            None
        };
        let mut reader = Reader::with(Duration::from_millis(50), open, read).unwrap();
        for (file, inode) in [1, 2, 3].into_iter().enumerate() {
            reader.open(file, mapped(&format!("1000-2000 r-xp 00000000 00:00 {inode} /qemu")).unwrap());
        }
        let mut read = Vec::new();
        assert!(!reader.read(|file, _| read.push(file)));
        assert_eq!(read, [0]);
        drop(release);
        assert!(!reader.read(|file, _| read.push(file)));
        assert_eq!(read, [0]);
    }

    #[test]
    fn all_files_are_read_once() {
        let open = |mapped: &Mapped| Some(mapped.inode);
        let mut reader = Reader::with(PATIENCE, open, |_, _| None).unwrap();
        let mut read = Vec::new();
        for (file, inode) in [7, 8].into_iter().enumerate() {
            reader.open(file, mapped(&format!("1000-2000 r-xp 00000000 00:00 {inode} /qemu")).unwrap());
            assert!(reader.read(|file, _| read.push(file)));
        }
        assert_eq!(read, [0, 1]);
    }
}
