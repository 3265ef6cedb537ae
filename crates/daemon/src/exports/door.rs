//! What a listener knows of exports: whom it may let in, and whom to hand clients to.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_api::spec::HostList;
use ioplane_nbd::claim::{
    CLAIM, ClaimDenial, ClaimQuery, ClaimRecord, ClaimRefusal, ClaimReply, LONGEST_NAME, readable_within,
};
use ioplane_nbd::export::{ClientSocket, Exports, PublishedExport};
use ioplane_nbd::handshake::ExportInfo;
use ioplane_nbd::handshake::server::{ExportRefusal, Negotiated, TlsPolicy};
use ioplane_nbd::import::{EPOCH, INSTANCE};
use ioplane_nbd::reserve::{ORDER, RESERVE, ReserveQuery, order_of};
use ioplane_nbd::session::{SESSION, SESSIONS};
use tokio::sync::{mpsc, oneshot};

use super::instance::ExportInstance;
use super::owner::{Ask, ChannelEpoch, Fenced, ShownClaim, joined};
use super::told::ToldState;

/// Who a client is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientOrigin {
    /// A program of this host, by the export's socket.
    Local,
    /// Somebody on the network, in plain text.
    Anybody,
    /// A host, by the name in its certificate.
    Host(String),
}

/// Whom an export lets in.
#[derive(Debug, Clone, Default)]
pub struct Admission {
    /// Of other machines only hosts with a certificate.
    pub tls: bool,
    /// Of these, only those.
    pub allow: Option<HostList>,
}

impl Admission {
    fn admits(&self, client: &ClientOrigin) -> Result<(), ExportRefusal> {
        match (client, &self.allow) {
            (ClientOrigin::Anybody, _) if self.tls => Err(ExportRefusal::TlsRequired),
            (ClientOrigin::Host(host), Some(allow)) if !allow.has(host) => {
                Err(ExportRefusal::Policy(format!("{host} is not among the hosts that may use this export")))
            }
            _ => Ok(()),
        }
    }
}

/// One export, as its listeners see it.
#[derive(Clone)]
pub struct Door(Arc<Shared>);

struct Shared {
    published: PublishedExport,
    instance: ExportInstance,
    admission: Admission,
    owner: mpsc::Sender<Ask>,
    claim: ShownClaim,
    told: ToldState,
    refused: AtomicU64,
}

impl Door {
    pub fn new(
        published: PublishedExport,
        instance: ExportInstance,
        admission: Admission,
        (owner, claim): (mpsc::Sender<Ask>, ShownClaim),
        told: ToldState,
    ) -> Self {
        let refused = AtomicU64::new(0);
        Door(Arc::new(Shared { published, instance, admission, owner, claim, told, refused }))
    }

    pub fn published(&self) -> &PublishedExport {
        &self.0.published
    }

    pub fn instance(&self) -> &ExportInstance {
        &self.0.instance
    }

    /// What those who use it are told.
    pub fn told(&self) -> &ToldState {
        &self.0.told
    }

    /// Whether that client may use it.
    pub fn admits(&self, client: &ClientOrigin) -> Result<(), ExportRefusal> {
        self.0.admission.admits(client)
    }

