//! `identity token`, `serve`, `join`, `renew`, `revoke`, `revocations`: certificates that come and go over the network.

use std::future::Future;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use ioplane_api::refusal::Code;
use ioplane_cli::output::{CommandError, hint, print, print_done};
use ioplane_identity::{
    HostName, IdentityDirectory, LONGEST_LIST, Revoked, TokenOrder, Validity, Which, moment,
};
use ioplane_join::{AuthorityPlace, JoinError, JoinServer, JoinToken, Joined, MOST_PLACES, TokenFlaw};
use ioplane_plain::file_text;
use serde::Serialize;

use super::refused;

/// Longest token on standard input, bytes.
const LONGEST_TOKEN: u64 = 8192;

/// What `token` was asked for.
pub struct TokenArgs<'a> {
    pub name: Option<HostName>,
    pub valid: Duration,
    pub at: &'a [String],
    pub days: u32,
    pub replace: bool,
}

/// A token that was made.
#[derive(Debug, Serialize)]
struct TokenReport {
    token: String,
    name: Option<String>,
    /// Seconds since 1970.
    until: i64,
    authority_at: Vec<String>,
    /// The ledger has been there since the authority was made. If not, hosts may have names that it does not know.
    ledger_knows_all: bool,
}

/// What `revoke` has done.
#[derive(Debug, Serialize)]
struct RevokedReport {
    host: String,
    /// Those that were valid before.
    serials: Vec<String>,
    revocation_list: u64,
}

/// The list that counts here.
#[derive(Debug, Serialize)]
struct RevocationsReport {
    revocation_list: Option<u64>,
    revoked: Vec<RevokedCertificate>,
}

#[derive(Debug, Serialize)]
struct RevokedCertificate {
    serial: String,
    /// Seconds since 1970.
    at: i64,
}

fn usage(text: impl ToString, remedy: &str) -> anyhow::Error {
    CommandError::new(Code::Usage, text.to_string(), remedy).into()
}

fn failed(error: JoinError) -> anyhow::Error {
    let error = match error {
        JoinError::Identity(error) => return refused(error),
        other => other,
    };
    let remedy = match &error {
        JoinError::Unreachable(_) => "does `ioplane identity serve` run there, and can the port be reached?",
        JoinError::Tls(_) => "compare both hosts: ioplane identity show",
        _ => "",
    };
    let code = match &error {
        JoinError::Refused(_) => Code::Conflict,
        _ => Code::CommandFailed,
    };
    CommandError::new(code, error.to_string(), remedy).into()
}

/// Runs what waits for the network.
fn wait<T>(work: impl Future<Output = Result<T, JoinError>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting")?.block_on(work).map_err(failed)
}

/// Where the authority answers: as typed, or as kept.
fn places(directory: &IdentityDirectory, typed: &[String], remedy: &str) -> Result<Vec<AuthorityPlace>> {
    let kept = if typed.is_empty() { directory.places() } else { Vec::new() };
    let texts = if typed.is_empty() { &kept } else { typed };
    if texts.is_empty() {
        return Err(usage("where the authority answers is not known", remedy));
    }
    if texts.len() > MOST_PLACES {
        return Err(usage(format!("there are at most {MOST_PLACES} addresses of an authority"), ""));
    }
    texts.iter().map(|text| text.parse().map_err(|error: TokenFlaw| usage(error, remedy))).collect()
}

pub fn token(directory: &IdentityDirectory, args: TokenArgs<'_>, json: bool) -> Result<()> {
    let remedy = "give --at HOST[:PORT], where the other host finds `ioplane identity serve`";
    let places = places(directory, args.at, remedy)?;
    let authority = directory.authority_facts().map_err(refused)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let until = now.saturating_add(args.valid).as_secs() as i64;
    let TokenArgs { name, days, replace, .. } = args;
    let order = TokenOrder { name: name.clone(), replaces: replace, days, until };
    let ledger_knows_all = directory.knows_all().map_err(refused)?;
    let secret = directory.make_token(&order).map_err(refused)?;
    let name = name.map(|name| name.to_string());
    let authority_at = places.iter().map(ToString::to_string).collect();
    let authority = authority.sha256().context("the fingerprint of the authority")?;
    let token = JoinToken { places, authority, secret, until, name: name.clone() };
    let report = TokenReport { token: token.text(), name, until, authority_at, ledger_knows_all };
    print(json, &report, |report| format!("{}\n", report.token))?;
    if !json {
        hint(format!(
            "works once, until {}, for {}: ioplane identity join TOKEN. Whoever has it can be that host. `ioplane identity serve` has to run at {}",
            moment(report.until),
            report.name.as_deref().unwrap_or("a host of any name"),
            report.authority_at.join(", ")
        ));
        if report.name.is_none() && !ledger_knows_all {
            hint(
                "the authority is older than its ledger: whoever has this token also gets the name of a host whose certificate was issued before and not renewed since. --name HOST leaves no choice",
            );
        }
    }
    Ok(())
}

