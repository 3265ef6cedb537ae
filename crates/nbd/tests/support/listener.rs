//! An export behind a listener, owned by one task, as a daemon owns it.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ioplane_cores::{Core, CoreReading, CoreSettings, Notify};
use ioplane_device::{CoreId, QueueSet, Quiescent};
use ioplane_identity::IdentityDirectory;
use ioplane_nbd::export::{
    AcceptedClient, Arrival, Ended, Export, ExportOptions, Exports, Handshakes, PublishedExport,
};
use ioplane_nbd::handshake::ExportInfo;
use ioplane_nbd::handshake::server::{ExportRefusal, TlsPolicy};
use ioplane_storage::Backing;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::{PATIENCE, runtime};

/// An export that anybody on this host can reach, until it is dropped.
pub struct Listening {
    pub address: SocketAddr,
    core: Arc<Core>,
    stop: Option<oneshot::Sender<()>>,
    pub fence: Ending,
    owner: Option<JoinHandle<Vec<Ended>>>,
    /// Why handshakes came to nothing.
    pub refused: Receiver<String>,
    /// What clients have asked about the export, as far as that is the export's business.
    pub queries: Receiver<String>,
}

impl Listening {
    /// As daemons have it without TLS: with sums for clients that ask for them.
    pub fn new(backing: Arc<dyn Backing>, options: ExportOptions, notify: Notify) -> Listening {
        Listening::with(backing, options, notify, None)
    }

    /// One that does not know sums, as those of others and older ones.
    pub fn without_sums(backing: Arc<dyn Backing>, options: ExportOptions, notify: Notify) -> Listening {
        Listening::start(backing, options, notify, Doors { without_sums: true, ..Doors::default() })
    }

    /// With an identity: TLS is required.
    pub fn with(
        backing: Arc<dyn Backing>,
        options: ExportOptions,
        notify: Notify,
        identity: Option<IdentityDirectory>,
    ) -> Listening {
        Listening::start(backing, options, notify, Doors { identity, ..Doors::default() })
    }

    /// One that says which instance it is, and that can be told to end connections: see [`Ending`].
    pub fn fenced(backing: Arc<dyn Backing>, options: ExportOptions, notify: Notify) -> Listening {
        Listening::start(backing, options, notify, Doors { instance: Some("one".into()), ..Doors::default() })
    }

    /// The same of one that does not know sums.
    pub fn fenced_without_sums(
        backing: Arc<dyn Backing>,
        options: ExportOptions,
        notify: Notify,
    ) -> Listening {
        let instance = Some("one".into());
        Listening::start(backing, options, notify, Doors { instance, without_sums: true, ..Doors::default() })
    }

