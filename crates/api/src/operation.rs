//! Every operation of the control interface: one list, from which the daemon makes its routes and the OpenAPI document its paths.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator};

#[cfg(feature = "schema")]
use crate::report::{
    AheadFunctionReport, CarriedFunctionV1, CoreReport, DaemonEvent, DecisionsReport, DevicesReport,
    DiskReport, DoneReport, ExpectedReport, ExplainReport, ExportReport, FunctionReport, GroupReport,
    HealthReport, MovePeerReport, MovedFunctionReport, MovedReport, NicReport, PoolReport, QuiesceReport,
    ReplayedFunctionReport, RestedFunctionReport, SaidFunctionV1, SavedReport, SetUpFunctionReport,
    StateFileV1, StatusReport, SwitchReport, SwitchTableReport, UpgradeReport, VcpusReport, VersionReport,
};
#[cfg(feature = "schema")]
use crate::request::{
    ChangeForm, CoreChangeForm, CoreForm, ExpectForm, ExportSizeForm, FunctionStepForm, HoldVcpusForm,
    KeepVcpusForm, MigrationSocketForm, MoveForm, MoveFunctionForm, MoveNoteForm, MovePeerForm, NotifyForm,
    PhysicalForm, QuiesceForm, SwapForm, UnpinForm, UpgradeForm, VerifyForm, WriteVectorsForm,
};
#[cfg(feature = "schema")]
use crate::spec::{
    DiskForm, ExportChangeForm, ExportForm, FunctionForm, GroupChangeForm, GroupForm, NicChangeForm, NicForm,
    SwitchForm,
};

/// An HTTP method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Reads; changes nothing.
    Get,
    /// Makes something as the body says, unless it is so already.
    Put,
    /// Does something.
    Post,
    /// Changes something.
    Patch,
    /// Takes something away.
    Delete,
}

impl Method {
    /// As HTTP has it.
    pub fn word(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Put => "PUT",
            Method::Post => "POST",
            Method::Patch => "PATCH",
            Method::Delete => "DELETE",
        }
    }
}

/// A key of a query, and what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryKey {
    /// The key.
    pub name: &'static str,
    /// Its JSON type.
    pub holds: &'static str,
    /// What it says.
    pub about: &'static str,
}

/// `?force=true`.
const FORCE: QueryKey =
    QueryKey { name: "force", holds: "boolean", about: "Even while a guest uses it [default: false]." };
/// `?takeover=true`.
const TAKEOVER: QueryKey = QueryKey {
    name: "takeover",
    holds: "boolean",
    about: "Also if another host holds the export, which is then refused for good: what it has not flushed is lost [default: false].",
};
/// `?reservations=true`.
const RESERVATIONS: QueryKey = QueryKey {
    name: "reservations",
    holds: "boolean",
    about: "Not the claim, but what hosts have reserved that are not connected; with force, also what others have [default: false].",
};
/// `?snaplen=N`.
const SNAPLEN: QueryKey =
    QueryKey { name: "snaplen", holds: "integer", about: "First bytes of each frame [default: 2048]." };

/// `?seconds=N`.
const SECONDS: QueryKey =
    QueryKey { name: "seconds", holds: "integer", about: "For how long to look, 1 to 600 [default: 5]." };

/// `?from=N`.
const FROM: QueryKey = QueryKey {
    name: "from",
    holds: "integer",
    about: "The number of the first one [default: 0, all that are kept].",
};

/// Whether a request has a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyNeed {
    /// It is not read.
    None,
    /// It may be left out: the defaults hold.
    Optional,
    /// It is needed.
    Required,
}

/// What JSON is called.
pub const JSON: &str = "application/json";
/// One JSON object a line.
pub const JSON_LINES: &str = "application/x-ndjson";
/// A capture.
pub const PCAPNG: &str = "application/x-pcapng";

/// What an operation answers when all is well.
#[cfg(feature = "schema")]
pub struct OperationReply {
    /// The HTTP status.
    pub status: u16,
    /// The content type.
    pub media: &'static str,
    /// What the content is.
    pub schema: Schema,
}

