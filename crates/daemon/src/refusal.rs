//! Why the daemon did not do what it was asked: the one error of its API and of its inside.

use ioplane_api::refusal::{Code, FieldError, RefusalBody, RefusalKind};
use ioplane_api::spec::Flaw;

/// A refusal. Nothing has changed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct Refusal {
    /// What it is to programs.
    pub code: Code,
    /// The field of what was asked that is wrong.
    pub field: Option<String>,
    /// Every field that is, if several are.
    pub errors: Vec<FieldError>,
    pub error: String,
    pub remedy: String,
    /// The daemon may try the same again by itself: nothing is taken from anybody by it.
    pub retry: bool,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $kind:ident,)*) => {
        $($(#[$doc])* pub fn $name(error: impl Into<String>, remedy: impl Into<String>) -> Self {
            Refusal::new(Code::usual(RefusalKind::$kind), error, remedy)
        })*
    };
}

impl Refusal {
    kinds! {
        /// No such thing.
        missing Missing,
        /// Not as things are now.
        conflict Conflict,
        /// Larger than any that makes sense.
        huge Huge,
        /// Not on this resource.
        method Method,
        /// It is invalid.
        invalid Invalid,
        /// Not now.
        busy Busy,
        /// The system failed.
        failed Failed,
    }

    /// One without a field.
    pub fn new(code: Code, error: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (error, remedy) = (error.into(), remedy.into());
        Refusal { code, field: None, errors: Vec::new(), error, remedy, retry: true }
    }

    /// Internal error.
    pub fn bug(error: impl Into<String>) -> Self {
        Refusal::new(Code::Bug, error, "this is a bug: report it with the log")
    }

    /// A guest uses what was to be stopped without force, of this kind.
    pub fn guest_uses(kind: &str) -> Self {
        let error = format!("a guest is using the {kind}");
        let remedy = format!("unplug the {kind} or shut the guest down first, or take it away with --force");
        Refusal::new(Code::InUse, error, remedy)
    }

    /// All flaws of a form in one.
    pub fn flaws(flaws: &[Flaw]) -> Self {
        let join = |part: fn(&Flaw) -> &str| flaws.iter().map(part).collect::<Vec<_>>().join("; ");
        let each = flaws.iter().map(|Flaw { field, reason, remedy }| FieldError {
            field: (*field).to_owned(),
            error: reason.clone(),
            remedy: remedy.clone(),
        });
        Refusal {
            field: flaws.first().map(|flaw| flaw.field.to_owned()),
            errors: each.filter(|_| flaws.len() > 1).collect(),
            ..Refusal::invalid(join(|flaw| &flaw.reason), join(|flaw| &flaw.remedy))
        }
    }

    /// The same with a code that says more.
    pub fn coded(self, code: Code) -> Self {
        Refusal { code, ..self }
    }

    /// The same because of a field of what was asked.
    pub fn at(self, field: &str) -> Self {
        Refusal { field: Some(field.to_owned()), ..self }
    }

    /// As the interface says it.
    pub fn body(self) -> RefusalBody {
        let Refusal { code, field, errors, error, remedy, .. } = self;
        RefusalBody { field, errors, ..RefusalBody::new(code, error, remedy) }
    }
}

impl From<ioplane_host::vhost_user::HandleError> for Refusal {
    fn from(refused: ioplane_host::vhost_user::HandleError) -> Self {
        use ioplane_host::vhost_user::HandleError as Below;
        match refused {
            Below::Gone => Refusal::missing("the disk has been removed meanwhile", "see `ioplane disk list`"),
            Below::Connected => Refusal::guest_uses("disk"),
            Below::Refused(why) => {
                Refusal::busy(why, "its requests do not end: try again when the disk below answers")
            }
        }
    }
}

impl From<ioplane_storage::StorageError> for Refusal {
    fn from(error: ioplane_storage::StorageError) -> Self {
        use ioplane_storage::StorageError as Below;
        match &error {
            Below::InUse { image, holder } => Refusal::conflict(
                format!("{image} is in use by {holder}"),
                "shut that down, or give this disk a copy of its own",
            )
            .coded(Code::Taken)
            .at("path"),
            Below::NotQuiet { .. } => {
                Refusal::busy(error.to_string(), "wait for the disk below, then try again")
            }
            Below::NotRaw { image, format } => Refusal::invalid(
                format!("{image} looks like a {format} image, and disks are served as raw"),
                // A header that a guest made may name files of the host, and converting would read them.
                format!(
                    "if you made it so, convert it: qemu-img convert -f {} -O raw {image} {image}.raw; if it is a raw disk whose \
                     guest wrote these bytes, never convert it but say so: format = \"raw\" in the configuration, --format raw \
                     on the command line",
                    format.name()
                ),
            )
            .at("format"),
            Below::Size { .. } => Refusal::invalid(error.to_string(), "give another size").at("size"),
            Below::Unsuitable { .. } => {
                Refusal::invalid(error.to_string(), "give another image or other options").at("path")
            }
            Below::Os { source, image, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Refusal::invalid(
                    format!("there is no image {image}"),
                    format!("make it: truncate -s 10G {image}"),
                )
                .at("path")
            }
            Below::Os { .. } => {
                Refusal::failed(error.to_string(), "see `ioplane doctor` for what this host lacks")
            }
        }
    }
}

impl From<ioplane_cores::PoolError> for Refusal {
    fn from(error: ioplane_cores::PoolError) -> Self {
        use ioplane_cores::PoolError as Below;
        match &error {
            Below::NoSuchCore(id) => {
                Refusal::missing(format!("there is no I/O core {id}"), "see `ioplane core list`")
            }
            Below::Taken(id) => Refusal::conflict(
                format!("there is an I/O core {id} already"),
                "give another number, or `ioplane core retire` that one first",
            ),
            Below::Occupied { core, queues } => Refusal::conflict(
                format!("I/O core {core} still serves {queues} queues"),
                format!("move them away first: `ioplane core drain {core}`"),
            )
            .coded(Code::InUse),
            Below::Start { .. } => {
                Refusal::failed(error.to_string(), "raise the limits on threads and open files")
            }
        }
    }
}