pub fn serve(directory: &IdentityDirectory, listen: SocketAddr, days: u32) -> Result<()> {
    // Signing is in the blocking threads, and the connections are few.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime =
        runtime.worker_threads(1).max_blocking_threads(4).enable_all().build().context("starting")?;
    let _entered = runtime.enter();
    let busy = |error| {
        usage(format!("listening on {listen}: {error}"), "is it an address of this host, and the port free?")
    };
    let listener = std::net::TcpListener::bind(listen).map_err(busy)?;
    let server = JoinServer::start(listener, directory.clone(), days).map_err(failed)?;
    let address = server.address();
    if !address.ip().is_unspecified() {
        directory.keep_places(&[address.to_string()]).map_err(refused)?;
    }
    tracing::info!(%address, "answering hosts that join, renew, or fetch the list of revoked certificates");
    // Until a signal ends the process: all that counts is in files.
    runtime.block_on(std::future::pending::<()>());
    Ok(())
}

pub fn join(directory: &IdentityDirectory, token: &str, name: Option<HostName>, replace: bool) -> Result<()> {
    let mut input = String::new();
    let text = match token {
        "-" => {
            std::io::stdin()
                .lock()
                .take(LONGEST_TOKEN)
                .read_to_string(&mut input)
                .context("standard input")?;
            &input
        }
        token => token,
    };
    let remedy = "ioplane identity token prints one, on the host with the authority";
    let token: JoinToken = text.parse().map_err(|error| usage(error, remedy))?;
    older(wait(ioplane_join::join(directory, &token, name, replace))?);
    keep(directory, &token.places)
}

pub fn renew(directory: &IdentityDirectory, days: Option<u32>, from: &[String]) -> Result<()> {
    let issues = directory.show().map_err(refused)?.issues;
    if issues && from.is_empty() {
        directory.renew(days.map_or_else(Validity::default, Validity::days)).map_err(refused)?;
        return Ok(());
    }
    if days.is_some() {
        return Err(usage("--days is for the host with the authority", "`identity serve` there decides"));
    }
    // Before anything is asked for: what has expired cannot be renewed wherever the authority is.
    directory.load_for_asking().map_err(refused)?;
    let remedy = "give --from HOST[:PORT], where `ioplane identity serve` runs; or: ioplane identity issue there, import here";
    let places = places(directory, from, remedy)?;
    older(wait(ioplane_join::renew(directory, &places))?);
    if !from.is_empty() {
        keep(directory, &places)?;
    }
    Ok(())
}

/// Says when the authority knows less of what is revoked than this host does: its files come from an old backup.
fn older(joined: Joined) {
    if let Some(why) = joined.older_list {
        hint(format!(
            "{why}. Was the authority restored from a backup? Revoke there again what it has forgotten"
        ));
    }
}

fn keep(directory: &IdentityDirectory, places: &[AuthorityPlace]) -> Result<()> {
    let places: Vec<_> = places.iter().map(ToString::to_string).collect();
    directory.keep_places(&places).map_err(refused)
}

/// Digits as people copy them.
fn digits(text: &str) -> String {
    text.chars().filter(|c| !matches!(c, ':' | ' ')).collect::<String>().to_ascii_lowercase()
}

pub fn revoke(
    directory: &IdentityDirectory,
    host: &HostName,
    fingerprint: Option<&str>,
    serial: Option<&str>,
    json: bool,
) -> Result<()> {
    let which = match (fingerprint, serial) {
        (Some(fingerprint), _) => Which::Fingerprint(digits(fingerprint)),
        (None, Some(serial)) => Which::Serial(digits(serial)),
        (None, None) => Which::All,
    };
    let Revoked { number, serials } = directory.revoke(host, &which).map_err(refused)?;
    let report = RevokedReport { host: host.to_string(), serials, revocation_list: number };
    print_done(json, &report, |report| match report.serials.len() {
        0 => format!("{}: revoked already, on list {}\n", report.host, report.revocation_list),
        1 => format!("{}: 1 certificate is revoked, on list {}\n", report.host, report.revocation_list),
        many => {
            format!("{}: {many} certificates are revoked, on list {}\n", report.host, report.revocation_list)
        }
    })?;
    if !json {
        hint(
            "these are the certificates that the authority's ledger knows. The daemon of this host takes the list within seconds; on each other host: ioplane identity revocations --fetch",
        );
    }
    Ok(())
}

pub fn revocations(
    directory: &IdentityDirectory,
    fetch: bool,
    from: &[String],
    import: Option<&Path>,
    json: bool,
) -> Result<()> {
    if fetch {
        directory.load_for_asking().map_err(refused)?;
        let remedy = "give --from HOST[:PORT], where `ioplane identity serve` runs; or copy revoked.pem and give --import FILE";
        let places = places(directory, from, remedy)?;
        wait(ioplane_join::fetch_revocations(directory, &places))?;
        if !from.is_empty() {
            keep(directory, &places)?;
        }
    }
    if let Some(file) = import {
        let text = file_text(file, LONGEST_LIST as u64)?;
        directory.take_revocations(file, &text).map_err(refused)?;
    }
    let list = directory.revocations().map_err(refused)?;
    let revoked = list.iter().flat_map(|list| list.revoked());
    let revoked = revoked.map(|(serial, at)| RevokedCertificate { serial: serial.to_owned(), at }).collect();
    let report = RevocationsReport { revocation_list: list.as_ref().map(|list| list.number()), revoked };
    print_done(json, &report, |report| {
        let Some(number) = report.revocation_list else { return "nothing is revoked\n".to_owned() };
        let mut text = format!("list {number}\n");
        for one in &report.revoked {
            text += &format!("  {}  {}\n", one.serial, moment(one.at));
        }
        text
    })
}
