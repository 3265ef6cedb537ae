use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tempfile::TempDir;

use super::*;

/// A function with pages 1 to 3.
#[derive(Default)]
struct Function {
    pid: AtomicU32,
    connections: AtomicU64,
    lendable: AtomicU64,
    lent: AtomicU64,
    away: AtomicBool,
    said: Mutex<Vec<&'static str>>,
}

impl Lends for Arc<Function> {
    fn client(&self) -> Option<Client> {
        Some((self.pid.load(SeqCst), self.connections.load(SeqCst))).filter(|client| client.0 != 0)
    }

    async fn lend(&self) -> Option<Lent> {
        let pages = self.lendable.load(SeqCst);
        if pages == 0 || self.lent.swap(pages, SeqCst) != 0 {
            return None;
        }
        let file = Arc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        Some(Lent { file, at: 4096, pages, all: pages == 0b1110 })
    }

    async fn could_lend_more(&self) -> bool {
        self.lendable.load(SeqCst) & !self.lent.load(SeqCst) != 0
    }

    async fn are_back(&self) -> Result<(), String> {
        if self.away.load(SeqCst) {
            return Err("it is away".into());
        }
        self.said.lock().unwrap().push("back");
        self.lent.store(0, SeqCst);
        Ok(())
    }
}

struct Stage {
    folder: TempDir,
    function: Arc<Function>,
    lender: Lender,
}

impl Stage {
    fn new(pid: u32) -> Stage {
        let (folder, function) = (tempfile::tempdir().unwrap(), Arc::new(Function::default()));
        function.pid.store(pid, SeqCst);
        function.lendable.store(0b1110, SeqCst);
        let path = folder.path().join("f.sock.pages");
        let listener = UnixListener::from_std(socket::bind(&path).unwrap()).unwrap();
        let lender = Lender::over(listener, SocketPath::of(&path), function.clone());
        Stage { folder, function, lender }
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(path_beside(&self.folder.path().join("f.sock"))).await.unwrap()
    }
}

/// What the library is told, and whether a descriptor came with it. `None`: it was turned away.
async fn told(stream: &UnixStream) -> Option<(PageMessage, bool)> {
    let mut bytes = [0; PageMessage::BYTES];
    let (got, file) = stream
        .async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut part = [io::IoSliceMut::new(&mut bytes)];
            let got = rustix::net::recvmsg(stream, &mut part, &mut ancillary, RecvFlags::DONTWAIT)?;
            let file = ancillary.drain().any(|one| matches!(one, RecvAncillaryMessage::ScmRights(_)));
            Ok((got.bytes, file))
        })
        .await
        .ok()?;
    (got == bytes.len()).then(|| (PageMessage::read(&bytes).unwrap(), file))
}

async fn says(stream: &UnixStream, message: PageMessage) {
    stream.writable().await.unwrap();
    assert_eq!(stream.try_write(&message.bytes()).unwrap(), PageMessage::BYTES);
}

const LEND: Option<(PageMessage, bool)> =
    Some((PageMessage::Lend { number: 1, pages: 0b1110, at: 4096 }, true));

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn pages_are_lent_taken_back_and_lent_again() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        let library = stage.connect().await;
        assert_eq!(told(&library).await, LEND);
        says(&library, PageMessage::Lent { number: 1 }).await;
        let (trapped, ()) = tokio::join!(stage.lender.take_back(), async {
            assert_eq!(told(&library).await, Some((PageMessage::Take { number: 1 }, false)));
            assert_eq!(stage.function.lent.load(SeqCst), 0b1110, "not before it is said");
            // What is said of another loan is not meant.
            says(&library, PageMessage::Taken { number: 7 }).await;
            says(&library, PageMessage::Taken { number: 1 }).await;
        });
        let trapped = trapped.unwrap();
        assert_eq!(stage.function.lent.load(SeqCst), 0);
        // Two may want that; nothing is lent until both have gone.
        let second = stage.lender.take_back().await.unwrap();
        drop(trapped);
        assert!(timeout(3 * LOOK, told(&library)).await.is_err(), "nothing is lent meanwhile");
        drop(second);
        let again = PageMessage::Lend { number: 2, pages: 0b1110, at: 4096 };
        assert_eq!(told(&library).await, Some((again, true)));
    });
}

