//! Why the daemon did not do what it was asked, or the command line what was typed: one shape and one list of codes for both.
//!
//! A refusal is a problem of RFC 9457 (`application/problem+json`). Programs read `code`, `field` and `retryable`, which are stable; people
//! read `error` and `remedy`, which are prose.

use serde::{Deserialize, Serialize};

/// Which kind of refusal; decides the HTTP status. What the command line refuses by itself has the status of its kind too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// 404: no such thing.
    Missing,
    /// 409: it conflicts with the current state.
    Conflict,
    /// 413: larger than any valid one.
    Huge,
    /// 405: not on this resource.
    Method,
    /// 422: it is invalid.
    Invalid,
    /// 503: not now; the same again may work.
    Busy,
    /// 500: the system failed.
    Failed,
}

impl RefusalKind {
    const ALL: [RefusalKind; 7] = [
        RefusalKind::Missing,
        RefusalKind::Conflict,
        RefusalKind::Huge,
        RefusalKind::Method,
        RefusalKind::Invalid,
        RefusalKind::Busy,
        RefusalKind::Failed,
    ];

    /// That of an HTTP status; [`RefusalKind::Failed`] for one that no refusal has.
    pub fn of(status: u16) -> Self {
        RefusalKind::ALL.into_iter().find(|kind| kind.status() == status).unwrap_or(RefusalKind::Failed)
    }

    /// The HTTP status.
    pub fn status(self) -> u16 {
        match self {
            RefusalKind::Missing => 404,
            RefusalKind::Method => 405,
            RefusalKind::Conflict => 409,
            RefusalKind::Huge => 413,
            RefusalKind::Invalid => 422,
            RefusalKind::Failed => 500,
            RefusalKind::Busy => 503,
        }
    }
}

macro_rules! codes {
    ($($variant:ident $word:literal $kind:ident $retry:literal, $title:literal, $remedy:literal;)*) => {
        /// What went wrong, for programs. A code never changes its meaning; new ones come. docs/guide/errors.md has the table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Code {
            $(#[doc = $title] $variant,)*
        }

        impl Code {
            /// All of them, in the order of the table.
            pub const ALL: &[Code] = &[$(Code::$variant,)*];

            /// As it stands in `code`.
            pub fn word(self) -> &'static str {
                match self { $(Code::$variant => $word,)* }
            }

            /// The kind of refusal that it is.
            pub fn kind(self) -> RefusalKind {
                match self { $(Code::$variant => RefusalKind::$kind,)* }
            }

            /// Whether the same request may succeed later without anybody changing anything.
            pub fn retryable(self) -> bool {
                match self { $(Code::$variant => $retry,)* }
            }

            /// What it means, in a sentence.
            pub fn title(self) -> &'static str {
                match self { $(Code::$variant => $title,)* }
            }

            /// What a program can do.
            pub fn advice(self) -> &'static str {
                match self { $(Code::$variant => $remedy,)* }
            }
        }
    };
}

codes! {
    UnknownRoute "unknown_route" Missing false, "There is no such resource.", "`GET /v1/openapi.json` lists all.";
    NotFound "not_found" Missing false, "There is no disk, NIC, switch, group, PCI function, port, core, queue, model or VM of this name.", "List what there is.";
    UnknownMethod "unknown_method" Method false, "The resource does not have this method.", "`GET /v1/openapi.json` lists the methods of each.";
    Exists "exists" Conflict false, "Something of this name exists and differs from the request.", "Read it; remove it first, or take another name. `field` is what differs.";
    Taken "taken" Conflict false, "Another one uses this address, socket, image or interface.", "Give another value in `field`, or free it first.";
    InUse "in_use" Conflict false, "A guest uses it, or something is plugged into it.", "Unplug it or shut the guest down, or use `?force=true`.";
    NotServed "not_served" Conflict true, "It is known and cannot be served; the daemon retries.", "Correct what `error` names, then wait or reload.";
    LosesData "loses_data" Conflict false, "The guest would lose data.", "Confirm with `shrink`.";
    Conflict "conflict" Conflict false, "The request conflicts with the current state.", "Read `error` and `remedy`.";
    TooLarge "too_large" Huge false, "The body is larger than any valid one.", "Send less.";
    Malformed "malformed" Invalid false, "The body is not a JSON object.", "Send an object with the fields of the resource.";
    UnknownField "unknown_field" Invalid false, "The body has a field that the resource does not have.", "Leave `field` out; `GET /v1/openapi.json` lists the fields.";
    UnknownQuery "unknown_query" Invalid false, "The resource has no such key in its query.", "Leave `field` out.";
    Invalid "invalid" Invalid false, "A value is invalid, or conflicts with another.", "Correct `field`; `errors` has every field.";
    Configuration "configuration" Invalid false, "The configuration has problems; nothing was changed.", "Correct the lines that `error` names.";
    Busy "busy" Busy true, "It is busy with another change.", "Try again in a moment.";
    Upgrading "upgrading" Busy true, "The daemon is handing everything over to another process.", "Try again: the new process answers on the same socket.";
    Unreachable "unreachable" Busy true, "No daemon answers on the control socket. The command line reports this, not a daemon.", "Start the daemon, or name its socket.";
    Usage "usage" Invalid false, "The command line cannot be parsed, or its options conflict. The command line reports this, not a daemon.", "Read `remedy`, or `ioplane help`.";
    Unsupported "unsupported" Conflict false, "This device, or the program that is to use it, does not have what was asked for. The command line reports this, not a daemon.", "Read `error` and `remedy`.";
    BadAnswer "bad_answer" Failed false, "The answer of the daemon ended early, or is not what this version reads. The command line reports this, not a daemon.", "See `ioplane status` for what was done; compare the versions.";
    CommandFailed "command_failed" Failed false, "The command failed on this host. The command line reports this, not a daemon.", "Read `error` and `remedy`.";
    Failed "failed" Failed false, "The system below failed.", "Read `error` and `remedy`; see the log of the daemon.";
    Bug "bug" Failed false, "Internal error.", "Report it with the log.";
}

