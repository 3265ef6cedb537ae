//! Exports and imports with TLS, with each other and with other people's programs.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ioplane_cores::Notify;
use ioplane_identity::{HostName, IdentityDirectory, IdentityError, TlsFault, Validity};
use ioplane_memory::GuestRange;
use ioplane_nbd::NbdError;
use ioplane_nbd::export::ExportOptions;
use ioplane_nbd::import::{AtStart, Import, ImportOptions, Unfenced};
use ioplane_storage::{Backing, MemoryBacking, Op, Submitted, Tag};
use rig::Rig;
use support::listener::Listening;
use support::pattern;
use support::relay::{Way, relay, straight};

const SIZE: usize = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

/// An authority and the identity of `localhost`, which programs of others ask for as well.
fn authority(folder: &Path) -> IdentityDirectory {
    let directory = IdentityDirectory::new(folder.join("a"));
    directory.create(&name("localhost"), Validity::default()).unwrap();
    directory
}

fn member(authority: &IdentityDirectory, folder: &Path, host: &str) -> IdentityDirectory {
    let (file, directory) = (folder.join(format!("{host}.pem")), IdentityDirectory::new(folder.join(host)));
    authority.issue(&name(host), Validity::default(), &file).unwrap();
    directory.import(&file, false).unwrap();
    directory
}

fn exported(identity: &IdentityDirectory, notify: Notify) -> Listening {
    let backing: Arc<dyn Backing> = MemoryBacking::new(SIZE as u64).unwrap();
    Listening::with(backing, ExportOptions::default(), notify, Some(identity.clone()))
}

fn options(port: u16, identity: &IdentityDirectory) -> ImportOptions {
    let address = format!("nbds://127.0.0.1:{port}/disk?tls-hostname=localhost");
    ImportOptions {
        identity: identity.clone(),
        dead_after: Duration::from_secs(60),
        connect_timeout: Duration::from_secs(60),
        retry: (Duration::from_millis(5), Duration::from_millis(50)),
        unfenced: Unfenced::Replay,
        ..ImportOptions::new(address.parse().unwrap())
    }
}

fn refused(options: ImportOptions) -> NbdError {
    match scripted::runtime().block_on(Import::open(options)) {
        Ok(_) => panic!("it is let in"),
        Err(error) => error,
    }
}

#[test]
fn a_disk_with_tls_is_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let b = member(&a, folder.path(), "host-b");
    for notify in [Notify::Notified, Notify::Polled] {
        let listening = exported(&a, notify);
        let import = scripted::import(options(listening.address.port(), &b));
        let mut rig = Rig::new(&*import, 16);
        // More than the buffers of a relay hold, in one request and in many.
        for (offset, len) in [(0, 4096), (4096, 300 << 10), (1 << 20, 512), (2 << 20, 300 << 10)] {
            let bytes = pattern(offset, len, 0);
            rig.write(offset, &bytes).unwrap();
            assert!(rig.read(offset, len as u32).unwrap() == bytes, "{len} bytes at {offset}");
        }
        rig.run(&Op::Flush).unwrap();
        let into = [GuestRange { gpa: 0, len: 64 << 10 }];
        for tag in 0..16 {
            let offset = u64::from(tag) * (64 << 10);
            assert_eq!(rig.submit(&Op::Read { offset, into: &into }, Tag(tag)), Submitted::Pending);
        }
        rig.push();
        assert!(rig.finish().iter().all(|(_, outcome)| outcome.is_ok()));
        assert_eq!(import.status().connections[0].losses, 0);
        drop(rig);
        // The server has closed its end, and so has the relay.
        assert!(import.wait_quiet(std::time::Instant::now() + PATIENCE));
        assert!(listening.refused.try_recv().is_err());
    }
}

