//! What everything that is served stands on: cores, state file, run directory, and the names and sockets that are taken.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ioplane_api::refusal::Code;
use ioplane_api::spec::{PortSpec, ServedSpec, socket_flaw};
use ioplane_identity::IdentityDirectory;
use ioplane_nbd::import::{ClaimTime, ClaimWish};

use super::access::SocketAccess;
use super::claim_folder::ClaimFolder;
use super::cores::{CorePlacement, Cores};
use super::devices::DirectoryClient;
use super::events::Events;
use super::exporters::Exporters;
use super::groups::Groups;
use super::state_file::{Record, StateFile};
use crate::refusal::Refusal;

/// How long a guest waits for a disk that another one holds, if nobody says otherwise: longer than a connection takes to be known as lost.
const CLAIM_WAIT: Duration = Duration::from_secs(30);

/// Who has a name, and what goes with it: sockets, and an address on a switch.
struct Claim {
    kind: &'static str,
    sockets: Vec<PathBuf>,
    port: Option<PortSpec>,
}

/// On whose behalf a backing is opened.
#[derive(Debug, Clone)]
pub struct Opener {
    /// The name of what it is opened for.
    pub name: String,
    /// The socket by which it is served: written into locks, and told to exporters.
    pub socket: PathBuf,
    /// Who this host is to those that ask for a certificate.
    pub identity: IdentityDirectory,
    /// Who knows where the disks of other machines are.
    pub devices: Arc<DirectoryClient>,
    /// The sessions with the machines that have them.
    pub exporters: Arc<Exporters>,
    /// Where it is noted which backings are not to be used.
    pub state_file: Arc<StateFile>,
    /// Where claims are kept that have no image to be on, and those to exports of others.
    pub state_dir: PathBuf,
    /// What is remembered of claims to exports of others.
    pub claims: Arc<ClaimFolder>,
    /// How it comes by such a claim.
    pub wish: ClaimWish,
    /// When.
    pub claim_time: ClaimTime,
    /// How long a guest waits for it.
    pub claim_wait: Duration,
}

/// Where a daemon has its files.
#[derive(Debug, Clone)]
pub struct DaemonPaths {
    /// The sockets of what it serves, and the state file.
    pub run_dir: PathBuf,
    /// Its own socket.
    pub control: PathBuf,
    /// What outlives the host's run.
    pub state_dir: PathBuf,
}

/// What every served thing needs of its daemon.
pub struct DaemonContext {
    /// The I/O cores.
    pub cores: Arc<Cores>,
    /// The groups that devices may be in.
    pub groups: Arc<Groups>,
    pub state_file: Arc<StateFile>,
    run_dir: PathBuf,
    control: PathBuf,
    access: SocketAccess,
    state_dir: PathBuf,
    devices: Arc<DirectoryClient>,
    exporters: Arc<Exporters>,
    ending: AtomicBool,
    remembered: Arc<ClaimFolder>,
    claim_wait: Duration,
    claims: Mutex<BTreeMap<String, Claim>>,
    /// Something could not be served, and is to be tried again.
    pub failed: tokio::sync::Notify,
    /// What happens, for those who listen.
    pub events: Events,
}

impl DaemonContext {
    /// Sockets are made for `access`.
    pub fn new(
        cores: Arc<Cores>,
        groups: Arc<Groups>,
        state_file: Arc<StateFile>,
        paths: DaemonPaths,
        access: SocketAccess,
        devices: Arc<DirectoryClient>,
    ) -> Self {
        let DaemonPaths { run_dir, control, state_dir } = paths;
        let remembered = Arc::new(ClaimFolder::new(&state_dir, &run_dir));
        DaemonContext {
            cores,
            groups,
            state_file,
            run_dir,
            control,
            access,
            state_dir,
            devices,
            exporters: Arc::default(),
            ending: AtomicBool::new(false),
            remembered,
            claim_wait: CLAIM_WAIT,
            claims: Mutex::default(),
            failed: tokio::sync::Notify::new(),
            events: Events::default(),
        }
    }

    /// How long a guest waits for a disk that another one holds, whose release may be on its way.
    pub fn with_claim_wait(self, claim_wait: Option<Duration>) -> Self {
        DaemonContext { claim_wait: claim_wait.unwrap_or(CLAIM_WAIT), ..self }
    }

    /// Who may connect to the sockets.
    pub fn access(&self) -> SocketAccess {
        self.access
    }

    /// Where the identity of this host is.
    pub fn identity(&self) -> &IdentityDirectory {
        self.devices.identity()
    }

    /// The hold on the directory of devices.
    pub fn devices(&self) -> &Arc<DirectoryClient> {
        &self.devices
    }

    /// The sessions with machines that have disks which this one uses.
    pub fn exporters(&self) -> &Arc<Exporters> {
        &self.exporters
    }

    /// Everything is going to be served no more.
    pub fn begin_end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Whether what is served no more is so since the daemon ends.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// On whose behalf something is opened for what is served.
    pub fn opener(&self, spec: &impl ServedSpec) -> Opener {
        Opener {
            name: spec.name().to_owned(),
            socket: self.socket(spec),
            identity: self.identity().clone(),
            devices: self.devices.clone(),
            exporters: self.exporters.clone(),
            state_file: self.state_file.clone(),
            state_dir: self.state_dir.clone(),
            claims: self.remembered.clone(),
            wish: ClaimWish::Own,
            claim_time: ClaimTime::Open,
            claim_wait: self.claim_wait,
        }
    }