impl Code {
    /// The code of this name.
    pub fn of(word: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.word() == word)
    }

    /// The one for what has no better.
    pub fn usual(kind: RefusalKind) -> Code {
        match kind {
            RefusalKind::Missing => Code::NotFound,
            RefusalKind::Conflict => Code::Conflict,
            RefusalKind::Huge => Code::TooLarge,
            RefusalKind::Method => Code::UnknownMethod,
            RefusalKind::Invalid => Code::Invalid,
            RefusalKind::Busy => Code::Busy,
            RefusalKind::Failed => Code::Failed,
        }
    }

    /// Its problem type (RFC 9457, 3.1.1). It names the code and is no address.
    pub fn uri(self) -> String {
        format!("{URI}{}", self.word())
    }
}

/// What the problem types begin with.
pub const URI: &str = "urn:ioplane:error:";

/// The content type of a refusal.
pub const MEDIA: &str = "application/problem+json";

/// How a remedy of [`Code::Exists`] names the request that shows what is there; the command line names its command instead.
pub const GET_SHOWS: &str = "GET shows how it is";

/// A refusal as JSON: a problem of RFC 9457.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct RefusalBody {
    /// The problem type: `urn:ioplane:error:` and the code.
    #[serde(rename = "type")]
    pub uri: String,
    /// What the code means.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The same as `error`.
    pub detail: String,
    /// What went wrong, for programs: one of the codes of docs/guide/errors.md.
    pub code: String,
    /// The field of the body, or the key of the query, that is wrong.
    pub field: Option<String>,
    /// The same request may succeed later without anybody changing anything.
    pub retryable: bool,
    /// Every field that is wrong, if several are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// What is wrong.
    pub error: String,
    /// What to do.
    pub remedy: String,
}

/// One field of a body that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FieldError {
    /// The field.
    pub field: String,
    /// What is wrong.
    pub error: String,
    /// What to do.
    pub remedy: String,
}

impl RefusalBody {
    /// One without a field.
    pub fn new(code: Code, error: impl Into<String>, remedy: impl Into<String>) -> Self {
        let error = error.into();
        RefusalBody {
            uri: code.uri(),
            title: code.title().to_owned(),
            status: code.kind().status(),
            detail: error.clone(),
            code: code.word().to_owned(),
            retryable: code.retryable(),
            error,
            remedy: remedy.into(),
            ..RefusalBody::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_word_of_its_own() {
        for (at, code) in Code::ALL.iter().enumerate() {
            assert_eq!(Code::of(code.word()), Some(*code));
            assert!(!Code::ALL[..at].iter().any(|other| other.word() == code.word()), "{code:?}");
            assert!(code.title().ends_with('.') && code.advice().ends_with('.'), "{code:?}");
        }
    }

    /// `IOPLANE_WRITE_DOCS=1 cargo test -p ioplane-api` writes the table anew.
    #[test]
    fn the_page_of_errors_has_every_code() {
        const BEGIN: &str = "<!-- codes: written by `IOPLANE_WRITE_DOCS=1 cargo test -p ioplane-api` -->\n";
        const END: &str = "<!-- end of codes -->\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/errors.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (table, after) = rest.split_once(END).unwrap();
        let mut wanted =
            "| code | status | retry | what it means | what to do |\n|---|---|---|---|---|\n".to_owned();
        for code in Code::ALL {
            let retry = if code.retryable() { "yes" } else { "no" };
            let (word, status) = (code.word(), code.kind().status());
            wanted += &format!("| `{word}` | {status} | {retry} | {} | {} |\n", code.title(), code.advice());
        }
        if std::env::var("IOPLANE_WRITE_DOCS").is_ok_and(|value| value == "1") {
            std::fs::write(path, format!("{before}{BEGIN}{wanted}{END}{after}")).unwrap();
        } else {
            assert_eq!(table, wanted, "IOPLANE_WRITE_DOCS=1 cargo test -p ioplane-api writes the table");
        }
    }

    #[test]
    fn a_refusal_of_an_older_daemon_is_read() {
        let body: RefusalBody = serde_json::from_str(r#"{"error": "no", "remedy": "yes"}"#).unwrap();
        assert_eq!((body.error.as_str(), body.remedy.as_str(), body.code.as_str()), ("no", "yes", ""));
        // Nor does one of a newer one stop it.
        let newer = r#"{"error": "no", "remedy": "yes", "code": "new", "instance": "/x"}"#;
        assert_eq!(serde_json::from_str::<RefusalBody>(newer).unwrap().code, "new");
    }

    #[test]
    fn a_status_says_the_kind() {
        for code in Code::ALL {
            assert_eq!(RefusalKind::of(code.kind().status()), code.kind(), "{code:?}");
        }
        assert_eq!(RefusalKind::of(418), RefusalKind::Failed);
    }
}