#[test]
fn whoever_has_no_right_certificate_is_told_why() {
    let [folder, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let a = authority(folder.path());
    let b = member(&a, folder.path(), "host-b");
    let listening = exported(&a, Notify::Notified);
    let port = listening.address.port();
    let said = || listening.refused.recv_timeout(PATIENCE).unwrap();

    // A client that takes the server for another host.
    let address = format!("nbds://127.0.0.1:{port}/disk?tls-hostname=host-c").parse().unwrap();
    let error = refused(ImportOptions { address, ..options(port, &b) });
    assert!(
        matches!(&error, NbdError::Tls(TlsFault::WrongHost(which)) if which.contains("host-c")),
        "{error}"
    );
    assert!(said().contains("it is for another host"));
    // One of another authority: it sees first that the server is foreign.
    let foreign = authority(other.path());
    let error = refused(options(port, &foreign));
    assert!(matches!(error, NbdError::Tls(TlsFault::WrongAuthority)), "{error}");
    assert!(said().contains("it is of another authority"));
    // One that trusts the right authority and shows a certificate of another: only the server can see that.
    let shown = mix(folder.path(), other.path());
    let error = tls_only(&listening, shown);
    assert_eq!(error, TlsFault::Refused("it is of another authority than the peer's"));
    let why = said();
    assert!(why.contains("of another authority"), "{why}");
    // One without an identity does not even connect.
    let nobody = IdentityDirectory::new(folder.path().join("nobody"));
    let error = refused(options(port, &nobody));
    assert!(matches!(error, NbdError::Identity(IdentityError::Missing { .. })), "{error}");
    said_nothing_more_than_an_end(&listening);
    // In plain text nothing is told.
    let address = format!("nbd://127.0.0.1:{port}/disk").parse().unwrap();
    let error = refused(ImportOptions { address, ..options(port, &b) });
    assert!(matches!(error, NbdError::TlsRequired), "{error}");
    // And after all that the right one is served.
    let import = scripted::import(options(port, &b));
    assert_eq!(import.info().bytes, SIZE as u64);
}

/// A client that ends by itself in the handshake is an error of the handshake, or none.
fn said_nothing_more_than_an_end(listening: &Listening) {
    while let Ok(why) = listening.refused.try_recv() {
        assert!(!why.contains("certificate"), "{why}");
    }
}

/// A client's configuration: the authority of one folder is trusted, the certificate of another one is shown.
fn mix(trusted: &Path, shown: &Path) -> rustls::ClientConfig {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificates = |folder: &Path| -> Vec<CertificateDer<'static>> {
        let text = std::fs::read(folder.join("a/host.pem")).unwrap();
        CertificateDer::pem_slice_iter(&text).map(Result::unwrap).collect()
    };
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificates(trusted)[1].clone()).unwrap();
    let key = PrivateKeyDer::from_pem_file(shown.join("a/host.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots);
    config.with_client_auth_cert(vec![certificates(shown)[0].clone()], key).unwrap()
}

/// What comes of TLS with an export, by hand: the greeting, STARTTLS, its answer, then TLS until an error.
fn tls_only(listening: &Listening, config: rustls::ClientConfig) -> TlsFault {
    let mut stream = TcpStream::connect(listening.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(&[&b"IHAVEOPT"[..], &5u32.to_be_bytes(), &0u32.to_be_bytes()].concat()).unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    let server = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), server).unwrap();
    let mut tls = rustls::Stream::new(&mut connection, &mut stream);
    let error = loop {
        if let Err(error) = tls.read(&mut [0; 16]) {
            break error;
        }
    };
    TlsFault::of(&error).unwrap_or_else(|| panic!("{error}"))
}

/// An identity that is too old is not shown to anybody.
#[test]
fn an_identity_of_another_time_is_refused_by_its_own_host() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let listening = exported(&a, Notify::Notified);
    for (host, days, expired) in [("old", -10, true), ("young", 10, false)] {
        let at = time::OffsetDateTime::now_utc() + time::Duration::days(days);
        let validity = Validity { from: at - time::Duration::hours(1), until: at + time::Duration::hours(1) };
        let b = member(&a, folder.path(), host);
        let file = folder.path().join(format!("{host}-other.pem"));
        a.issue(&name(host), validity, &file).unwrap();
        std::fs::rename(file, b.path().join("host.pem")).unwrap();
        let error = refused(options(listening.address.port(), &b));
        let named = match &error {
            NbdError::Identity(IdentityError::Expired { .. }) => expired,
            NbdError::Identity(IdentityError::NotYetValid { .. }) => !expired,
            _ => false,
        };
        assert!(named, "{host}: {error}");
    }
}

