//! The state file as input, and how it comes together with the configuration; how a registry is asked.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ioplane_api::report::MoveStep;
use ioplane_api::request::{MoveNoteForm, NotedGuard};
use ioplane_api::spec::{BackingSpec, CoreSpec, DiskForm, DiskSpec, FunctionForm, FunctionSpec};

use ioplane_identity::IdentityDirectory;
use ioplane_nbd::import::ClaimWish;

use super::access::SocketAccess;
use super::context::{DaemonContext, DaemonPaths};
use super::cores::Cores;
use super::devices::DirectoryClient;
use super::groups::Groups;
use super::registry::{OnFailure, Registry};
use super::served::{GLANCE, ServedKind, Service, Standing, StateRecord};
use super::state_file::{DiskRecord, Entries, FunctionRecord, MoveStepRecord, StateFile, StateFileError};
use crate::config::{Config, Place};
use crate::refusal::Refusal;

fn spec(name: &str) -> DiskSpec {
    let form = DiskForm { path: Some(format!("/{name}.img").into()), ..DiskForm::default() };
    form.spec(name).unwrap()
}

fn record(name: &str, configured: bool) -> DiskRecord {
    let spec = spec(name);
    DiskRecord {
        configured: configured.then(|| spec.clone()),
        now: spec,
        moved: BTreeMap::new(),
        bytes: None,
        image: None,
        step: None,
        claim: Default::default(),
    }
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.json");
    let state_file = StateFile::open(&file).unwrap();
    assert!(!file.exists(), "reading writes nothing");
    state_file
        .change(|entries| {
            let mut disk = record("a", false);
            disk.moved.insert(3, 1);
            entries.disks.insert("a".into(), disk);
            entries.removed.insert("b".into(), spec("b"));
            let core = super::state_file::CoreRecord { configured: Some(CoreSpec::new(1)), now: None };
            entries.cores.insert(1, core);
            let form = FunctionForm { host: "00:05.0".parse().ok(), ..FunctionForm::default() };
            // How it comes by a claim is not written: one that is read from the file goes on with what it has.
            let added = FunctionRecord::added(form.spec("f").unwrap());
            let step = Some(MoveStepRecord { step: MoveStep::Left, connections: 4 });
            let function = FunctionRecord { claim: ClaimWish::default(), step, ..added };
            let other = FunctionSpec { name: "g".into(), ..function.now.clone() };
            entries.removed_functions.insert("g".into(), other);
            let note = MoveNoteForm {
                peer: None,
                pid: 7,
                gone: true,
                to: "tcp:b:4444".into(),
                qmp: "/a".into(),
                there: "/b".into(),
                qmp_there: "/c".into(),
                running: true,
                paused_before: false,
                downtime_limit: None,
                latch: Some(1),
                guards: vec![NotedGuard { node: "n".into(), file: "/g".into() }],
                functions: Vec::new(),
            };
            entries.moves.insert("vm".into(), note);
            entries.functions.insert("f".into(), function);
        })
        .unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(StateFile::open(&file).unwrap().entries(), state_file.entries());
}

#[test]
fn a_damaged_file_is_refused_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.json");
    let state_file = StateFile::open(&file).unwrap();
    state_file.change(|entries| drop(entries.disks.insert("a".into(), record("a", true)))).unwrap();
    let good = std::fs::read_to_string(&file).unwrap();
    let cases = [
        String::new(),
        "{".to_owned(),
        good[..good.len() / 2].to_owned(),
        good.clone() + "x",
        good.replace("\"version\": 1", "\"version\": 2"),
        good.replace("ioplane-state", "something"),
        good.replace("\"queues\": 1", "\"queues\": 0"),
        good.replace("\"queues\": 1", "\"queues\": 99999"),
        good.replace("\"name\": \"a\"", "\"name\": \"../a\""),
        good.replace("\"name\": \"a\"", "\"name\": \"b\""),
        good.replace("/a.img", "a.img"),
        good.replace("\"serial\"", "\"cereal\""),
        "\u{0}".repeat(4096),
        "[".repeat(100_000),
    ];
    for text in cases {
        std::fs::write(&file, &text).unwrap();
        let error = StateFile::open(&file).unwrap_err();
        assert!(matches!(error, StateFileError::Damaged { .. }), "{text}: {error}");
        assert!(error.to_string().contains("nothing was lost"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "touched");
    }
    // Any single byte of it may be another: no panic, and what is accepted can be written again.
    for at in 0..good.len() {
        let mut bytes = good.clone().into_bytes();
        bytes[at] ^= 0x15;
        std::fs::write(&file, &bytes).unwrap();
        let _ = StateFile::open(&file);
    }
    std::fs::write(&file, &good).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
    let error = StateFile::open(&file).unwrap_err().to_string();
    assert!(error.contains("only this user"), "{error}");
}

#[test]
fn a_failed_write_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state_file = StateFile::open(&folder.path().join("gone/state.json")).unwrap();
    let error =
        state_file.change(|entries| drop(entries.disks.insert("a".into(), record("a", true)))).unwrap_err();
    assert!(matches!(error, StateFileError::Os { .. }), "{error}");
    assert!(state_file.entries().disks.is_empty());
}

