//! `identity`: who this host is to other hosts. No daemon is needed; one that runs reads the files at each connection.

mod joining;

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::args::{IdentityArgs, IdentityCommand};
use ioplane_cli::output::{CommandError, hint, print, print_done};
use ioplane_identity::{
    CertificateFacts, DEFAULT_DIRECTORY, HostName, IdentityDirectory, IdentityError, Shown, Validity, moment,
};
use joining::TokenArgs;
use serde::Serialize;

/// So many days before its end a certificate is to be renewed.
const SOON: i64 = 30;

/// One certificate.
#[derive(Debug, Serialize)]
struct CertificateReport {
    name: String,
    /// SHA-256.
    fingerprint: String,
    serial: String,
    /// Seconds since 1970.
    not_before: i64,
    not_after: i64,
    days_left: i64,
}

/// What is in a directory.
#[derive(Debug, Serialize)]
struct IdentityReport {
    directory: String,
    host: CertificateReport,
    authority: CertificateReport,
    /// This host issues identities.
    issues: bool,
    /// Where the authority answers, as far as this host knows.
    authority_at: Vec<String>,
    /// The list of revoked certificates that counts here.
    revocation_list: Option<u64>,
    /// Why it cannot be used.
    problem: Option<String>,
}

/// What `issue` has written.
#[derive(Debug, Serialize)]
struct IssuedReport {
    host: String,
    file: String,
}

/// What `export` has written.
#[derive(Debug, Serialize)]
struct ExportedReport {
    directory: String,
}

impl From<CertificateFacts> for CertificateReport {
    fn from(facts: CertificateFacts) -> Self {
        let CertificateFacts { name, fingerprint, serial, not_before, not_after } = facts;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
        let days_left = (not_after - now).div_euclid(24 * 3600);
        CertificateReport { name, fingerprint, serial, not_before, not_after, days_left }
    }
}

