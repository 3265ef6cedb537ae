//! Authorities, hosts, and what two of them make of each other over TLS.
#![allow(dead_code)]

use std::path::Path;

use ioplane_identity::{HostIdentity, HostName, IdentityDirectory, TlsFault, Validity};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

pub fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

/// In a folder with an authority, that of `host-a`.
pub fn authority(folder: &Path) -> IdentityDirectory {
    let directory = IdentityDirectory::new(folder.join("a"));
    directory.create(&name("host-a"), Validity::default()).unwrap();
    directory
}

/// The identity of another host, in a directory of its own.
pub fn issued(authority: &IdentityDirectory, folder: &Path, host: &str) -> IdentityDirectory {
    std::fs::create_dir_all(folder).unwrap();
    let (file, directory) = (folder.join(format!("{host}.pem")), IdentityDirectory::new(folder.join(host)));
    authority.issue(&name(host), Validity::default(), &file).unwrap();
    assert_eq!(directory.import(&file, false).unwrap(), name(host));
    directory
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// What both sides make of it, the client first: each goes on until it has ended or has nothing more to say.
pub fn shake(
    client: std::sync::Arc<ClientConfig>,
    server: std::sync::Arc<ServerConfig>,
    wanted: &str,
) -> (Option<TlsFault>, Option<TlsFault>) {
    let wanted = ServerName::try_from(wanted.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, wanted).unwrap();
    let mut server = ServerConnection::new(server).unwrap();
    let (mut of_client, mut of_server) = (None, None);
    loop {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        while client.wants_write() {
            client.write_tls(&mut there).unwrap();
        }
        let mut input = &there[..];
        while !input.is_empty() && of_server.is_none() {
            server.read_tls(&mut input).unwrap();
            of_server = server.process_new_packets().err().map(|error| TlsFault::from(&error));
        }
        while server.wants_write() {
            server.write_tls(&mut back).unwrap();
        }
        let mut input = &back[..];
        while !input.is_empty() && of_client.is_none() {
            client.read_tls(&mut input).unwrap();
            of_client = client.process_new_packets().err().map(|error| TlsFault::from(&error));
        }
        if there.is_empty() && back.is_empty() {
            return (of_client, of_server);
        }
    }
}

pub fn both(
    client: &HostIdentity,
    server: &HostIdentity,
    wanted: &str,
) -> (Option<TlsFault>, Option<TlsFault>) {
    shake(client.client(), server.server(), wanted)
}
