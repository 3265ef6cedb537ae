//! `identity`: who this host is to other hosts. No daemon is needed; one that runs reads the files at each connection.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::args::{IdentityArgs, IdentityCommand};
use ioplane_cli::output::{CommandError, hint, print, print_done};
use ioplane_identity::{
    CertificateFacts, DEFAULT_DIRECTORY, HostName, IdentityDirectory, IdentityError, Shown, Validity, moment,
};
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
                hint(format!("it ends in {} days: renew it", report.host.days_left));
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
        IdentityCommand::Renew { days } => {
            directory.renew(Validity::days(*days)).map_err(refused)?;
            changed(&directory, json)?;
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
    Ok(IdentityReport { directory: path, host, authority, issues, problem })
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
    text.extend(report.problem.as_ref().map(|problem| format!("CANNOT BE USED: {problem}\n")));
    text
}

fn refused(error: IdentityError) -> anyhow::Error {
    let code = match &error {
        IdentityError::Missing { .. } => Code::NotFound,
        IdentityError::Exists { .. } => Code::Exists,
        IdentityError::WrongHost { .. } | IdentityError::WrongAuthority { .. } => Code::Conflict,
        _ => Code::CommandFailed,
    };
    let remedy = match &error {
        IdentityError::Missing { what: "authority", .. } => {
            "on the host with the authority: ioplane identity issue HOST --out FILE; here: ioplane identity import FILE"
        }
        IdentityError::Missing { .. } => {
            "ioplane identity create NAME makes an authority, and this host's identity; import FILE takes one from another host"
        }
        IdentityError::Permissions { .. } => "chown root and chmod go= it, if nobody else has read it",
        IdentityError::WrongHost { .. } | IdentityError::WrongAuthority { .. } => {
            "give --replace if this host is to be that one from now on"
        }
        _ => "",
    };
    CommandError::new(code, error.to_string(), remedy).into()
}
