//! Issue 13, number 7: what stands at the path of a socket is replaced only if it is a socket that nobody listens on.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Barrier;

use ioplane_host::socket::{SocketPath, bind};
use rustix::fs::{CWD, FileType, Mode};

fn names(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

/// Whether `listener` is who answers at `path`.
fn answers(listener: &UnixListener, path: &Path) -> bool {
    let _client = UnixStream::connect(path).unwrap();
    listener.accept().is_ok()
}

#[test]
fn hole_07_what_is_no_dead_socket_stays() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("shadow"), "root:*").unwrap();
    std::fs::create_dir(at("directory")).unwrap();
    rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    std::os::unix::fs::symlink("shadow", at("link")).unwrap();
    std::os::unix::fs::symlink("nothing", at("dangling")).unwrap();
    drop(UnixListener::bind(at("dead")).unwrap());
    std::os::unix::fs::symlink("dead", at("link-to-dead")).unwrap();
    let before = names(folder.path());
    for (name, what) in [
        ("shadow", "a file"),
        ("directory", "a directory"),
        ("pipe", "no socket"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("link-to-dead", "a symbolic link"),
    ] {
        let error = bind(&at(name)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{name}: {error}");
        assert!(
            error.to_string().contains(what) && error.to_string().contains("give another path"),
            "{error}"
        );
    }
    assert_eq!(names(folder.path()), before, "nothing came or went");
    assert_eq!(std::fs::read_to_string(at("shadow")).unwrap(), "root:*");
}

#[test]
fn hole_07_a_dead_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    drop(UnixListener::bind(&path).unwrap());
    let listener = bind(&path).unwrap();
    assert!(answers(&listener, &path));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    // Somebody's socket of another kind is a live one too.
    let datagrams = folder.path().join("log");
    let log = std::os::unix::net::UnixDatagram::bind(&datagrams).unwrap();
    assert_eq!(bind(&datagrams).unwrap_err().kind(), ErrorKind::AddrInUse);
    drop(log);
    assert!(answers(&listener, &path));
    assert_eq!(names(folder.path()), ["a.sock", "log"]);
    // A name that fills a whole address.
    let long = folder.path().join("x".repeat(107 - folder.path().as_os_str().len() - 1));
    assert!(answers(&bind(&long).unwrap(), &long));
}

#[test]
fn hole_07_sockets_whose_names_differ_in_the_ending_alone_are_made_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..200 {
        let start = Barrier::new(2);
        let make = |name: &str| {
            let path = folder.path().join(name);
            start.wait();
            let listener = bind(&path).unwrap();
            assert!(answers(&listener, &path), "{name}");
        };
        std::thread::scope(|scope| {
            scope.spawn(|| make("a.sock"));
            make("a.ctl");
        });
    }
    assert_eq!(names(folder.path()), ["a.ctl", "a.sock"]);
}

#[test]
fn hole_07_of_those_who_want_one_path_at_once_one_gets_it() {
    const WANT: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    for round in 0..200 {
        // Every second time over a dead one.
        if round % 2 == 0 {
            let _ = std::fs::remove_file(&path);
        }
        let start = Barrier::new(WANT);
        let bound: Vec<_> = std::thread::scope(|scope| {
            let want = || {
                start.wait();
                bind(&path)
            };
            let threads: Vec<_> = (0..WANT).map(|_| scope.spawn(want)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (winners, losers): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
        for loser in losers {
            let error = loser.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "{error}");
        }
        assert_eq!(winners.len(), 1, "round {round}");
        assert!(answers(winners[0].as_ref().unwrap(), &path), "round {round}");
        assert_eq!(names(folder.path()), ["a.sock"]);
    }
}

#[test]
fn hole_07_only_the_own_socket_is_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let listener = bind(&path).unwrap();
    let place = SocketPath::of(&path);
    std::fs::remove_file(&path).unwrap();
    let other = bind(&path).unwrap();
    place.clear();
    assert!(answers(&other, &path), "the other's");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "data").unwrap();
    place.clear();
    SocketPath::of(&path).clear();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
    std::fs::remove_file(&path).unwrap();
    drop((listener, other));
    let _listener = bind(&path).unwrap();
    SocketPath::of(&path).clear();
    assert!(!path.exists());
}