macro_rules! operations {
    (@old) => { None };
    (@old $old:literal) => { Some($old) };
    (@need) => { BodyNeed::None };
    (@need optional) => { BodyNeed::Optional };
    (@need body) => { BodyNeed::Required };
    (@media) => { JSON };
    (@media $media:ident) => { $media };
    ($(
        #[doc = $about:literal]
        $variant:ident: $method:ident $path:literal $((was $old:literal))? $([$($key:ident),*])? $($need:ident $body:ty)?
            => $($status:literal $answer:ty $(as $media:ident)?),+;
    )*) => {
        /// An operation of the interface.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Operation {
            $(#[doc = $about] $variant,)*
        }

        impl Operation {
            /// All of them.
            pub const ALL: &[Operation] = &[$(Operation::$variant,)*];

            /// Its method.
            pub fn method(self) -> Method {
                match self { $(Operation::$variant => Method::$method,)* }
            }

            /// Its path; `{name}` and `{id}` stand for any.
            pub fn path(self) -> &'static str {
                match self { $(Operation::$variant => $path,)* }
            }

            /// The path that it had before, and that is answered too.
            pub fn old_path(self) -> Option<&'static str> {
                match self { $(Operation::$variant => operations!(@old $($old)?),)* }
            }

            /// What it does.
            pub fn about(self) -> &'static str {
                match self { $(Operation::$variant => $about.trim_ascii(),)* }
            }

            /// Its name for programs that are generated.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$variant => stringify!($variant),)* }
            }

            /// Keys that its query may have.
            pub fn query(self) -> &'static [QueryKey] {
                match self { $(Operation::$variant => &[$($($key),*)?],)* }
            }

            /// Whether it has a body.
            pub fn need(self) -> BodyNeed {
                match self { $(Operation::$variant => operations!(@need $($need)?),)* }
            }

            /// What its body is.
            #[cfg(feature = "schema")]
            pub fn body(self, generator: &mut SchemaGenerator) -> Option<Schema> {
                match self {
                    $(Operation::$variant => one([$(generator.subschema_for::<$body>())?]),)*
                }
            }

            /// What it answers when all is well.
            #[cfg(feature = "schema")]
            pub fn replies(self, generator: &mut SchemaGenerator) -> Vec<OperationReply> {
                match self {
                    $(Operation::$variant => vec![$(OperationReply {
                        status: $status,
                        media: operations!(@media $($media)?),
                        schema: generator.subschema_for::<$answer>(),
                    }),+],)*
                }
            }
        }
    };
}

#[cfg(feature = "schema")]
fn one<const N: usize>(schemas: [Schema; N]) -> Option<Schema> {
    schemas.into_iter().next()
}

/// What is no JSON.
#[cfg(feature = "schema")]
struct Bytes;

#[cfg(feature = "schema")]
impl JsonSchema for Bytes {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        Schema::default()
    }
}

/// The OpenAPI document itself.
#[cfg(feature = "schema")]
type Document = std::collections::BTreeMap<String, serde_json::Value>;