/// Does what was typed.
pub fn run(args: &IdentityArgs, json: bool) -> Result<ExitCode> {
    let directory = IdentityDirectory::new(args.dir.clone().unwrap_or_else(|| DEFAULT_DIRECTORY.into()));
    match &args.command {
        IdentityCommand::Create { name, days } => {
            directory.create(&host(name)?, Validity::days(*days)).map_err(refused)?;
            changed(&directory, json)?;
        }
        IdentityCommand::Show => {
            let report = report(&directory)?;
            print(json, &report, text)?;
            if report.problem.is_some() {
                return Ok(ExitCode::FAILURE);
            }
            if report.host.days_left < SOON && !json {
                hint(format!("it ends in {} days: renew it: {}", report.host.days_left, how(&report)));
            }
        }
        IdentityCommand::Issue { host: name, out, days } => {
            let name = host(name)?;
            directory.issue(&name, Validity::days(*days), out).map_err(refused)?;
            let report = IssuedReport { host: name.to_string(), file: out.display().to_string() };
            print_done(json, &report, |report| {
                format!(
                    "{}: the identity of {}. Whoever has this file is that host: copy it there by ssh, import it, and remove it\n",
                    report.file, report.host
                )
            })?;
        }
        IdentityCommand::Import { file, replace } => {
            directory.import(file, *replace).map_err(refused)?;
            changed(&directory, json)?;
        }
        IdentityCommand::Renew { days, from } => {
            joining::renew(&directory, *days, from)?;
            changed(&directory, json)?;
        }
        IdentityCommand::Token { name, valid, at, days, replace } => {
            let name = name.as_deref().map(host).transpose()?;
            joining::token(
                &directory,
                TokenArgs { name, valid: *valid, at, days: *days, replace: *replace },
                json,
            )?;
        }
        IdentityCommand::Serve { listen, days, log } => {
            crate::log::start(log)?;
            joining::serve(&directory, *listen, *days)?;
        }
        IdentityCommand::Join { token, name, replace } => {
            joining::join(&directory, token, name.as_deref().map(host).transpose()?, *replace)?;
            changed(&directory, json)?;
        }
        IdentityCommand::Revoke { host: name, fingerprint, serial } => {
            joining::revoke(&directory, &host(name)?, fingerprint.as_deref(), serial.as_deref(), json)?;
        }
        IdentityCommand::Revocations { fetch, from, import } => {
            joining::revocations(&directory, *fetch, from, import.as_deref(), json)?;
        }
        IdentityCommand::Export { to } => {
            directory.export(to).map_err(refused)?;
            let report = ExportedReport { directory: to.display().to_string() };
            print_done(json, &report, |report| {
                format!(
                    "{}: copies of this host's identity. They are not renewed with it\n",
                    report.directory
                )
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn host(name: &str) -> Result<HostName> {
    name.parse().map_err(|error: IdentityError| CommandError::new(Code::Usage, error.to_string(), "").into())
}

fn report(directory: &IdentityDirectory) -> Result<IdentityReport> {
    let Shown { host, authority, issues, problem } = directory.show().map_err(refused)?;
    let (path, host, authority) = (directory.path().display().to_string(), host.into(), authority.into());
    // One that cannot be used is a problem already.
    let revocation_list = directory.revocations().ok().flatten().map(|list| list.number());
    let authority_at = directory.places();
    Ok(IdentityReport { directory: path, host, authority, issues, authority_at, revocation_list, problem })
}

/// Prints what a change has made.
fn changed(directory: &IdentityDirectory, json: bool) -> Result<()> {
    print_done(json, &report(directory)?, text)
}

fn text(report: &IdentityReport) -> String {
    let of = |what: &str, certificate: &CertificateReport| {
        format!(
            "{what}{}\n  fingerprint  {}\n  valid        {} to {} ({} days left)\n",
            certificate.name,
            certificate.fingerprint,
            moment(certificate.not_before),
            moment(certificate.not_after),
            certificate.days_left
        )
    };
    let mut text = of("", &report.host) + &of("authority: ", &report.authority);
    text += if report.issues { "  identities are issued by this host\n" } else { "" };
    text.extend(report.revocation_list.map(|number| format!("  revocation list {number} counts here\n")));
    text += &format!("renew: {}\n", how(report));
    text.extend(report.problem.as_ref().map(|problem| format!("CANNOT BE USED: {problem}\n")));
    text
}

/// How this host's certificate is renewed.
fn how(report: &IdentityReport) -> String {
    match (report.issues, report.authority_at.is_empty()) {
        (true, _) => "ioplane identity renew".to_owned(),
        (false, false) => format!("ioplane identity renew (asks {})", report.authority_at.join(", ")),
        (false, true) => {
            "ioplane identity renew --from HOST, where the authority's host runs `ioplane identity serve`"
                .to_owned()
        }
    }
}

fn refused(error: IdentityError) -> anyhow::Error {
    let code = match &error {
        IdentityError::Missing { .. } => Code::NotFound,
        IdentityError::Exists { .. } => Code::Exists,
        IdentityError::WrongHost { .. }
        | IdentityError::WrongAuthority { .. }
        | IdentityError::Refused(_)
        | IdentityError::OwnCertificate
        | IdentityError::OlderRevocationList { .. } => Code::Conflict,
        IdentityError::UnknownCertificate { .. } => Code::NotFound,
        _ => Code::CommandFailed,
    };
    let remedy = match &error {
        IdentityError::Missing { what: "authority", .. } => "this is done on the host with the authority",
        IdentityError::Missing { .. } => {
            "ioplane identity create NAME makes an authority, and this host's identity; join TOKEN gets one from another host's authority"
        }
        IdentityError::Expired { .. } | IdentityError::Revoked { .. } => {
            "join again: ioplane identity token on the host with the authority, ioplane identity join TOKEN here"
        }
        IdentityError::UnknownCertificate { .. } => {
            "ioplane identity show there says both; with --serial one is revoked that was issued before there was a ledger"
        }
        IdentityError::Permissions { .. } => "chown root and chmod go= it, if nobody else has read it",
        IdentityError::WrongHost { .. } | IdentityError::WrongAuthority { .. } => {
            "give --replace if this host is to be that one from now on"
        }
        _ => "",
    };
    CommandError::new(code, error.to_string(), remedy).into()
}