#[test]
fn what_was_changed_at_run_time_stays_until_the_configuration_says_something_new() {
    let mut known = record("a", true);
    known.now.backing = BackingSpec::Memory { bytes: 1 << 20 };
    known.moved.insert(0, 1);
    known.bytes = Some(512);

    let same = DiskRecord::configured(&spec("a"), Some(&known));
    assert_eq!(same, known, "the same configuration changes nothing");

    let other_serial = DiskSpec { serial: "S2".into(), ..spec("a") };
    let merged = DiskRecord::configured(&other_serial, Some(&known));
    assert_eq!(
        (merged.now.serial.as_str(), &merged.now.backing),
        ("S2", &known.now.backing),
        "each field by itself"
    );
    assert_eq!(merged.moved, known.moved);

    let other_backing = DiskSpec { backing: spec("c").backing, ..spec("a") };
    let merged = DiskRecord::configured(&other_backing, Some(&known));
    assert_eq!(
        (&merged.now.backing, merged.bytes),
        (&other_backing.backing, None),
        "the configuration was changed"
    );

    let other_core = DiskSpec { core: Some(2), ..spec("a") };
    assert!(DiskRecord::configured(&other_core, Some(&known)).moved.is_empty());

    let adopted = DiskRecord::configured(&spec("a"), Some(&record("a", false)));
    assert_eq!(
        adopted.configured,
        Some(spec("a")),
        "a disk added at run time was written into the configuration"
    );
}

/// A device that says nothing, for as long as a report waits for one.
struct Stuck {
    note: StateRecord<Stuck>,
}

impl ServedKind for Stuck {
    type Spec = DiskSpec;
    type Report = String;
    type Below = ();
    type Service = Stuck;

    const NAME: &'static str = "disk";
    const COMMAND: &'static str = "disk";
    const LET_GO: &'static str = "";

    fn configured(_config: &Config) -> &[(DiskSpec, Place)] {
        &[]
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, DiskRecord> {
        &mut entries.disks
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, DiskSpec> {
        &mut entries.removed
    }

    async fn open(
        record: DiskRecord,
        context: &Arc<DaemonContext>,
        _below: &Arc<()>,
    ) -> Result<Stuck, Refusal> {
        Ok(Stuck { note: StateRecord::begin(record, &context.state_file)? })
    }

    async fn become_next(&self, _next: DiskRecord) -> Result<(), Refusal> {
        Ok(())
    }

    fn service(&self) -> &Stuck {
        self
    }

    async fn report(&self) -> String {
        let name = self.note.read().now.name;
        if name != "quick" {
            // As `Served::glance` does, and longer than that.
            tokio::time::sleep(2 * GLANCE).await;
        }
        name + " answers"
    }

    fn blank(_record: &DiskRecord, Standing { name, state, .. }: Standing) -> String {
        format!("{name} is {state:?}")
    }
}

impl Service<Stuck> for Stuck {
    fn note(&self) -> &StateRecord<Stuck> {
        &self.note
    }

    fn socket(&self) -> &Path {
        Path::new("/nowhere.sock")
    }

    async fn in_use(&self) -> bool {
        true
    }

    async fn stop(&self, _force: bool) -> Result<(), Refusal> {
        Ok(())
    }
}

#[test]
fn hole_18_one_that_is_stuck_costs_the_others_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state_file = Arc::new(StateFile::open(&folder.path().join("state.json")).unwrap());
    let cores = Arc::new(Cores::new(state_file.clone()));
    let (run_dir, control) = (folder.path().to_owned(), folder.path().join("control.sock"));
    let groups = Arc::new(Groups::new(state_file.clone()));
    let identity = IdentityDirectory::new(folder.path().join("identity"));
    let (access, devices) =
        (SocketAccess::default(), Arc::new(DirectoryClient::new(None, identity, &run_dir, &run_dir)));
    let paths = DaemonPaths { state_dir: run_dir.clone(), run_dir, control };
    let context = Arc::new(DaemonContext::new(cores, groups, state_file, paths, access, devices));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let registry: Registry<Stuck> = Registry::new(context, Arc::new(()));
        let mut names: Vec<String> = (10..40).map(|number| format!("stuck{number}")).collect();
        names.insert(0, "quick".into());
        for name in &names {
            registry.add(DiskRecord::added(spec(name)), OnFailure::Forget).await.unwrap();
        }
        let begun = Instant::now();
        let reports = registry.report().await;
        // Thirty of them, one after the other, would be as many times that.
        assert!(begun.elapsed() < 5 * GLANCE, "{:?}", begun.elapsed());
        assert_eq!(reports[0], "quick answers");
        let busy: Vec<String> = names[1..].iter().map(|name| format!("{name} is Busy")).collect();
        assert_eq!(reports[1..], busy);
    });
}

#[test]
fn a_second_capture_says_which_to_end() {
    let refusal = Refusal::from(ioplane_network::NetworkError::Captured { port: "web".into() });
    assert_eq!(refusal.error, "a capture of port web is running: a port has one at a time");
    assert!(refusal.remedy.starts_with("end the other `ioplane capture`"), "{}", refusal.remedy);
    assert_eq!(refusal.code, ioplane_api::refusal::Code::InUse);
}
