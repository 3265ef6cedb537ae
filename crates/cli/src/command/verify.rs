//! `verify`.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use hyper::Method;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, VerifyReport, VerifyWord};
use ioplane_api::request::VerifyForm;
use ioplane_api::size::Size;

use super::follow::{LongWork, follow};
use super::{absolute, address, ask, working};
use crate::args::{VerifyArgs, VerifyTarget};
use crate::client::Client;
use crate::output::{CommandError, complain, hint, print};
use crate::progress::interrupted;

/// The copies differ.
const DIFFERENT: u8 = 1;
/// Whether they do is not known.
const FAILED: u8 = 2;

/// As `cmp` exits: 0 if both are equal, 1 if they differ, 2 if that is not known.
pub fn run(client: impl FnOnce() -> Result<Client>, args: VerifyArgs, json: bool) -> ExitCode {
    let state = client().and_then(|client| verify(&client, args, json));
    match state {
        Ok(VerifyWord::Different) => ExitCode::from(DIFFERENT),
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error, json);
            ExitCode::from(FAILED)
        }
    }
}

fn verify(client: &Client, args: VerifyArgs, json: bool) -> Result<VerifyWord> {
    let path = format!("{}/verify", address(&args.name));
    let cancel = || -> Result<DiskReport> {
        working("waiting for a quiet moment", || ask(client, Method::DELETE, &path, None::<&()>))
    };
    if args.cancel || args.detach {
        let disk = match args.cancel {
            true => cancel()?,
            false => begin(client, &path, &args)?,
        };
        let verify = verify_of(&disk)?;
        print(json, &verify, |verify| verify.words() + "\n")?;
        // Nobody has asked for the result.
        return Ok(VerifyWord::Equal);
    }
    let interrupted: Arc<_> = interrupted()?;
    begin(client, &path, &args)?;
    let verify: VerifyReport = follow(client, &args.name, &interrupted, &cancel)?;
    match verify.state {
        VerifyWord::Failed => {
            let remedy = verify.remedy.clone().unwrap_or_default();
            Err(CommandError::new(Code::Failed, verify.words(), remedy).into())
        }
        VerifyWord::Cancelled => {
            let found = match verify.different {
                0 => "nothing was different up to there",
                _ => "something was different up to there: see `ioplane disk show`",
            };
            Err(CommandError::new(Code::Conflict, verify.words(), found).into())
        }
        state => {
            print(json, &verify, text)?;
            if verify.written > 0 && !json {
                hint(
                    "what the guest wrote meanwhile and differs is not counted as different; to have all of it compared, stop the guest",
                );
            }
            Ok(state)
        }
    }
}

fn begin(client: &Client, path: &str, args: &VerifyArgs) -> Result<DiskReport> {
    let mut form = VerifyForm { rate: args.rate, ..VerifyForm::default() };
    match &args.with {
        Some(VerifyTarget::Path(path)) => form.path = Some(absolute(path)?),
        Some(VerifyTarget::Remote(uri)) => form.remote = Some(uri.clone()),
        None => {}
    }
    working("opening the other copy", || ask(client, Method::POST, path, Some(&form)))
}

/// What a report says of the last comparison.
fn verify_of(disk: &DiskReport) -> Result<VerifyReport> {
    let none =
        || CommandError::new(Code::BadAnswer, "the daemon tells of no comparison", "is it another version?");
    Ok(disk.verify.clone().ok_or_else(none)?)
}

fn text(verify: &VerifyReport) -> String {
    let mut text = verify.words() + "\n";
    for range in &verify.first {
        text += &format!("  {} bytes at {} ({})\n", range.len, range.offset, Size(range.offset));
    }
    let told = verify.first.len() as u64;
    if verify.ranges > told {
        text += &format!("  and {} ranges more\n", verify.ranges - told);
    }
    text
}

impl LongWork for VerifyReport {
    fn of(disk: &DiskReport) -> Result<Self> {
        verify_of(disk)
    }

    fn is_under_way(&self) -> bool {
        self.state.is_under_way()
    }

    fn progress(&self) -> (u64, u64, String) {
        let beside = format!("{}/s, different {}", Size(self.bytes_per_s), Size(self.different));
        (self.compared, self.bytes.min(self.other_bytes), beside)
    }
}