/// Passes bytes between a client and the server, until they are cut off in the middle.
struct Cutter {
    port: u16,
    cuts: Arc<AtomicUsize>,
}

/// Each connection is cut after so many bytes of the client's, in turn.
const CUTS: [usize; 6] = [40_000, 90_000, 150_000, 61, 200_000, usize::MAX];

impl Cutter {
    fn new(server: u16) -> Cutter {
        let cuts = Arc::<AtomicUsize>::default();
        let counted = cuts.clone();
        let ways = move || -> [Way; 2] {
            let mut left = CUTS[counted.fetch_add(1, Ordering::Relaxed).min(CUTS.len() - 1)];
            let cut = move |bytes: &mut [u8]| {
                let passed = bytes.len().min(left);
                left -= passed;
                // Fewer than came, also where the cut is behind the last one.
                Some(if left == 0 { passed.saturating_sub(1) } else { passed })
            };
            [Box::new(cut), straight()]
        };
        Cutter { port: relay(move || server, ways), cuts }
    }
}

/// A connection that is cut in the middle of a record is a network failure, and nothing is lost or carried out twice.
#[test]
fn connections_that_are_cut_are_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let listening = exported(&a, Notify::Notified);
    let cutter = Cutter::new(listening.address.port());
    // The first connection may be cut in the handshake of TLS, too.
    let import = scripted::import(ImportOptions { at_start: AtStart::Wait, ..options(cutter.port, &a) });
    let mut rig = Rig::new(&*import, 4);
    for round in 0..40 {
        let (offset, bytes) = (round * (32 << 10), pattern(round * 64, 32 << 10, 0));
        rig.write(offset, &bytes).unwrap();
        assert!(rig.read(offset, 32 << 10).unwrap() == bytes, "round {round}");
    }
    assert!(cutter.cuts.load(Ordering::Relaxed) >= CUTS.len(), "the test cuts too late");
    assert!(import.status().connections[0].losses > 0);
}

/// Passes bytes on, a few at a time and never many on the way, in both directions.
fn narrow(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Sockets that it accepts have it, too.
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
    let port = listener.local_addr().unwrap().port();
    let pass = |mut from: TcpStream, mut to: TcpStream| {
        let mut buffer = [0; 5000];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..bytes]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    };
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
            rustix::net::sockopt::set_socket_recv_buffer_size(&server, 16 << 10).unwrap();
            let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || pass(from, to));
            std::thread::spawn(move || pass(server, client));
        }
    });
    port
}

/// Has this process's connections to the first and at the second of these ports keep next to nothing that they have yet to send.
fn shrink(ports: [u16; 2]) {
    use rustix::net::{SocketAddrAny, getpeername, getsockname};
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let mut shrunk = [0; 2];
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number = entry.unwrap().file_name().to_string_lossy().parse().unwrap();
        let Ok(socket) = pidfd_getfd(&own, number, PidfdGetfdFlags::empty()) else { continue };
        let port = |address: SocketAddrAny| SocketAddr::try_from(address).ok().map(|address| address.port());
        // Listeners have no peer. What passes bytes between the two may keep as many as it likes.
        let (Ok(Some(peer)), Ok(local)) = (getpeername(&socket), getsockname(&socket)) else { continue };
        for (place, at) in [port(peer), port(local)].into_iter().enumerate() {
            if at == Some(ports[place]) {
                rustix::net::sockopt::set_socket_send_buffer_size(&socket, 4096).unwrap();
                shrunk[place] += 1;
            }
        }
    }
    assert!(shrunk[0] > 0 && shrunk[1] > 0, "{shrunk:?} sockets");
}

