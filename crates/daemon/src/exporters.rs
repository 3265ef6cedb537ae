//! The sessions with the hosts whose disks this host uses: one for each host, whatever number of disks (docs/decisions/0072-the-session-of-two-hosts.md).
//!
//! ```text
//!   disk opened --follow--> Exporters --> a Subscriber for each host --told--> Import: size, how the exporter says that it is
//!                                                                                |  news
//!                           Daemon::follow_exporters (follow.rs): one task for all disks <---'  guests are told of sizes, people of the rest
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ioplane_identity::IdentityDirectory;
use ioplane_nbd::import::{Address, ExporterState, Import, ImportOptions, ServerAddress, Told, open_session};
use ioplane_nbd::session::SessionStream;
use ioplane_netbus::control::{
    DeviceNews, DevicePresence, DeviceState, PublisherLink, SessionTiming, Subscriber,
};
use tokio::sync::Notify;

use super::devices::DISK;

/// All of them.
#[derive(Debug, Default)]
pub struct Exporters {
    hosts: Mutex<BTreeMap<String, ExporterHost>>,
    news: Arc<Notify>,
}

/// One host.
#[derive(Debug)]
struct ExporterHost {
    subscriber: Subscriber,
    uses: Arc<Mutex<Uses>>,
}

/// What is used of a host.
#[derive(Debug, Default)]
struct Uses {
    /// By the name of the export.
    imports: BTreeMap<String, Vec<Weak<Import>>>,
    /// Where each export was opened last.
    addresses: BTreeMap<String, Address>,
    /// What was told of each last.
    told: BTreeMap<String, Learned>,
}

#[derive(Debug, Clone)]
struct Learned {
    told: Told,
    /// Of which instance, and how many bytes it has; only while there is a session that would say if that changes.
    size: Option<(String, u64)>,
}

impl Learned {
    fn reaches(&self, import: &Import) {
        self.size_reaches(import);
        import.tell(self.told.clone());
    }

    fn size_reaches(&self, import: &Import) {
        if let Some((instance, bytes)) = &self.size {
            import.tell_size(instance, *bytes);
        }
    }
}

/// Which host that is. With TLS it is the name in its certificate that counts; a socket is one export's.
fn host_of(address: &Address) -> String {
    match (&address.endpoint, &address.tls) {
        (ServerAddress::Tcp { port, .. }, Some(name)) => format!("{name}:{port} with TLS"),
        (ServerAddress::Tcp { host, port }, None) => format!("{host}:{port}"),
        (ServerAddress::Unix { path }, _) => path.display().to_string(),
    }
}

impl Exporters {
    /// Woken when an import has grown, or its exporter has told something.
    pub fn news(&self) -> &Arc<Notify> {
        &self.news
    }

    fn hosts(&self) -> MutexGuard<'_, BTreeMap<String, ExporterHost>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the exporter of this import tell how it is, as long as the import lives. Servers of others, and older ones of ours, are not asked. Must be called in the runtime.
    pub fn follow(&self, import: &Arc<Import>, address: &Address, identity: &IdentityDirectory) {
        if !import.has_sessions() {
            return;
        }
        let mut hosts = self.hosts();
        let host = hosts.entry(host_of(address)).or_insert_with(|| {
            let uses = Arc::<Mutex<Uses>>::default();
            let options = ImportOptions { identity: identity.clone(), ..ImportOptions::new(address.clone()) };
            let subscriber =
                Subscriber::start(ExporterLink { options, uses: uses.clone() }, SessionTiming::default());
            ExporterHost { subscriber, uses }
        });
        let mut uses = lock(&host.uses);
        if let Some(learned) = uses.told.get(&address.export) {
            learned.reaches(import);
        }
        uses.imports.entry(address.export.clone()).or_default().push(Arc::downgrade(import));
        uses.addresses.insert(address.export.clone(), address.clone());
        let wanted = uses.wanted();
        drop(uses);
        host.subscriber.want(wanted);
    }

