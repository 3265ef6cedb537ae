//! One connection to a member of etcd, by its JSON interface: HTTP/1.1, keys and values in base64, numbers of 64 bits as texts.

use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use super::endpoint::EtcdEndpoint;
use crate::error::NetbusError;
use crate::limits::LONGEST_MESSAGE;
use crate::names::printable;
use crate::stream::{Security, connect};

/// How long a member may take to answer. A member that has lost the others says so itself after 7 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(8);
/// Most keys of one answer.
const PAGE: usize = 256;

/// A connection. After an error it is of no use any more: what was asked may have been done.
#[derive(Debug)]
pub(super) struct Gateway {
    sender: SendRequest<Full<Bytes>>,
    /// For the header `Host`.
    authority: String,
    task: AbortHandle,
    local: IpAddr,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What has to hold for a transaction.
#[derive(Debug, Clone)]
pub(super) enum Compare {
    /// The key is not there.
    Absent(String),
    /// The key was last written in this revision.
    Unchanged(String, i64),
}

/// What a transaction does.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    Get(String),
    Put {
        key: String,
        value: Vec<u8>,
        lease: Option<i64>,
    },
    Delete(String),
    /// All of it if the comparisons hold, or none.
    Transaction(Transaction),
}

/// Operations, if all comparisons hold.
#[derive(Debug, Clone, Default)]
pub(super) struct Transaction {
    pub(super) compare: Vec<Compare>,
    pub(super) then: Vec<Operation>,
}

/// A key with its value.
#[derive(Debug, Deserialize)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(default, deserialize_with = "bytes")]
    pub(super) value: Vec<u8>,
    #[serde(default, deserialize_with = "number")]
    pub(super) mod_revision: i64,
    #[serde(default, deserialize_with = "number")]
    pub(super) lease: i64,
}

#[derive(Debug, Default, Deserialize)]
struct Header {
    #[serde(default, deserialize_with = "number")]
    revision: i64,
}

#[derive(Debug, Default, Deserialize)]
struct RangeAnswer {
    #[serde(default)]
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
    #[serde(default)]
    more: bool,
    #[serde(default, deserialize_with = "number")]
    count: i64,
}

/// What came of a transaction.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Answer {
    header: Option<Header>,
    /// The comparisons held.
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    responses: Vec<OperationAnswer>,
}

#[derive(Debug, Default, Deserialize)]
struct OperationAnswer {
    response_range: Option<RangeAnswer>,
    response_txn: Option<Answer>,
}

impl Answer {
    /// The revision in which it was done.
    pub(super) fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// The keys that were read.
    pub(super) fn found(self) -> impl Iterator<Item = KeyValue> {
        self.responses.into_iter().filter_map(|one| one.response_range).flat_map(|range| range.kvs)
    }

    /// Whether each of its transactions was done.
    pub(super) fn done(&self) -> impl Iterator<Item = bool> {
        self.responses.iter().map(|one| one.response_txn.as_ref().is_some_and(|answer| answer.succeeded))
    }
}

/// A lease.
#[derive(Debug, Default, Deserialize)]
struct LeaseAnswer {
    #[serde(rename = "ID", default, deserialize_with = "number")]
    id: i64,
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    ttl: i64,
}

/// The first message of a stream of them.
#[derive(Debug, Deserialize)]
struct FirstOf<T> {
    result: T,
}

impl Gateway {
    /// Connects to a member. Says also how this host calls itself.
    pub(super) async fn open(
        endpoint: &EtcdEndpoint,
        security: &Security,
    ) -> Result<(Gateway, String), NetbusError> {
        if endpoint.tls() != matches!(security, Security::Tls(_)) {
            return Err(NetbusError::Scheme(endpoint.to_string()));
        }
        let (stream, local, host) = connect(&endpoint.address, security).await?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(lost)?;
        // What ends it the next request says, too.
        let task = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok((Gateway { sender, authority: endpoint.address.to_string(), task, local }, host))
    }

    /// By which of this host's addresses the member was reached.
    pub(super) fn local(&self) -> IpAddr {
        self.local
    }

    /// Reads one key. Linearizable: a member that has lost the others does not answer it.
    pub(super) async fn get(
        &mut self,
        doing: &'static str,
        key: &str,
    ) -> Result<Option<KeyValue>, NetbusError> {
        let range: RangeAnswer = self.ask(doing, "range", &json!({ "key": coded(key) })).await?;
        Ok(range.kvs.into_iter().next())
    }

    /// How many keys begin with `prefix`.
    pub(super) async fn count(&mut self, doing: &'static str, prefix: &str) -> Result<usize, NetbusError> {
        let asked = json!({ "key": coded(prefix), "range_end": end(prefix), "count_only": true });
        let range: RangeAnswer = self.ask(doing, "range", &asked).await?;
        Ok(usize::try_from(range.count).unwrap_or(usize::MAX))
    }