/// Neither side's socket takes what it has to send: what TLS has sealed waits, and goes out when there is room, also if it is the last of all.
#[test]
fn a_narrow_network_holds_up_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    for notify in [Notify::Notified, Notify::Polled] {
        let listening = exported(&a, notify);
        let port = narrow(listening.address.port());
        let import = scripted::import(options(port, &a));
        let mut rig = Rig::new(&*import, 32);
        rig.read(0, 4096).unwrap();
        shrink([port, listening.address.port()]);
        const PART: u32 = 256 << 10;
        // More than a socket keeps; four parts are all the memory that the guest has.
        const PARTS: u16 = (SIZE / PART as usize) as u16;
        let parts = |tag: u16| {
            (
                u64::from(tag) * u64::from(PART),
                [GuestRange { gpa: u64::from(tag % 4) * u64::from(PART), len: PART }],
            )
        };
        let all = pattern(5, 4 * PART as usize, 0);
        rig.view.write(0, &all).unwrap();
        for tag in 0..PARTS {
            let (offset, from) = parts(tag);
            assert_eq!(rig.submit(&Op::Write { offset, from: &from }, Tag(tag)), Submitted::Pending);
        }
        rig.push();
        assert!(rig.finish().iter().all(|(_, outcome)| outcome.is_ok()));
        rig.view.write(0, &vec![0; all.len()]).unwrap();
        for tag in 0..PARTS {
            let (offset, into) = parts(tag);
            assert_eq!(rig.submit(&Op::Read { offset, into: &into }, Tag(tag)), Submitted::Pending);
        }
        rig.push();
        assert!(rig.finish().iter().all(|(_, outcome)| outcome.is_ok()));
        let mut came = vec![0; all.len()];
        rig.view.read(0, &mut came).unwrap();
        assert!(came == all, "other bytes");
        for tag in 0..PARTS {
            let (offset, [GuestRange { gpa, .. }]) = parts(tag);
            assert!(rig.read(offset, PART).unwrap() == all[gpa as usize..][..PART as usize], "part {tag}");
        }
        // One by itself: no reply to another one wakes anybody.
        rig.write(0, &all[..PART as usize]).unwrap();
        assert_eq!(import.status().connections[0].losses, 0);
    }
}

/// Runs a program of others; `None`, and said loudly, where it is missing.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).stdin(Stdio::null()).output() {
        Ok(output) => {
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{program} {}: {out}{err}", arguments.join(" "));
            Some(out.into_owned())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            rig::skip(&format!("TLS was NOT tested with {program}: script/bootstrap --checks"));
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

#[test]
fn nbdinfo_and_nbdcopy_use_an_export_with_tls() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let pki = folder.path().join("pki");
    a.export(&pki).unwrap();
    let listening = exported(&a, Notify::Notified);
    let uri =
        format!("nbds://localhost:{}/disk?tls-certificates={}", listening.address.port(), pki.display());
    let Some(json) = run("nbdinfo", &["--json", &uri]) else { return };
    assert!(json.contains(&format!("\"export-size\": {SIZE}")) && json.contains("\"TLS\": true"), "{json}");
    let [there, back] = ["there.img", "back.img"].map(|file| folder.path().join(file));
    std::fs::write(&there, pattern(0, SIZE, 3)).unwrap();
    run("nbdcopy", &[there.to_str().unwrap(), &uri]);
    run("nbdcopy", &[&uri, back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == pattern(0, SIZE, 3));
    // In plain text nothing is told.
    let plain =
        Command::new("nbdinfo").arg(format!("nbd://localhost:{}/disk", listening.address.port())).output();
    assert!(!plain.unwrap().status.success());
}

fn credentials(pki: &Path, endpoint: &str) -> String {
    format!("tls-creds-x509,id=tls,endpoint={endpoint},verify-peer=on,dir={}", pki.display())
}

#[test]
fn qemu_img_uses_an_export_with_tls() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let pki = folder.path().join("pki");
    a.export(&pki).unwrap();
    let listening = exported(&a, Notify::Notified);
    let object = credentials(&pki, "client");
    let port = listening.address.port();
    let image = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=tls");
    let args = ["--object", &object, "--image-opts", &image];
    let Some(info) = run("qemu-img", &[&["info"], &args[..]].concat()) else { return };
    assert!(info.contains(&SIZE.to_string()), "{info}");
    run(
        "qemu-io",
        &[&args[..], &["-c", "write -P 7 64k 1M", "-c", "read -P 7 64k 1M", "-c", "flush"]].concat(),
    );
}