    /// The same for a disk, which is a guest's: what it is on is claimed when that uses it.
    pub fn disk_opener(&self, spec: &impl ServedSpec) -> Opener {
        Opener { claim_time: ClaimTime::FirstChannel, ..self.opener(spec) }
    }

    /// Where front ends connect.
    pub fn socket(&self, spec: &impl ServedSpec) -> PathBuf {
        spec.socket_in(&self.run_dir)
    }

    /// Where queues go.
    pub fn placement<S: ServedSpec>(&self, record: &Record<S>) -> CorePlacement {
        CorePlacement {
            pool: self.cores.pool().clone(),
            core: record.now.core(),
            moved: record.moved.clone(),
        }
    }

    /// Where a second front end connects, if nobody says otherwise.
    pub fn migration_socket(&self, name: &str) -> PathBuf {
        self.run_dir.join(format!("{name}.migration.sock"))
    }

    /// Takes a name and its sockets; says of what kind the holder of the name is if it is taken.
    pub fn claim(&self, kind: &'static str, spec: &impl ServedSpec) -> Result<(), Refusal> {
        self.enter(&mut self.claims(), kind, spec)
    }

    /// The same for what somebody asks for: no other port of its switch may exclude it. What is served already may have an address that
    /// is another's, since a configuration says in any order what comes and goes, and stays served.
    pub fn claim_new(&self, kind: &'static str, spec: &impl ServedSpec) -> Result<(), Refusal> {
        let mut claims = self.claims();
        let port = spec.port();
        let excludes =
            |claim: &Claim| claim.port.as_ref().zip(port.as_ref()).is_some_and(|(a, b)| a.excludes(b));
        let other = claims.iter().find(|(name, claim)| *name != spec.name() && excludes(claim));
        if let (Some(PortSpec { mac, .. }), Some((name, claim))) = (&port, other) {
            return Err(Refusal::conflict(
                format!("{mac} is the address of {} {name} already", claim.kind),
                "give every NIC of a switch its own address, or leave it out",
            )
            .coded(Code::Taken)
            .at("mac"));
        }
        self.enter(&mut claims, kind, spec)
    }

    fn enter(
        &self,
        claims: &mut BTreeMap<String, Claim>,
        kind: &'static str,
        spec: &impl ServedSpec,
    ) -> Result<(), Refusal> {
        if let Some(claim) = claims.get(spec.name()) {
            return Err(Refusal::conflict(
                format!("{} {} is there already", claim.kind, spec.name()),
                "give another name",
            )
            .coded(Code::Exists));
        }
        let sockets: Vec<PathBuf> =
            [self.socket(spec)].into_iter().chain(spec.migration_socket().map(Path::to_owned)).collect();
        for (at, socket) in sockets.iter().enumerate() {
            self.check_socket(claims, kind, socket)?;
            if sockets[..at].contains(socket) {
                let reason = format!(
                    "{} is the {kind}'s socket, and cannot be its migration socket too",
                    socket.display()
                );
                let refused = Refusal::conflict(reason, "give the migration socket a path of its own");
                return Err(refused.coded(Code::Taken).at("migration_socket"));
            }
        }
        claims.insert(spec.name().to_owned(), Claim { kind, sockets, port: spec.port() });
        Ok(())
    }

    /// Takes one socket more for a name.
    pub fn claim_socket(&self, kind: &'static str, name: &str, socket: &Path) -> Result<(), Refusal> {
        let mut claims = self.claims();
        self.check_socket(&claims, kind, socket)?;
        if let Some(claim) = claims.get_mut(name) {
            claim.sockets.push(socket.to_owned());
        }
        Ok(())
    }

    /// Gives one socket of a name back.
    pub fn release_socket(&self, name: &str, socket: &Path) {
        if let Some(claim) = self.claims().get_mut(name) {
            claim.sockets.retain(|theirs| theirs != socket);
        }
    }

    fn claims(&self) -> MutexGuard<'_, BTreeMap<String, Claim>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a socket may be there, and is nobody's.
    fn check_socket(
        &self,
        claims: &BTreeMap<String, Claim>,
        kind: &'static str,
        socket: &Path,
    ) -> Result<(), Refusal> {
        if let Some(flaw) = socket_flaw(socket) {
            return Err(Refusal::flaws(&[flaw]));
        }
        if socket == self.control {
            return Err(Refusal::conflict(
                format!("{} is the daemon's control socket", socket.display()),
                format!("give the {kind} another name, or a socket of its own"),
            )
            .coded(Code::Taken)
            .at("socket"));
        }
        let taken = |(_, claim): &(&String, &Claim)| claim.sockets.iter().any(|theirs| theirs == socket);
        match claims.iter().find(taken) {
            Some((name, claim)) => Err(Refusal::conflict(
                format!("{} is the socket of {} {name}", socket.display(), claim.kind),
                format!("give the {kind} another socket"),
            )
            .coded(Code::Taken)
            .at("socket")),
            None => Ok(()),
        }
    }

    /// Gives a name and its sockets back.
    pub fn release(&self, name: &str) {
        self.claims().remove(name);
    }
}