    /// Reads all keys that begin with `prefix`, at most `most`, and gives each to `each`: as they were in `revision`, or as they are. Says in which
    /// revision that was. Linearizable, as [`Gateway::get`].
    pub(super) async fn scan(
        &mut self,
        doing: &'static str,
        (prefix, most): (&str, usize),
        revision: Option<i64>,
        mut each: impl FnMut(KeyValue) -> Result<(), NetbusError>,
    ) -> Result<i64, NetbusError> {
        let (mut from, mut revision, mut read) = (coded(prefix), revision, 0);
        loop {
            let at = revision.unwrap_or(0).to_string();
            let asked = json!({ "key": from, "range_end": end(prefix), "limit": PAGE, "revision": at });
            let range: RangeAnswer = self.ask(doing, "range", &asked).await?;
            let at = *revision.get_or_insert(range.header.revision);
            read += range.kvs.len();
            if read > most || range.kvs.len() > PAGE {
                return Err(failed(doing, &format!("there are more than {most} keys in {prefix}")));
            }
            // The first key after the last one.
            let last = range.kvs.last().map(|pair| STANDARD.encode([&pair.key, &b"\0"[..]].concat()));
            range.kvs.into_iter().try_for_each(&mut each)?;
            match (last, range.more) {
                (Some(last), true) => from = last,
                (None, true) => return Err(failed(doing, "its list does not end")),
                (_, false) => return Ok(at),
            }
        }
    }

    /// Does a transaction, which only a majority of the members can.
    pub(super) async fn transact(
        &mut self,
        doing: &'static str,
        transaction: &Transaction,
    ) -> Result<Answer, NetbusError> {
        self.ask(doing, "txn", &transaction.asked()).await
    }

    /// A lease of `time`, whole seconds.
    pub(super) async fn grant(&mut self, time: Duration) -> Result<i64, NetbusError> {
        const DOING: &str = "asking for a lease";
        let asked = json!({ "TTL": time.as_secs().to_string() });
        let lease: LeaseAnswer = self.call(DOING, "lease/grant", &asked).await?;
        if lease.id == 0 { Err(failed(DOING, "it has no number")) } else { Ok(lease.id) }
    }

    /// Renews a lease; `false` if it has ended.
    pub(super) async fn renew(&mut self, lease: i64) -> Result<bool, NetbusError> {
        let asked = json!({ "ID": lease.to_string() });
        let renewed: FirstOf<LeaseAnswer> =
            self.call("renewing the lease", "lease/keepalive", &asked).await?;
        Ok(renewed.result.ttl > 0)
    }

    /// Ends a lease, and with it the keys that it keeps.
    pub(super) async fn revoke(&mut self, lease: i64) -> Result<(), NetbusError> {
        let asked = json!({ "ID": lease.to_string() });
        self.call::<Value>("ending a lease", "lease/revoke", &asked).await.map(drop)
    }

    async fn ask<T: DeserializeOwned>(
        &mut self,
        doing: &'static str,
        what: &str,
        asked: &Value,
    ) -> Result<T, NetbusError> {
        self.call(doing, &format!("kv/{what}"), asked).await
    }

    async fn call<T: DeserializeOwned>(
        &mut self,
        doing: &'static str,
        what: &str,
        asked: &Value,
    ) -> Result<T, NetbusError> {
        let request = Request::post(format!("/v3/{what}"))
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(asked.to_string())))
            .map_err(|error| failed(doing, &error.to_string()))?;
        let answered = async {
            self.sender.ready().await.map_err(lost)?;
            let response = self.sender.send_request(request).await.map_err(lost)?;
            read(doing, response).await
        };
        let answered = tokio::time::timeout(PATIENCE, answered).await;
        let (good, text) = answered.map_err(|_| NetbusError::Slow(PATIENCE))??;
        if !good {
            return Err(failed(doing, &reason(&text)));
        }
        // Of a stream only the first message.
        let mut messages = serde_json::Deserializer::from_slice(&text).into_iter();
        match messages.next() {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(error)) => Err(failed(doing, &format!("that is no answer of etcd: {error}"))),
            None => Err(failed(doing, "the answer is empty")),
        }
    }
}

/// Whether an answer says that what was asked was done, and its text.
async fn read(doing: &'static str, response: Response<Incoming>) -> Result<(bool, Bytes), NetbusError> {
    let good = response.status().is_success();
    let body = Limited::new(response.into_body(), LONGEST_MESSAGE).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(error) => lost(*error),
        Err(error) if error.is::<LengthLimitError>() => {
            failed(doing, &format!("an answer of more than {LONGEST_MESSAGE} bytes"))
        }
        Err(error) => failed(doing, &error.to_string()),
    })?;
    Ok((good, body.to_bytes()))
}