#[test]
fn one_that_does_not_give_them_back_is_waited_for_in_vain() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        let library = stage.connect().await;
        assert_eq!(told(&library).await, LEND);
        let refused = stage.lender.take_back().await.map(drop).unwrap_err();
        assert!(refused.contains("has not given its registers back in 1000 ms"), "{refused}");
        assert_eq!(stage.function.lent.load(SeqCst), 0b1110, "its guest goes on");
        // Late is as good as in time, for the next one.
        says(&library, PageMessage::Taken { number: 1 }).await;
        stage.lender.take_back().await.unwrap();
    });
}

#[test]
fn what_a_library_took_along_is_mapped_until_its_vmm_leaves() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        let library = stage.connect().await;
        assert_eq!(told(&library).await, LEND);
        drop(library);
        let refused = stage.lender.take_back().await.map(drop).unwrap_err();
        assert!(refused.ends_with("and is gone"), "{refused}");
        // The same VMM does not get them again.
        let again = stage.connect().await;
        assert!(timeout(3 * LOOK, told(&again)).await.is_err());
        assert!(stage.lender.take_back().await.is_err());
        assert_eq!(told(&again).await, Some((PageMessage::Take { number: 1 }, false)));
        // Another VMM has come, and whoever was there for the first one is turned away.
        stage.function.connections.store(1, SeqCst);
        stage.function.lent.store(0, SeqCst);
        assert_eq!(told(&again).await, None);
        stage.lender.take_back().await.unwrap();
    });
}

#[test]
fn pages_that_are_given_back_unasked_are_lent_to_the_next_connection() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        let library = stage.connect().await;
        assert_eq!(told(&library).await, LEND);
        // The BAR has moved.
        says(&library, PageMessage::Taken { number: 1 }).await;
        drop(library);
        let again = stage.connect().await;
        let lend = PageMessage::Lend { number: 2, pages: 0b1110, at: 4096 };
        assert_eq!(told(&again).await, Some((lend, true)));
    });
}

#[test]
fn nobody_but_the_vmm_is_heard() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id() + 1);
        let stranger = stage.connect().await;
        assert_eq!(told(&stranger).await, None);
        stage.function.pid.store(0, SeqCst);
        assert_eq!(told(&stage.connect().await).await, None, "nobody has the function");
        assert_eq!(stage.function.lent.load(SeqCst), 0);
        stage.lender.take_back().await.unwrap();
    });
}

#[test]
fn what_is_no_message_ends_the_connection() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        stage.function.lendable.store(0, SeqCst);
        for message in [PageMessage::Take { number: 1 }.bytes(), [0xff; PageMessage::BYTES]] {
            let library = stage.connect().await;
            library.writable().await.unwrap();
            library.try_write(&message).unwrap();
            assert_eq!(told(&library).await, None);
        }
    });
}

#[test]
fn more_is_lent_when_more_may_be() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        stage.function.lendable.store(0b1000, SeqCst);
        let library = stage.connect().await;
        let first = PageMessage::Lend { number: 1, pages: 0b1000, at: 4096 };
        assert_eq!(told(&library).await, Some((first, true)));
        stage.function.lendable.store(0b1110, SeqCst);
        assert_eq!(told(&library).await, Some((PageMessage::Take { number: 1 }, false)));
        says(&library, PageMessage::Taken { number: 1 }).await;
        let second = PageMessage::Lend { number: 2, pages: 0b1110, at: 4096 };
        assert_eq!(told(&library).await, Some((second, true)));
    });
}

#[test]
fn a_function_that_has_no_time_is_told_later() {
    runtime().block_on(async {
        let stage = Stage::new(std::process::id());
        let library = stage.connect().await;
        assert_eq!(told(&library).await, LEND);
        stage.function.away.store(true, SeqCst);
        says(&library, PageMessage::Taken { number: 1 }).await;
        assert_eq!(stage.lender.take_back().await.map(drop), Err("it is away".into()));
        stage.function.away.store(false, SeqCst);
        stage.lender.take_back().await.unwrap();
        assert_eq!(*stage.function.said.lock().unwrap(), ["back"]);
    });
}

#[test]
fn its_socket_goes_with_it() {
    runtime().block_on(async {
        let Stage { folder, lender, .. } = Stage::new(std::process::id());
        let path = folder.path().join("f.sock.pages");
        assert!(path.exists());
        drop(lender);
        assert!(!path.exists());
    });
}
