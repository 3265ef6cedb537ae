//! An export behind a listener, owned by one task, as a daemon owns it.

#![allow(dead_code, reason = "each test uses a part")]

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ioplane_cores::{Core, CoreReading, CoreSettings, Notify};
use ioplane_device::{CoreId, QueueSet, Quiescent};
use ioplane_identity::IdentityDirectory;
use ioplane_nbd::export::{AcceptedClient, Arrival, Ended, Export, ExportOptions, Handshakes};
use ioplane_nbd::handshake::server::TlsPolicy;
use ioplane_storage::Backing;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::{PATIENCE, runtime};

/// An export that anybody on this host can reach, until it is dropped.
pub struct Listening {
    pub address: SocketAddr,
    core: Arc<Core>,
    stop: Option<oneshot::Sender<()>>,
    owner: Option<JoinHandle<Vec<Ended>>>,
    /// Why handshakes came to nothing.
    pub refused: Receiver<String>,
}

impl Listening {
    pub fn new(backing: Arc<dyn Backing>, options: ExportOptions, notify: Notify) -> Listening {
        Listening::with(backing, options, notify, None)
    }

    /// With an identity: TLS is required.
    pub fn with(
        backing: Arc<dyn Backing>,
        options: ExportOptions,
        notify: Notify,
        identity: Option<IdentityDirectory>,
    ) -> Listening {
        let settings = CoreSettings { notify, ..CoreSettings::default() };
        let core = Arc::new(Core::start(CoreId(0), settings).unwrap());
        let export = Export::new("disk", backing, options).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let on = core.clone();
        let (refuse, refused) = channel();
        let doors = Doors { identity, refuse };
        let owner = std::thread::spawn(move || runtime().block_on(own(export, on, listener, doors, stopped)));
        Listening { address, core, stop: Some(stop), owner: Some(owner), refused }
    }

    pub fn uri(&self) -> String {
        format!("nbd://{}/disk", self.address)
    }

    pub fn reading(&self) -> CoreReading {
        self.core.read()
    }

    /// Ends it, and says how its connections have ended so far.
    pub fn close(mut self) -> Vec<Ended> {
        drop(self.stop.take());
        self.owner.take().unwrap().join().unwrap()
    }
}

#[derive(Clone)]
struct Doors {
    identity: Option<IdentityDirectory>,
    refuse: Sender<String>,
}

async fn own(
    export: Export,
    core: Arc<Core>,
    listener: std::net::TcpListener,
    doors: Doors,
    mut stopped: oneshot::Receiver<()>,
) -> Vec<Ended> {
    let listener = TcpListener::from_std(listener).unwrap();
    let (published, ended) = (export.published(), export.ended());
    let handshakes = Arc::new(Handshakes::new(16, PATIENCE));
    let mut running = Quiescent::new(export).resume(&*core).unwrap();
    let (send, mut accepted) = mpsc::channel(16);
    let mut all = Vec::new();
    loop {
        tokio::select! {
            stream = listener.accept() => {
                let (stream, _) = stream.unwrap();
                let (handshakes, published, send) = (handshakes.clone(), published.clone(), send.clone());
                let Doors { identity, refuse } = doors.clone();
                tokio::spawn(async move {
                    let accepted = match &identity {
                        None => handshakes.accept(stream, &published).await.map(|client| {
                            client.map(|AcceptedClient { stream, negotiated, ahead }| {
                                let stream = OwnedFd::from(stream.into_std().unwrap()).into();
                                AcceptedClient { stream, negotiated, ahead }
                            })
                        }),
                        Some(identity) => {
                            let known = |_: &str| published.clone();
                            let policy = TlsPolicy::Required;
                            let arrived = handshakes.accept_tls(stream, policy, identity, &published, known).await;
                            arrived.map(|arrival| match arrival {
                                Some(Arrival::Client(client)) => Some(client),
                                Some(Arrival::Session(_)) | None => None,
                            })
                        }
                    };
                    match accepted {
                        Ok(Some(client)) => drop(send.send(client).await),
                        Ok(None) => {}
                        Err(error) => drop(refuse.send(error.to_string())),
                    }
                });
            }
            Some(client) = accepted.recv() => {
                let queue = running.device_mut().connect(client.stream, &client.negotiated, &client.ahead).unwrap();
                running.start(&QueueSet::from([queue]), &*core).unwrap();
            }
            end = ended.next() => {
                let queues = QueueSet::from([end.queue]);
                running.drain(&queues);
                running.stopped(&queues).await;
                all.push(end);
            }
            _ = &mut stopped => return all,
        }
    }
}