/// What a member says that does not do what it is asked.
fn reason(text: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Refusal {
        error: String,
    }
    match serde_json::from_slice(text) {
        Ok(Refusal { error }) => error,
        Err(_) => String::from_utf8_lossy(text).trim().to_owned(),
    }
}

fn failed(doing: &'static str, why: &str) -> NetbusError {
    NetbusError::Etcd { doing, why: printable(why) }
}

/// A connection that has failed.
fn lost(error: hyper::Error) -> NetbusError {
    let text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(source) = cause {
        if let Some(io) = source.downcast_ref::<std::io::Error>() {
            let io = io
                .get_ref()
                .map_or_else(|| io.kind().into(), |_| std::io::Error::new(io.kind(), io.to_string()));
            return NetbusError::stream("speaking with etcd")(io);
        }
        cause = source.source();
    }
    if error.is_parse() { failed("reading an answer", &text) } else { NetbusError::Closed }
}

impl Transaction {
    fn asked(&self) -> Value {
        let compare: Vec<Value> = self.compare.iter().map(Compare::asked).collect();
        let then: Vec<Value> = self.then.iter().map(Operation::asked).collect();
        json!({ "compare": compare, "success": then })
    }
}

impl Compare {
    fn asked(&self) -> Value {
        match self {
            Compare::Absent(key) => {
                json!({ "key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0" })
            }
            Compare::Unchanged(key, revision) => {
                let revision = revision.to_string();
                json!({ "key": coded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision })
            }
        }
    }
}

impl Operation {
    fn asked(&self) -> Value {
        match self {
            Operation::Get(key) => json!({ "request_range": { "key": coded(key) } }),
            Operation::Put { key, value, lease } => {
                let lease = lease.unwrap_or(0).to_string();
                json!({ "request_put": { "key": coded(key), "value": STANDARD.encode(value), "lease": lease } })
            }
            Operation::Delete(key) => json!({ "request_delete_range": { "key": coded(key) } }),
            Operation::Transaction(inner) => json!({ "request_txn": inner.asked() }),
        }
    }
}

fn coded(key: &str) -> String {
    STANDARD.encode(key)
}

/// The first key after all that begin with `prefix`, which ends with a slash.
fn end(prefix: &str) -> String {
    coded(&format!("{}0", prefix.trim_end_matches('/')))
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Text(String),
        Plain(i64),
    }
    match Number::deserialize(from)? {
        Number::Text(text) => text.parse().map_err(|_| D::Error::custom("a number is expected")),
        Number::Plain(number) => Ok(number),
    }
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    STANDARD.decode(text).map_err(|_| D::Error::custom("base64 is expected"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn answers_are_read_as_etcd_writes_them() {
        let text = r#"{"header":{"cluster_id":"1","revision":"7","raft_term":"2"},"succeeded":true,"responses":[
            {"response_txn":{"header":{},"succeeded":true,"responses":[{"response_put":{"header":{"revision":"2"}}}]}},
            {"response_txn":{"header":{}}},
            {"response_range":{"header":{"revision":"7"},"kvs":[{"key":"eA==","create_revision":"2","mod_revision":"5","version":"1","value":"aGVsbG8=","lease":"9"}],"count":"1"}}]}"#;
        let answer: Answer = serde_json::from_str(text).unwrap();
        assert!(answer.succeeded && answer.revision() == 7);
        assert_eq!(answer.done().take(2).collect::<Vec<_>>(), [true, false]);
        let found: Vec<KeyValue> = answer.found().collect();
        let KeyValue { key, value, mod_revision, lease } = &found[0];
        assert_eq!((&key[..], &value[..], *mod_revision, *lease), (&b"x"[..], &b"hello"[..], 5, 9));
        let nothing: RangeAnswer = serde_json::from_str("{}").unwrap();
        assert!(nothing.kvs.is_empty() && nothing.count == 0);
        for bad in [r#"{"count":"x"}"#, r#"{"count":[]}"#, r#"{"kvs":[{"key":"!"}]}"#, r#"{"kvs":[{}]}"#, "7"]
        {
            assert!(serde_json::from_str::<RangeAnswer>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reason_is_given_as_it_is_said() {
        let text = br#"{"error":"etcdserver: no leader","message":"etcdserver: no leader","code":14}"#;
        assert_eq!(reason(text), "etcdserver: no leader");
        assert_eq!(reason(b"Not Found\n"), "Not Found");
        let shown = failed("x", "\u{1b}[2J").to_string();
        assert!(!shown.contains('\u{1b}'), "{shown}");
    }

    proptest! {
        #[test]
        fn no_answer_is_too_hostile(text in ".{0,200}") {
            let _ = serde_json::from_str::<Answer>(&text);
            let _ = serde_json::from_str::<RangeAnswer>(&text);
            let _ = serde_json::from_str::<FirstOf<LeaseAnswer>>(&text);
            reason(text.as_bytes());
        }
    }
}