#[test]
fn an_export_of_qemu_nbd_with_tls_is_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let pki = folder.path().join("pki");
    a.export(&pki).unwrap();
    let image = rig::image(folder.path(), SIZE as u64);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let object = credentials(&pki, "server");
    let server = Command::new("qemu-nbd")
        .args([
            "--object",
            &object,
            "--tls-creds",
            "tls",
            "-f",
            "raw",
            "-b",
            "127.0.0.1",
            "-p",
            &port,
            "-t",
            "-x",
            "disk",
        ])
        .arg(&image)
        .stdin(Stdio::null())
        .spawn();
    let mut server = match server {
        Ok(server) => server,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return rig::skip("TLS was NOT tested with qemu-nbd: script/bootstrap --checks");
        }
        Err(error) => panic!("qemu-nbd: {error}"),
    };
    let options = options(port.parse().unwrap(), &a);
    is_a_disk(ImportOptions { at_start: AtStart::Wait, ..options });
    server.kill().unwrap();
    server.wait().unwrap();
}

/// A program of others that serves at `socket`, which takes the place of the word `SOCKET` in its arguments.
fn started<S: AsRef<str>>(program: &str, arguments: &[S], socket: &Path) -> Option<Child> {
    let path = socket.to_str().unwrap();
    let arguments = arguments.iter().map(|argument| argument.as_ref().replace("SOCKET", path));
    match Command::new(program).args(arguments).stdin(Stdio::null()).spawn() {
        Ok(child) => Some(child),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            rig::skip(&format!(
                "TLS and a Unix socket were NOT tested with {program}: script/bootstrap --checks"
            ));
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

/// nbdkit and QEMU are clients by TLS, and serve what they find there in plain text to our import.
#[test]
fn programs_of_others_between_an_export_with_tls_and_an_import() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let pki = folder.path().join("pki");
    a.export(&pki).unwrap();
    let listening = exported(&a, Notify::Notified);
    let port = listening.address.port();
    let (upstream, directory) =
        (format!("uri=nbds://localhost:{port}/disk"), format!("tls-certificates={}", pki.display()));
    let object = credentials(&pki, "client");
    let node = format!(
        "driver=nbd,node-name=n,server.type=inet,server.host=localhost,server.port={port},export=disk,tls-creds=tls"
    );
    let programs: [(&str, Vec<&str>); 2] = [
        ("nbdkit", vec!["-f", "-U", "SOCKET", "nbd", &upstream, "tls=require", &directory]),
        (
            "qemu-storage-daemon",
            vec![
                "--object",
                &object,
                "--blockdev",
                &node,
                "--nbd-server",
                "addr.type=unix,addr.path=SOCKET",
                "--export",
                "type=nbd,id=e,node-name=n,name=disk,writable=on",
            ],
        ),
    ];
    for (program, arguments) in programs {
        let socket = folder.path().join(format!("{program}-between.sock"));
        let Some(mut between) = started(program, &arguments, &socket) else { continue };
        let address = format!("nbd+unix:///disk?socket={}", socket.display()).parse().unwrap();
        is_a_disk(ImportOptions { address, at_start: AtStart::Wait, ..options(port, &a) });
        between.kill().unwrap();
        between.wait().unwrap();
    }
    // By TLS and nothing else: what is there was written by both.
    is_a_disk(options(port, &a));
    said_nothing_more_than_an_end(&listening);
}

/// A Unix socket whose connections go to `port` of this host, as those of a tunnel do. Ends with the test's process.
fn tunnel(socket: &Path, port: u16) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for here in listener.incoming() {
            let (here, there) = (here.unwrap(), TcpStream::connect(("127.0.0.1", port)).unwrap());
            let (mut up, mut down) = (here.try_clone().unwrap(), there.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut up, &mut &there);
                let _ = there.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut down, &mut &here);
                let _ = here.shutdown(Shutdown::Both);
            });
        }
    });
}

