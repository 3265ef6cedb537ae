//! `switch`, `nic` and `capture`.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::Method;
use ioplane_api::report::{DoneReport, NicReport, SwitchReport, SwitchTableReport};
use ioplane_api::spec::{NicChangeForm, NicForm};

use super::{address_of, ask, get, put, seen, show, working};
use crate::args::{CaptureArgs, NicCommand, SwitchCommand};
use crate::client::Client;
use crate::output::{hint, print, print_done, print_json};
use crate::pcapng::Follower;

fn done(done: &DoneReport) -> String {
    done.done.join("\n") + "\n"
}

pub fn switch(client: &Client, command: SwitchCommand, json: bool) -> Result<()> {
    let address = |name: &str| address_of("switches", name);
    match command {
        SwitchCommand::Add { name, form } => {
            let switch: SwitchTableReport = ask(client, Method::PUT, &address(&name), Some(&form))?;
            print_done(json, &switch, |switch| show::switches(std::slice::from_ref(&switch.switch)))
        }
        SwitchCommand::Remove { name } => {
            let report: DoneReport = ask(client, Method::DELETE, &address(&name), None::<&()>)?;
            print_done(json, &report, done)
        }
        SwitchCommand::List => {
            let switches: Vec<SwitchReport> = get(client, "/v1/switches")?;
            print(json, &switches, |switches| show::switches(switches))
        }
        SwitchCommand::Show { name } => {
            let switch: SwitchTableReport = get(client, &address(&name))?;
            print(json, &switch, show::switch)
        }
    }
}

pub fn nic(client: &Client, command: NicCommand, json: bool) -> Result<()> {
    let address = |name: &str| address_of("nics", name);
    let one = |nic: &NicReport| show::nics(std::slice::from_ref(nic));
    match command {
        NicCommand::Add(add) => {
            let (path, form) = (address(&add.name), NicForm { socket: seen(add.form.socket)?, ..add.form });
            let nic: NicReport = put(client, &path, &form, ("nic", &add.name))?;
            print_done(json, &nic, one)
        }
        NicCommand::Remove { name, force } => {
            let path = format!("{}?force={force}", address(&name));
            let report: DoneReport =
                working("waiting for frames to end", || ask(client, Method::DELETE, &path, None::<&()>))?;
            print_done(json, &report, done)
        }
        NicCommand::List => {
            let nics: Vec<NicReport> = get(client, "/v1/nics")?;
            print(json, &nics, |nics| show::nics(nics))
        }
        NicCommand::Show { name } => {
            let nic: NicReport = get(client, &address(&name))?;
            print(json, &nic, show::nic)
        }
        NicCommand::Set { name, change } => {
            let only_limits = NicChangeForm { link: None, group: None, ..change.clone() };
            let limits = only_limits != NicChangeForm::default();
            let group = |nic: &NicReport| change.group.as_ref().map(|_| show::group_of(nic.group.as_deref()));
            let nic: NicReport = ask(client, Method::PATCH, &address(&name), Some(&change))?;
            print_done(json, &nic, |nic| {
                one(nic) + &show::nic_limits(nic, limits) + &group(nic).unwrap_or_default()
            })
        }
    }
}

#[derive(serde::Serialize)]
struct CaptureReport {
    frames: u64,
    lost: u64,
}

/// Writes a capture until a limit or an interrupt; the file holds whole blocks, however it ends.
pub fn capture(client: &Client, args: &CaptureArgs, json: bool) -> Result<()> {
    let pipe = args.file == Path::new("-");
    let path = format!("{}/capture?snaplen={}", address_of("ports", &args.name), args.snaplen);
    let mut follower = Follower::default();
    let mut file: Option<Box<dyn Write>> = None;
    let open = || -> Result<Box<dyn Write>> {
        if pipe {
            return Ok(Box::new(std::io::stdout()));
        }
        let file = std::fs::File::create(&args.file);
        Ok(Box::new(file.with_context(|| format!("write {}", args.file.display()))?))
    };
    let limit = args.limit.unwrap_or(Duration::MAX);
    client.stream(&path, limit, |bytes| {
        if file.is_none() {
            // Not before the daemon has agreed: a refusal leaves a file that was there as it was.
            file = Some(open()?);
            if std::io::stderr().is_terminal() && args.limit.is_none() {
                hint(format_args!("capturing {}; Ctrl-C ends it", args.name));
            }
        }
        let Some(file) = &mut file else { return Ok(false) };
        let mut written = Ok(());
        let more = follower.take(bytes, |block, sum| {
            written = file.write_all(block);
            written.is_ok() && args.count.is_none_or(|count| sum.frames < count)
        })?;
        match written {
            // Whoever reads the pipe has seen enough.
            Err(error) if pipe && error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(false),
            written => written.with_context(|| format!("write {}", args.file.display()))?,
        }
        file.flush()?;
        Ok(more)
    })?;
    let Follower { frames, lost, .. } = follower;
    if json && !pipe {
        return print_json(&CaptureReport { frames, lost });
    }
    hint(format_args!("{frames} frames captured"));
    if lost > 0 {
        hint(format_args!("{lost} more came too fast to be kept: a smaller --snaplen leaves room for more"));
    }
    Ok(())
}