    /// Forgets imports that are gone, ends the sessions with hosts of which nothing is used any more, and says sizes again to imports whose connections
    /// may have found the instance since.
    pub fn prune(&self) {
        self.hosts().retain(|_, host| {
            let wanted = {
                let mut uses = lock(&host.uses);
                uses.forget_gone();
                uses.say_sizes_again();
                uses.wanted()
            };
            let stays = !wanted.is_empty();
            host.subscriber.want(wanted);
            stays
        });
    }
}

fn lock(uses: &Mutex<Uses>) -> MutexGuard<'_, Uses> {
    uses.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uses {
    fn wanted(&self) -> BTreeSet<String> {
        self.imports.keys().cloned().collect()
    }

    fn forget_gone(&mut self) {
        self.imports.retain(|_, imports| {
            imports.retain(|import| import.strong_count() > 0);
            !imports.is_empty()
        });
        let Uses { imports, addresses, told } = self;
        addresses.retain(|export, _| imports.contains_key(export));
        told.retain(|export, _| imports.contains_key(export));
    }

    fn say_sizes_again(&self) {
        for (export, learned) in &self.told {
            let imports = self.imports.get(export).into_iter().flatten().filter_map(Weak::upgrade);
            imports.for_each(|import| learned.size_reaches(&import));
        }
    }

    fn learn(&mut self, export: &str, learned: Learned) {
        let imports = self.imports.get(export).into_iter().flatten().filter_map(Weak::upgrade);
        imports.for_each(|import| learned.reaches(&import));
        if self.imports.contains_key(export) {
            self.told.insert(export.to_owned(), learned);
        }
    }
}

/// How one host is reached, and who hears what it tells.
struct ExporterLink {
    /// With the address of the disk that was opened first.
    options: ImportOptions,
    uses: Arc<Mutex<Uses>>,
}

impl PublisherLink for ExporterLink {
    type Stream = SessionStream;

    async fn connect(&self, device: &str) -> Result<SessionStream, String> {
        let mut options = self.options.clone();
        // One of its addresses may be gone, and another disk have a better one.
        let address = lock(&self.uses).addresses.get(device).cloned();
        match address {
            Some(address) => options.address = address,
            None => options.address.export = device.to_owned(),
        }
        open_session(&options).await.map_err(|error| error.to_string())
    }

    fn told(&self, device: &str, news: DeviceNews<'_>) {
        let mut uses = lock(&self.uses);
        let silent = |why: &str| Told { why: Some(why.to_owned()), ..Told::default() };
        // Nobody says when a size is not true any more: without a session it is what connections find.
        let learned = match news {
            DeviceNews::State(state, events) => {
                tracing::debug!(export = device, ?events, "an exporter tells of an export");
                state_of(state)
            }
            DeviceNews::Refused(why) => Learned { told: silent(why), size: None },
            // What it has said before it went explains why it is gone.
            DeviceNews::Unknown(why) => match uses.told.get(device).map(|before| &before.told) {
                Some(told) if matches!(told.state, ExporterState::Withdrawn | ExporterState::Stopping) => {
                    Learned { told: told.clone(), size: None }
                }
                _ => Learned { told: silent(why), size: None },
            },
        };
        uses.learn(device, learned);
    }
}

fn state_of(state: &DeviceState) -> Learned {
    if state.kind != DISK {
        let why = Some(format!("it says that this is a {}", state.kind));
        return Learned { told: Told { why, ..Told::default() }, size: None };
    }
    let exporter = match (state.presence, &state.trouble) {
        (DevicePresence::Withdrawn, _) => ExporterState::Withdrawn,
        (DevicePresence::Stopping, _) => ExporterState::Stopping,
        (DevicePresence::Served, Some(trouble)) => ExporterState::Troubled(trouble.clone()),
        (DevicePresence::Served, None) => ExporterState::Served,
    };
    let told = Told { state: exporter, holder: state.holder.clone(), why: None };
    // One that is published anew may have another size before that is told.
    let served = state.presence == DevicePresence::Served;
    Learned { told, size: served.then(|| (state.incarnation.clone(), state.units)) }
}