operations! {
    /// How everything is.
    Status: Get "/v1/status" => 200 StatusReport;
    /// The daemon's version, and those of the interface.
    Version: Get "/v1/version" => 200 VersionReport;
    /// Whether everything that is to be served is served.
    Health: Get "/v1/health" => 200 HealthReport;
    /// What happens from now on, one JSON object a line, until the client goes.
    Events: Get "/v1/events" => 200 DaemonEvent as JSON_LINES;
    /// Looks for a while at a disk, a NIC, a VM or a group, and says where the time of their requests goes.
    Explain: Get "/v1/explain/{name}" [SECONDS] => 200 ExplainReport;
    /// This document.
    OpenApi: Get "/v1/openapi.json" => 200 Document;
    /// The disks.
    Disks: Get "/v1/disks" => 200 Vec<DiskReport>;
    /// One disk.
    Disk: Get "/v1/disks/{name}" => 200 DiskReport;
    /// Adds a disk, unless it is there already and as asked for.
    PutDisk: Put "/v1/disks/{name}" [TAKEOVER] body DiskForm => 201 DiskReport, 200 DiskReport;
    /// Changes the size of a disk, puts another backing behind it, or changes the limits of its guest or its group, while a guest uses it.
    ChangeDisk: Patch "/v1/disks/{name}" body ChangeForm => 200 DiskReport;
    /// Takes a disk away.
    RemoveDisk: Delete "/v1/disks/{name}" [FORCE] => 200 DoneReport;
    /// Takes a disk of another machine as it is now, where requests fail until somebody says so.
    AcceptDisk: Post "/v1/disks/{name}/accept" => 200 DiskReport;
    /// Gives a disk a migration socket, unless it has that one already.
    PutMigrationSocket: Put "/v1/disks/{name}/migration-socket" (was "/v1/disks/{name}/twin") optional MigrationSocketForm
        => 201 DiskReport, 200 DiskReport;
    /// Takes the migration socket of a disk away.
    RemoveMigrationSocket: Delete "/v1/disks/{name}/migration-socket" (was "/v1/disks/{name}/twin") [FORCE] => 200 DiskReport;
    /// Copies a disk to another backing while a guest uses it, and then goes on with that one; answers when the copying has begun.
    StartSwap: Post "/v1/disks/{name}/swap" body SwapForm => 200 DiskReport;
    /// Ends the swap of a disk: it goes on with the backing that it has.
    CancelSwap: Delete "/v1/disks/{name}/swap" => 200 DiskReport;
    /// Compares a disk with another copy of it while a guest uses it; answers when the comparison has begun.
    StartVerify: Post "/v1/disks/{name}/verify" optional VerifyForm => 200 DiskReport;
    /// Ends the comparison of a disk.
    CancelVerify: Delete "/v1/disks/{name}/verify" => 200 DiskReport;
    /// The exports: disks of this host that other machines use.
    Exports: Get "/v1/exports" => 200 Vec<ExportReport>;
    /// One export.
    Export: Get "/v1/exports/{name}" => 200 ExportReport;
    /// Adds an export, unless it is there already and as asked for.
    PutExport: Put "/v1/exports/{name}" body ExportForm => 201 ExportReport, 200 ExportReport;
    /// Changes what all clients of an export may do together, while they use it.
    ChangeExport: Patch "/v1/exports/{name}" body ExportChangeForm => 200 ExportReport;
    /// Changes the size of an export while clients use it, and tells those that have it attached.
    ResizeExport: Post "/v1/exports/{name}/resize" body ExportSizeForm => 200 ExportReport;
    /// Takes an export away.
    RemoveExport: Delete "/v1/exports/{name}" [FORCE] => 200 DoneReport;
    /// The devices that all hosts publish, as the directory has them.
    Devices: Get "/v1/devices" => 200 DevicesReport;
    /// Frees the name of a device in the directory whose host does not come back.
    ForgetDevice: Delete "/v1/devices/{name}" => 200 DoneReport;
    /// Ends the claim of the host that holds an export, which is then refused; others may use the export. Or takes back what hosts have reserved.
    ReleaseExport: Post "/v1/exports/{name}/release" [FORCE, RESERVATIONS] => 200 ExportReport;
    /// The switches.
    Switches: Get "/v1/switches" => 200 Vec<SwitchReport>;
    /// One switch, with the addresses that it has learned.
    Switch: Get "/v1/switches/{name}" => 200 SwitchTableReport;
    /// Adds a switch, unless it is there already and as asked for.
    PutSwitch: Put "/v1/switches/{name}" optional SwitchForm => 201 SwitchTableReport, 200 SwitchTableReport;
    /// Takes a switch away.
    RemoveSwitch: Delete "/v1/switches/{name}" => 200 DoneReport;
    /// The NICs.
    Nics: Get "/v1/nics" => 200 Vec<NicReport>;
    /// One NIC.
    Nic: Get "/v1/nics/{name}" => 200 NicReport;
    /// Adds a NIC, unless it is there already and as asked for.
    PutNic: Put "/v1/nics/{name}" body NicForm => 201 NicReport, 200 NicReport;
    /// Takes the link of a NIC up or down, or changes the limits of its guest or its group, while a guest uses it.
    ChangeNic: Patch "/v1/nics/{name}" body NicChangeForm => 200 NicReport;
    /// Takes a NIC away.
    RemoveNic: Delete "/v1/nics/{name}" [FORCE] => 200 DoneReport;
    /// The groups.
    Groups: Get "/v1/groups" => 200 Vec<GroupReport>;
    /// One group.
    Group: Get "/v1/groups/{name}" => 200 GroupReport;
    /// Adds a group, unless it is there already and as asked for.
    PutGroup: Put "/v1/groups/{name}" optional GroupForm => 201 GroupReport, 200 GroupReport;
    /// Changes the weight or the limits of a group, while guests use its devices.
    ChangeGroup: Patch "/v1/groups/{name}" body GroupChangeForm => 200 GroupReport;
    /// Takes a group away in which no device is.
    RemoveGroup: Delete "/v1/groups/{name}" => 200 DoneReport;
    /// The PCI functions.
    Functions: Get "/v1/pci" => 200 Vec<FunctionReport>;
    /// One PCI function.
    Function: Get "/v1/pci/{name}" => 200 FunctionReport;
    /// Adds a PCI function, unless it is there already and as asked for.
    PutFunction: Put "/v1/pci/{name}" body FunctionForm => 201 FunctionReport, 200 FunctionReport;
    /// Takes a PCI function away, and gives it back to the host.
    RemoveFunction: Delete "/v1/pci/{name}" [FORCE] => 200 DoneReport;
    /// Brings a PCI function to a quiescent point and holds it there.
    QuiesceFunction: Post "/v1/pci/{name}/quiesce" optional QuiesceForm => 200 QuiesceReport;
    /// Resumes a PCI function.
    ResumeFunction: Post "/v1/pci/{name}/resume" => 200 DoneReport;
    /// Tries again to make a PCI function usable.
    ResetFunction: Post "/v1/pci/{name}/reset" => 200 DoneReport;
    /// Saves the state of a PCI function.
    SaveFunction: Post "/v1/pci/{name}/save" optional QuiesceForm => 200 StateFileV1;
    /// Puts a saved state into a PCI function, which resumes from there.
    LoadFunction: Post "/v1/pci/{name}/load" body StateFileV1 => 200 DoneReport;
    /// Puts another function of the host in the place of one that a guest uses.
    MoveFunction: Post "/v1/pci/{name}/move" body MoveFunctionForm => 200 MovedFunctionReport;
    /// Whether that could be done, as far as is seen while the guest runs. Nothing is touched.
    CheckMoveFunction: Post "/v1/pci/{name}/move/check" body MoveFunctionForm => 200 DoneReport;
    /// Logs from here on which pages a PCI function that its guest drives itself writes: the guest's memory is about to be copied.
    LogFunction: Post "/v1/pci/{name}/log" => 200 DoneReport;
    /// Logs them no longer: the guest stays.
    EndLogFunction: Delete "/v1/pci/{name}/log" => 200 DoneReport;
    /// Brings a PCI function that its guest drives itself to rest, where it stays, and tells its VMM of the pages that were logged.
    RestFunction: Post "/v1/pci/{name}/rest" body FunctionStepForm => 200 RestedFunctionReport;
    /// Whether a PCI function that a guest moves to could have what the guest's has at its host's physical function: tried, and put back.
    CheckTakeFunction: Post "/v1/pci/{name}/carried/check" body PhysicalForm => 200 DoneReport;
    /// What the guest of a PCI function that it drives itself has said to the physical function, while it runs.
    SaidFunction: Get "/v1/pci/{name}/ahead" => 200 SaidFunctionV1;
    /// Says ahead, on the function that such a guest moves to, what it has said; the move itself says the difference.
    GoAheadFunction: Put "/v1/pci/{name}/ahead" body SaidFunctionV1 => 200 AheadFunctionReport;
    /// The guest does not come: a function that has said something ahead is reset.
    ForgetAheadFunction: Delete "/v1/pci/{name}/ahead" => 200 DoneReport;
    /// What another host's function needs to go on from where this one stands still.
    CarriedFunction: Get "/v1/pci/{name}/carried" => 200 CarriedFunctionV1;
    /// Puts what another host's function had into this one, which stands still until its replay.
    TakeFunction: Put "/v1/pci/{name}/carried" body CarriedFunctionV1 => 200 DoneReport;
    /// Has the VMM of a PCI function write the function's MSI-X table, which the VMM emulates.
    WriteVectors: Put "/v1/pci/{name}/vectors" body WriteVectorsForm => 200 DoneReport;
    /// How the guest, which stands still, has set up a PCI function: its command register, and MSI-X with the table, which its VMM emulates and is asked for.
    SetUpFunction: Post "/v1/pci/{name}/set-up" body FunctionStepForm => 200 SetUpFunctionReport;
    /// Has no vCPU of a PCI function's VMM enter the guest, which stands still, or lets them: by the library that `ioplane run` has put into the VMM's process.
    HoldVcpus: Put "/v1/pci/{name}/vcpus" body HoldVcpusForm => 200 DoneReport;
    /// What the vCPUs of a PCI function's VMM do, as that library says, and whether the VMM's main thread waits for something.
    Vcpus: Get "/v1/pci/{name}/vcpus" => 200 VcpusReport;
    /// Keeps vCPUs that a PCI function's VMM wants back, or lets them come back: by the same library. A VMM that stops its guest to hand it over waits for them.
    KeepVcpus: Put "/v1/pci/{name}/stop" body KeepVcpusForm => 200 DoneReport;
    /// Lets a PCI function that stands still go on from its state.
    ReplayFunction: Post "/v1/pci/{name}/replay" body FunctionStepForm => 200 ReplayedFunctionReport;
    /// A PCI function that stands still has no guest any more: it went on with another host's.
    LeaveFunction: Post "/v1/pci/{name}/leave" => 200 DoneReport;
    /// What is written down of a move of a VM with PCI functions that has not come to its end.
    ShowMove: Get "/v1/moves/{name}" => 200 MoveNoteForm;
    /// Writes that down, on disk before the answer. With `gone` it is the one step by which the guest becomes the other host's.
    NoteMove: Put "/v1/moves/{name}" body MoveNoteForm => 200 DoneReport;
    /// It has come to its end.
    EndMove: Delete "/v1/moves/{name}" => 200 DoneReport;
    /// Reaches the daemon of the other host by its certificate, and makes what of it the move needs two sockets of this host.
    PutMovePeer: Put "/v1/moves/{name}/peer" body MovePeerForm => 200 MovePeerReport;
    /// Takes these sockets away.
    RemoveMovePeer: Delete "/v1/moves/{name}/peer" => 200 DoneReport;
    /// The VMs that are expected from other hosts.
    ExpectedVms: Get "/v1/expected" => 200 Vec<ExpectedReport>;
    /// Lets another host move a VM here, once and for a limited time.
    ExpectVm: Put "/v1/expected/{name}" body ExpectForm => 201 ExpectedReport, 200 ExpectedReport;
    /// Expects it no longer. What the other host is doing here just now is broken off.
    UnexpectVm: Delete "/v1/expected/{name}" => 200 DoneReport;
    /// Frames of a NIC or of an uplink, as pcapng, until the client goes.
    Capture: Get "/v1/ports/{name}/capture" [SNAPLEN] => 200 Bytes as PCAPNG;
    /// The I/O cores.
    Cores: Get "/v1/cores" => 200 Vec<CoreReport>;
    /// Starts one core more.
    AddCore: Post "/v1/cores" optional CoreForm => 201 CoreReport;
    /// One I/O core.
    Core: Get "/v1/cores/{id}" => 200 CoreReport;
    /// Changes an I/O core while it runs.
    ChangeCore: Patch "/v1/cores/{id}" body CoreChangeForm => 200 CoreReport;
    /// Ends an I/O core that serves no queue any more.
    RetireCore: Delete "/v1/cores/{id}" => 200 DoneReport;
    /// Changes all I/O cores while they run.
    Notify: Put "/v1/notify" body NotifyForm => 200 Vec<CoreReport>;
    /// Moves a queue to another core.
    MoveQueue: Post "/v1/queues/move" body MoveForm => 200 MovedReport;
    /// Lets a queue be on any core again.
    UnpinQueue: Post "/v1/queues/unpin" body UnpinForm => 200 MovedReport;
    /// The pool of I/O cores.
    Pool: Get "/v1/pool" => 200 PoolReport;
    /// What was decided about I/O cores and queues, and why.
    Decisions: Get "/v1/pool/decisions" [FROM] => 200 DecisionsReport;
    /// What of what was added at run time the configuration does not say.
    UnsavedConfiguration: Get "/v1/config/save" => 200 SavedReport;
    /// Appends what was added at run time to the configuration file.
    SaveConfiguration: Post "/v1/config/save" => 200 SavedReport;
    /// Reads the configuration again.
    Reload: Post "/v1/reload" => 200 DoneReport;
    /// Puts another binary in the daemon's place.
    Upgrade: Post "/v1/upgrade" optional UpgradeForm => 200 UpgradeReport;
}

impl Operation {
    /// The one with this method whose path fits `path`, which has no query.
    pub fn of(method: &str, path: &str) -> Option<Operation> {
        let fits = |operation: &&Operation| {
            let (mut pattern, mut parts) = (operation.path().split('/'), path.split('/'));
            let same = pattern.by_ref().zip(parts.by_ref()).all(|(a, b)| a == b || a.starts_with('{'));
            let as_long = operation.path().split('/').count() == path.split('/').count();
            same && as_long && operation.method().word() == method
        };
        Operation::ALL.iter().find(fits).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_found_by_method_and_path() {
        for operation in Operation::ALL {
            let path = operation.path().replace("{name}", "a.b").replace("{id}", "7");
            assert_eq!(Operation::of(operation.method().word(), &path), Some(*operation), "{path}");
            assert!(operation.about().ends_with('.'), "{path}");
        }
        for (method, path) in [("GET", "/v1/disks/a/b"), ("GET", "/v1"), ("PUT", "/v1/status"), ("GET", "")] {
            assert_eq!(Operation::of(method, path), None, "{method} {path}");
        }
    }
}