    /// Clients that were let in and could not be taken.
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// The claim that was granted last.
    pub fn claim(&self) -> Option<ClaimRecord> {
        self.0.claim.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses whoever speaks of no claim while somebody has one. Whether a claim holds is its owner's to say.
    fn admits_unclaimed(&self) -> Result<(), ExportRefusal> {
        match self.claim().filter(|record| record.held) {
            Some(ClaimRecord { generation, name, since, .. }) => {
                let held = ClaimRefusal { why: ClaimDenial::Held, generation, since, name };
                Err(ExportRefusal::Policy(format!(
                    "{held}, and only its holder may use it until it is released"
                )))
            }
            None => Ok(()),
        }
    }

    /// Fails if the export is gone.
    pub async fn ask(&self, ask: Ask) -> Result<(), mpsc::error::SendError<Ask>> {
        self.0.owner.send(ask).await
    }

    /// Hands over a client whose handshake has ended.
    pub async fn take(
        &self,
        who: &ClientOrigin,
        socket: ClientSocket,
        negotiated: Negotiated,
        ahead: Vec<u8>,
    ) {
        let client = negotiated.contexts.iter().find_map(|context| epoch(&context.name, who));
        // It has asked, and is to come with a connection to use.
        let only_asks = |name: &str| {
            name == EPOCH
                || name == CLAIM
                || ClaimReply::of(name).is_some()
                || name.starts_with(RESERVE)
                || name.starts_with(ORDER)
        };
        if client.is_none() && negotiated.contexts.iter().any(|context| only_asks(&context.name)) {
            return;
        }
        let taken = Ask::Connect { socket, negotiated, ahead, client };
        if self.ask(taken).await.is_err() {
            self.0.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The name of the context that a query of ours finds, once what it asks for holds.
    async fn context(&self, who: &ClientOrigin, query: &str, selects: bool, seen: &Seen) -> Option<String> {
        // Whoever may not use the export learns nothing of it, and ends nobody's connections.
        self.0.admission.admits(who).ok()?;
        if query == INSTANCE {
            return Some(format!("{INSTANCE}={}", self.instance().now()));
        }
        if query == EPOCH || query == SESSION || query == SESSIONS {
            // A session is no client: it takes no place, and nobody has to release anything for it.
            seen.knows.fetch_or(selects && query == SESSION, Ordering::Relaxed);
            return Some(query.to_owned());
        }
        if query.starts_with(CLAIM) {
            return self.claims(who, query, selects, seen).await;
        }
        if let Some(order) = order_of(query) {
            seen.order.store(order, Ordering::Relaxed);
            return Some(query.to_owned());
        }
        if query.starts_with(RESERVE) {
            return self.reserves(who, query, selects, seen).await;
        }
        let client = epoch(query, who)?;
        let claimed = client.has_claim();
        if !selects {
            return Some(EPOCH.to_owned());
        }
        // An older connection of the same client is read no more, and all that was begun for it has ended.
        let (answer, fenced) = oneshot::channel();
        self.ask(Ask::Fence { client, answer }).await.ok()?;
        match fenced.await.ok()? {
            Fenced::Newest => {
                seen.knows.fetch_or(claimed, Ordering::Relaxed);
                Some(query.to_owned())
            }
            Fenced::Refused(refusal) if claimed => {
                seen.knows.store(true, Ordering::Relaxed);
                Some(ClaimReply::Refused(refusal).to_string())
            }
            // An importer that knows nothing of claims is told why when it enters.
            Fenced::No | Fenced::Refused(_) => None,
        }
    }

    /// The same of a query about reservations.
    async fn reserves(&self, who: &ClientOrigin, query: &str, selects: bool, seen: &Seen) -> Option<String> {
        if query == RESERVE || !selects {
            return Some(RESERVE.to_owned());
        }
        let asked = ReserveQuery::of(query)?;
        let (holder, name) = in_the_name_of(who, asked.holder, asked.name);
        let query = ReserveQuery { holder, name, ..asked };
        let (order, (answer, reply)) = (seen.order.load(Ordering::Relaxed), oneshot::channel());
        self.ask(Ask::Reserve { query, order, answer }).await.ok()?;
        let reply = reply.await.ok()?;
        // Its connection ends with that, whoever holds the export.
        seen.knows.store(true, Ordering::Relaxed);
        Some(reply.to_string())
    }

    /// The same of a query about claims.
    async fn claims(&self, who: &ClientOrigin, query: &str, selects: bool, seen: &Seen) -> Option<String> {
        // There is nothing to claim where nobody writes.
        if self.published().read_only() {
            return None;
        }
        let asked = if query == CLAIM { None } else { Some(ClaimQuery::of(query)?) };
        let Some(asked) = asked.filter(|_| selects) else {
            seen.knows.fetch_or(selects, Ordering::Relaxed);
            return Some(CLAIM.to_owned());
        };
        let (holder, name) = in_the_name_of(who, asked.holder, asked.name);
        let query = ClaimQuery { holder, name, ..asked };
        let (answer, reply) = oneshot::channel();
        self.ask(Ask::Claim { query, answer }).await.ok()?;
        let reply = reply.await.ok()?;
        seen.knows.store(true, Ordering::Relaxed);
        Some(reply.to_string())
    }
}

/// Whose holder it is, and how it is called: a host speaks for itself only.
fn in_the_name_of(who: &ClientOrigin, holder: String, name: String) -> (String, String) {
    match who {
        ClientOrigin::Host(host) => {
            // Whatever the client calls itself, its certificate is named.
            let certificate = format!(" (certificate of {host})");
            let name = readable_within(&name, LONGEST_NAME.saturating_sub(certificate.len()));
            (joined(host, &holder), readable_within(&(name + &certificate), LONGEST_NAME))
        }
        ClientOrigin::Local | ClientOrigin::Anybody => (holder, name),
    }
}

/// Whose connection it is. A host speaks for itself only: whatever holder it names is one of its own.
fn epoch(query: &str, who: &ClientOrigin) -> Option<ChannelEpoch> {
    let epoch = ChannelEpoch::of(query)?;
    Some(match who {
        ClientOrigin::Host(host) => epoch.of_host(host),
        ClientOrigin::Local | ClientOrigin::Anybody => epoch,
    })
}

/// The exports behind one listener, by name.
#[derive(Clone, Default)]
pub struct Doors(Arc<Mutex<BTreeMap<String, Door>>>);

impl Doors {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Door>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With one more.
    pub fn enter(&self, door: Door) -> Doors {
        self.lock().insert(door.published().name().to_owned(), door);
        self.clone()
    }

    /// Without that one; says whether it was the last.
    pub fn leave(&self, name: &str) -> bool {
        let mut doors = self.lock();
        doors.remove(name);
        doors.is_empty()
    }

    /// The one of that name; without a name, the only one.
    pub fn door(&self, name: &str) -> Option<Door> {
        let doors = self.lock();
        match name {
            "" if doors.len() == 1 => doors.values().next().cloned(),
            name => doors.get(name).cloned(),
        }
    }

    /// What a listener by TCP does about TLS: it requires it where every export does.
    pub fn policy(&self) -> TlsPolicy {
        let doors = self.lock();
        let tls = doors.values().filter(|door| door.0.admission.tls).count();
        match tls {
            0 => TlsPolicy::Unsupported,
            all if all == doors.len() => TlsPolicy::Required,
            _ => TlsPolicy::Offered,
        }
    }

    /// What `client` is told.
    pub fn seen_by(&self, client: ClientOrigin) -> Visitor {
        Visitor { doors: self.clone(), client, seen: Seen::default(), asks: AtomicBool::new(false) }
    }
}

/// What a client has said in its handshake so far.
#[derive(Debug, Default)]
struct Seen {
    /// It speaks of claims: whether it has one is seen when it comes with a connection to use.
    knows: AtomicBool,
    /// The number of its question about reservations; 0 for an older client, whose questions have none.
    order: AtomicU64,
}

/// A client before the doors.
pub struct Visitor {
    doors: Doors,
    client: ClientOrigin,
    seen: Seen,
    /// It has a question about claims, and its connection ends with that.
    asks: AtomicBool,
}

impl Exports for Visitor {
    async fn find(&self, name: &str, enters: bool) -> Result<ExportInfo, ExportRefusal> {
        let door = self.doors.door(name).ok_or(ExportRefusal::Unknown)?;
        door.0.admission.admits(&self.client)?;
        if enters {
            if let Some(why) = door.instance().unrecorded() {
                return Err(ExportRefusal::Policy(why));
            }
            match door.published().enter() {
                // It only asks, and takes no place.
                Err(ExportRefusal::Policy(_)) if self.asks.load(Ordering::Relaxed) => {}
                entered => entered?,
            }
            if !self.seen.knows.load(Ordering::Relaxed) {
                door.admits_unclaimed()?;
            }
        }
        Ok(door.published().info())
    }

    async fn list(&self) -> Vec<(String, String)> {
        let doors = self.doors.lock();
        let admitted = doors.values().filter(|door| door.0.admission.admits(&self.client).is_ok());
        let listed = admitted.map(|door| door.published().info());
        listed.map(|info| (info.name, info.description)).collect()
    }

    async fn context(&self, export: &str, query: &str, selects: bool) -> Option<String> {
        let asks = query.starts_with(CLAIM) || query.starts_with(RESERVE) || query == SESSION;
        self.asks.fetch_or(selects && asks, Ordering::Relaxed);
        self.doors.door(export)?.context(&self.client, query, selects, &self.seen).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_with_tls_lets_in_the_hosts_that_may() {
        let host = |name: &str| ClientOrigin::Host(name.to_owned());
        let plain = Admission::default();
        let tls = Admission { tls: true, allow: None };
        let some = Admission { tls: true, allow: Some("host-b".parse().unwrap()) };
        for client in [ClientOrigin::Local, ClientOrigin::Anybody, host("host-b")] {
            assert_eq!(plain.admits(&client), Ok(()), "{client:?}");
        }
        for admission in [&tls, &some] {
            assert_eq!(admission.admits(&ClientOrigin::Anybody), Err(ExportRefusal::TlsRequired));
            assert_eq!(admission.admits(&ClientOrigin::Local), Ok(()));
            assert_eq!(admission.admits(&host("host-b")), Ok(()));
        }
        assert_eq!(tls.admits(&host("host-c")), Ok(()));
        assert!(
            matches!(some.admits(&host("host-c")), Err(ExportRefusal::Policy(why)) if why.contains("host-c"))
        );
    }

    #[test]
    fn a_host_cannot_hide_its_certificate_behind_a_long_name() {
        let host = ClientOrigin::Host("host-b".to_owned());
        let called = |name: &str| in_the_name_of(&host, "3f".to_owned(), name.to_owned()).1;
        assert_eq!(called("disk web"), "disk web (certificate of host-b)");
        for name in ["disk of host-c ".repeat(40), "\u{e9}".repeat(LONGEST_NAME)] {
            let called = called(&name);
            assert!(called.len() <= LONGEST_NAME && called.ends_with(" (certificate of host-b)"), "{called}");
            assert!(called.starts_with(&name[..200]), "{called}");
        }
    }

    #[test]
    fn a_host_cannot_name_the_holder_of_another_one() {
        let query = format!("{EPOCH}=3f/17/0/7");
        let of = |who: &ClientOrigin| epoch(&query, who).unwrap();
        let [b, c] = ["host-b", "host-c"].map(|host| of(&ClientOrigin::Host(host.to_owned())));
        assert!(
            b != c && b != of(&ClientOrigin::Anybody) && b == of(&ClientOrigin::Host("host-b".to_owned()))
        );
    }
}