/// The same server by a socket of this host, with TLS.
fn by_socket(socket: &Path, identity: &IdentityDirectory, server: &str) -> ImportOptions {
    let address = format!("nbds+unix:///disk?socket={}&tls-hostname={server}", socket.display());
    ImportOptions { address: address.parse().unwrap(), ..options(1, identity) }
}

/// What is written is read, and the connection ends well.
fn is_a_disk(options: ImportOptions) {
    let import = scripted::import(options);
    let mut rig = Rig::new(&*import, 4);
    let bytes = pattern(0, 300 << 10, 5);
    rig.write(4096, &bytes).unwrap();
    assert!(rig.read(4096, bytes.len() as u32).unwrap() == bytes);
    rig.run(&Op::Flush).unwrap();
    drop(rig);
    assert!(import.wait_quiet(std::time::Instant::now() + PATIENCE));
}

#[test]
fn tls_by_a_socket_of_this_host() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let b = member(&a, folder.path(), "host-b");
    let listening = exported(&a, Notify::Notified);
    let socket = folder.path().join("tunnel.sock");
    tunnel(&socket, listening.address.port());
    is_a_disk(by_socket(&socket, &b, "localhost"));
    let error = refused(by_socket(&socket, &b, "host-c"));
    assert!(matches!(&error, NbdError::Tls(TlsFault::WrongHost(_))), "{error}");
    // A server without TLS, and one that insists on it.
    let plain = Listening::with(
        MemoryBacking::new(SIZE as u64).unwrap(),
        ExportOptions::default(),
        Notify::Notified,
        None,
    );
    let socket = folder.path().join("plain.sock");
    tunnel(&socket, plain.address.port());
    let error = refused(by_socket(&socket, &b, "localhost"));
    assert!(matches!(error, NbdError::TlsRefused(_)), "{error}");
    let address = format!("nbd+unix:///disk?socket={}", folder.path().join("tunnel.sock").display());
    let error =
        refused(ImportOptions { address: address.parse().unwrap(), ..by_socket(&socket, &b, "localhost") });
    assert!(matches!(error, NbdError::TlsRequired), "{error}");
}

#[test]
fn servers_of_others_with_tls_by_a_socket_of_this_host() {
    let folder = tempfile::tempdir().unwrap();
    let a = authority(folder.path());
    let pki = folder.path().join("pki");
    a.export(&pki).unwrap();
    let image = rig::image(folder.path(), SIZE as u64);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let object = credentials(&pki, "server");
    let directory = format!("--tls-certificates={}", pki.display());
    let programs: [(&str, Vec<String>); 2] = [
        (
            "qemu-nbd",
            [
                "--object",
                &object,
                "--tls-creds",
                "tls",
                "-f",
                "raw",
                "-t",
                "-x",
                "disk",
                "-k",
                "SOCKET",
                &text(&image),
            ]
            .map(str::to_owned)
            .into(),
        ),
        (
            "nbdkit",
            [
                "-f",
                "--tls=require",
                &directory,
                "--tls-verify-peer",
                "-U",
                "SOCKET",
                "-e",
                "disk",
                "memory",
                "8M",
            ]
            .map(str::to_owned)
            .into(),
        ),
    ];
    for (program, arguments) in programs {
        let socket = folder.path().join(format!("{program}.sock"));
        let Some(mut server) = started(program, &arguments, &socket) else { continue };
        is_a_disk(ImportOptions { at_start: AtStart::Wait, ..by_socket(&socket, &a, "localhost") });
        server.kill().unwrap();
        server.wait().unwrap();
    }
}
