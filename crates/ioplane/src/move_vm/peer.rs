//! How the other daemon and its QEMU are reached: by sockets that somebody forwards, or by the certificates of both hosts, which the daemon here relays to
//! sockets of its own.

use std::path::PathBuf;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DoneReport, ExpectedReport, MovePeerReport};
use ioplane_api::request::{MoveNoteForm, MovePeerForm};
use ioplane_cli::args::{MoveVm, There};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::{CommandError, hint};
use ioplane_plain::shown;

use super::{STEP, refused};

/// How they are reached. Dropped, the daemon here relays no further connection.
pub(super) struct Reached<'a> {
    client: &'a Client,
    vm: &'a str,
    /// The host, if it is reached by its certificate.
    pub form: Option<MovePeerForm>,
    /// The control socket of the daemon there.
    pub there: Option<PathBuf>,
    /// The monitor of the QEMU there.
    pub qmp_there: Option<PathBuf>,
}

fn path(vm: &str) -> String {
    format!("/v1/moves/{vm}/peer")
}

impl<'a> Reached<'a> {
    /// As is said for a move; a VM with PCI functions needs it, and finds the other daemon at the host where its memory goes.
    pub fn of(client: &'a Client, args: &'a MoveVm, needed: bool) -> Result<Reached<'a>> {
        let MoveVm { name, to, there, tls_hostname, qmp_there, .. } = args;
        let host = match (there, &to.host) {
            (Some(There::Socket(socket)), _) => {
                return Ok(Reached {
                    client,
                    vm: name,
                    form: None,
                    there: Some(socket.clone()),
                    qmp_there: qmp_there.clone(),
                });
            }
            (Some(There::Host { .. }), _) if qmp_there.is_some() => {
                let error =
                    "--qmp-there goes with the control socket of the daemon there, and --there is a host";
                let remedy =
                    "leave it out: the monitor is the one that `ioplane move expect` has named there";
                return Err(CommandError::new(Code::Usage, error, remedy).into());
            }
            (Some(There::Host { host, port }), _) => Some((host.clone(), *port)),
            (None, Some(host)) if needed && qmp_there.is_none() => Some((host.clone(), None)),
            (None, _) => None,
        };
        match host {
            Some((host, port)) => {
                let form = MovePeerForm { host, port, tls_hostname: tls_hostname.clone() };
                Reached::by_certificate(client, name, form)
            }
            None => Ok(Reached { client, vm: name, form: None, there: None, qmp_there: qmp_there.clone() }),
        }
    }

    /// As is written down of a move that was broken off.
    pub fn again(client: &'a Client, vm: &'a str, note: &MoveNoteForm) -> Result<Reached<'a>> {
        match &note.peer {
            Some(form) => Reached::by_certificate(client, vm, form.clone()),
            None => {
                let (there, qmp_there) = (Some(note.there.clone()), Some(note.qmp_there.clone()));
                Ok(Reached { client, vm, form: None, there, qmp_there })
            }
        }
    }

    fn by_certificate(client: &'a Client, vm: &'a str, form: MovePeerForm) -> Result<Reached<'a>> {
        let MovePeerReport { there, qmp_there } = client.ask(Method::PUT, &path(vm), Some(&form))?;
        Ok(Reached { client, vm, form: Some(form), there: Some(there), qmp_there: Some(qmp_there) })
    }

    /// The host, if it is reached by its certificate.
    pub fn host(&self) -> Option<&str> {
        self.form.as_ref().map(|form| form.host.as_str())
    }

    /// The daemon there, if it is reached.
    pub fn daemon(&self) -> Result<Option<Client>> {
        let client = self.there.as_deref().map(Client::new).transpose()?;
        // A TLS handshake for each step would take of the time in which the guest stands still.
        Ok(client.map(|there| there.with_patience(STEP)).map(|there| match self.form {
            Some(_) => there.keeping(),
            None => there,
        }))
    }

    /// Whether the other host expects a VM whose QEMU is started only within the migration: where the monitor of that will be there.
    pub fn expects_later(&self, there: &Client) -> Result<()> {
        let Some(host) = self.host() else { return Ok(()) };
        let all: Vec<ExpectedReport> = there.get("/v1/expected")?;
        let Some(one) = all.first().filter(|one| one.libvirt) else {
            let vm = self.vm;
            return Err(refused(
                format!("{host} expects VM {vm} with a QEMU that waits already"),
                format!(
                    "there: ioplane move unexpect {vm}, then ioplane move expect {vm} --libvirt --from THIS-HOST --qmp SOCKET"
                ),
            ));
        };
        hint(format!("{host} expects VM {}: the monitor of its QEMU there is {}", one.vm, shown(&one.qmp)));
        Ok(())
    }

    /// The move has come to its end there: the VM is not expected any more.
    pub fn settled(&self, there: &Client) {
        if self.form.is_none() {
            return;
        }
        let path = format!("/v1/expected/{}", self.vm);
        if let Err(error) = there.ask::<DoneReport>(Method::DELETE, &path, None::<&()>) {
            hint(format!(
                "the other host was not told that all is done, and lets this one look at VM {0} until the time is over: {error:#}; `ioplane move unexpect {0}` there",
                self.vm
            ));
        }
    }
}

impl Drop for Reached<'_> {
    fn drop(&mut self) {
        if self.form.is_some() {
            // What stays does no harm: nobody connects to it.
            let _ = self.client.ask::<DoneReport>(Method::DELETE, &path(self.vm), None::<&()>);
        }
    }
}