    fn start(
        backing: Arc<dyn Backing>,
        options: ExportOptions,
        notify: Notify,
        mut doors: Doors,
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
        doors.refuse = Some(refuse);
        let (query, queries) = channel();
        doors.query = Some(query);
        let (fence, older) = mpsc::unbounded_channel();
        let owner =
            std::thread::spawn(move || runtime().block_on(own(export, on, listener, doors, older, stopped)));
        Listening {
            address,
            core,
            stop: Some(stop),
            fence: Ending(fence),
            owner: Some(owner),
            refused,
            queries,
        }
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

/// Ends connections of an export.
#[derive(Clone)]
pub struct Ending(mpsc::UnboundedSender<Older>);

impl Ending {
    /// Those of these clients, also if they are only made later. Waits until nothing of them is read any more, and what they had begun has ended; an export
    /// that is gone has none.
    pub async fn end(&self, clients: Vec<SocketAddr>) {
        let (ended, end) = oneshot::channel();
        if self.0.send(Older { clients, ended }).is_ok() {
            let _ = end.await;
        }
    }
}

/// Clients whose connections are to end.
struct Older {
    clients: Vec<SocketAddr>,
    ended: oneshot::Sender<()>,
}

#[derive(Clone, Default)]
struct Doors {
    identity: Option<IdentityDirectory>,
    instance: Option<String>,
    without_sums: bool,
    refuse: Option<Sender<String>>,
    query: Option<Sender<String>>,
}

/// An export that says which instance it is, if it is to.
#[derive(Clone)]
struct Told(PublishedExport, Option<String>, Option<Sender<String>>);

impl Exports for Told {
    async fn find(&self, name: &str, enters: bool) -> Result<ExportInfo, ExportRefusal> {
        self.0.find(name, enters).await
    }

    async fn list(&self) -> Vec<(String, String)> {
        self.0.list().await
    }

    async fn context(&self, _: &str, query: &str, _: bool) -> Option<String> {
        if let Some(asked) = &self.2 {
            let _ = asked.send(query.to_owned());
        }
        let instance = self.1.as_ref().filter(|_| query == "ioplane:instance")?;
        Some(format!("ioplane:instance={instance}"))
    }
}

async fn own(
    export: Export,
    core: Arc<Core>,
    listener: std::net::TcpListener,
    doors: Doors,
    mut older: mpsc::UnboundedReceiver<Older>,
    mut stopped: oneshot::Receiver<()>,
) -> Vec<Ended> {
    let listener = TcpListener::from_std(listener).unwrap();
    let (published, ended) =
        (Told(export.published(), doors.instance.clone(), doors.query.clone()), export.ended());
    let handshakes = Arc::new(Handshakes::new(16, PATIENCE));
    let mut running = Quiescent::new(export).resume(&*core).unwrap();
    let (send, mut accepted) = mpsc::channel(16);
    let mut all = Vec::new();
    let (mut serving, mut fenced) = (HashMap::new(), HashSet::new());
    loop {
        tokio::select! {
            stream = listener.accept() => {
                let (stream, from) = stream.unwrap();
                let (handshakes, published, send) = (handshakes.clone(), published.clone(), send.clone());
                let Doors { identity, refuse, without_sums, .. } = doors.clone();
                tokio::spawn(async move {
                    let accepted = match &identity {
                        None if without_sums => handshakes.accept(stream, &published).await.map(|client| {
                            client.map(|AcceptedClient { stream, negotiated, ahead }| {
                                let stream = OwnedFd::from(stream.into_std().unwrap()).into();
                                AcceptedClient { stream, negotiated, ahead }
                            })
                        }),
                        identity => {
                            let known = |_: &str| published.clone();
                            let (policy, identity) = match identity {
                                Some(identity) => (TlsPolicy::Required, identity.clone()),
                                None => (TlsPolicy::Unsupported, IdentityDirectory::new("/nonexistent")),
                            };
                            let arrived = handshakes.accept_tls(stream, policy, &identity, &published, known).await;
                            arrived.map(|arrival| match arrival {
                                Some(Arrival::Client(client)) => Some(client),
                                Some(Arrival::Session(_)) | None => None,
                            })
                        }
                    };
                    match accepted {
                        Ok(Some(client)) => drop(send.send((from, client)).await),
                        Ok(None) => {}
                        Err(error) => drop(refuse.unwrap().send(error.to_string())),
                    }
                });
            }
            Some((from, client)) = accepted.recv() => {
                if fenced.contains(&from) {
                    continue;
                }
                let queue = running.device_mut().connect(client.stream, &client.negotiated, &client.ahead).unwrap();
                running.start(&QueueSet::from([queue]), &*core).unwrap();
                serving.insert(from, queue);
            }
            Some(Older { clients, ended }) = older.recv() => {
                let queues: QueueSet = clients.iter().filter_map(|from| serving.remove(from)).collect();
                fenced.extend(clients);
                queues.iter().for_each(|queue| running.device_mut().close(*queue));
                running.drain(&queues);
                running.stopped(&queues).await;
                let _ = ended.send(());
            }
            end = ended.next() => {
                let queues = QueueSet::from([end.queue]);
                serving.retain(|_, queue| *queue != end.queue);
                running.drain(&queues);
                running.stopped(&queues).await;
                all.push(end);
            }
            _ = &mut stopped => return all,
        }
    }
}
