//! Bodies of requests: JSON objects whose fields are known.

use std::collections::BTreeMap;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use ioplane_api::refusal::Code;
use ioplane_api::spec::Form;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_path_to_error::Segment;

use super::BODY;
use crate::config::nearest;
use crate::refusal::Refusal;

pub type Body = Result<Bytes, BytesRejection>;

pub fn form<T: Form + DeserializeOwned>(body: Body) -> Result<T, Refusal> {
    form_up_to(body, BODY)
}

/// The same where no body is one without fields.
pub fn form_or_usual<T: Form + DeserializeOwned + Default>(body: Body) -> Result<T, Refusal> {
    match &body {
        Ok(bytes) if bytes.is_empty() => Ok(T::default()),
        _ => form(body),
    }
}

/// The same of a resource with another limit.
pub fn form_up_to<T: Form + DeserializeOwned>(body: Body, limit: usize) -> Result<T, Refusal> {
    let body = body.map_err(|rejected| match rejected.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Refusal::huge(format!("a body of more than {limit} bytes"), "a form has some hundred")
        }
        _ => Refusal::new(Code::Malformed, rejected.body_text(), "send the body whole"),
    })?;
    read(&body)
}

/// Its fields first: serde would take a list for an object, and a wrong value before an unknown field.
fn read<T: Form + DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let fields: BTreeMap<String, IgnoredAny> = serde_json::from_slice(body).map_err(|error| {
        let remedy = format!("send a JSON object: its fields are {}", T::FIELDS.join(", "));
        Refusal::new(Code::Malformed, format!("the body: {error}"), remedy)
    })?;
    let known = |field: &str| T::FIELDS.contains(&today::<T>(field));
    if let Some(unknown) = fields.keys().find(|field| !known(field)) {
        let remedy = match nearest(unknown, T::FIELDS) {
            Some(near) => format!("write {near}, or leave it out"),
            None => format!("leave it out: there are {}", T::FIELDS.join(", ")),
        };
        let error = format!("the body has no field {:?}", unknown.chars().take(40).collect::<String>());
        return Err(Refusal::new(Code::UnknownField, error, remedy).at(unknown));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    serde_path_to_error::deserialize(&mut json).map_err(|wrong| {
        let at = match wrong.path().iter().next() {
            Some(Segment::Map { key }) => today::<T>(key).to_owned(),
            _ => String::new(),
        };
        let reason = wrong.into_inner().to_string();
        let is_wrong =
            |field: &&&str| **field == at || reason.starts_with(&format!("missing field `{field}`"));
        match T::FIELDS.iter().find(is_wrong) {
            Some(field) => {
                let remedy = "correct this field: GET /v1/openapi.json says what it may be";
                Refusal::invalid(format!("{field}: {reason}"), remedy).at(field)
            }
            None => Refusal::invalid(format!("the body: {reason}"), "send the fields of this resource"),
        }
    })
}

/// The name that a field has today, which may be another one than it had before.
fn today<T: Form>(field: &str) -> &str {
    T::OLD_FIELDS.iter().find(|(old, _)| *old == field).map_or(field, |(_, new)| *new)
}

#[cfg(test)]
mod tests {
    use ioplane_api::request::{MoveForm, UpgradeForm};
    use ioplane_api::spec::{DiskForm, NicChangeForm, NicForm, VlanSpec};

    use super::*;

    fn refused<T: Form + DeserializeOwned>(body: &str) -> (Code, Option<String>) {
        let refused = read::<T>(body.as_bytes()).err().unwrap_or_else(|| panic!("{body} was read"));
        assert!(!refused.remedy.is_empty());
        (refused.code, refused.field)
    }

    #[test]
    fn a_refusal_names_its_field() {
        let at = |field: &str| Some(field.to_owned());
        for body in ["", "[]", "{", "null", "\"x\"", "{} {}"] {
            assert_eq!(refused::<DiskForm>(body), (Code::Malformed, None), "{body}");
        }
        assert_eq!(refused::<DiskForm>(r#"{"direct": 5, "paht": "/x"}"#), (Code::UnknownField, at("paht")));
        assert_eq!(refused::<DiskForm>(r#"{"direct": "maybe"}"#), (Code::Invalid, at("direct")));
        assert_eq!(refused::<DiskForm>(r#"{"queues": -1}"#), (Code::Invalid, at("queues")));
        assert_eq!(refused::<NicForm>(r#"{"vlan": 4095}"#), (Code::Invalid, at("vlan")));
        assert_eq!(refused::<NicChangeForm>(r#"{"link": 1}"#), (Code::Invalid, at("link")));
        assert_eq!(
            refused::<NicChangeForm>(r#"{"tx_frame_limit": "many"}"#),
            (Code::Invalid, at("tx_frame_limit"))
        );
        assert_eq!(refused::<MoveForm>(r#"{"disk": "a", "queue": 0}"#), (Code::Invalid, at("core")));
        assert_eq!(
            refused::<MoveForm>(r#"{"disk": "a", "queue": 70000, "core": 0}"#),
            (Code::Invalid, at("queue"))
        );
    }

    #[test]
    fn what_may_be_written_in_two_ways_is_read_in_both() {
        let nic: NicForm = read(br#"{"vlan": 10}"#).unwrap();
        assert_eq!(nic.vlan, Some(VlanSpec::Access(10)));
        let moved: MoveForm = read(br#"{"device": "a", "queue": 0, "core": 1}"#).unwrap();
        assert_eq!(moved.disk, "a");
        let disk: DiskForm = read(br#"{"memory": "1M", "twin": "/run/a.sock"}"#).unwrap();
        assert_eq!(disk.migration_socket.as_deref(), Some(std::path::Path::new("/run/a.sock")));
        let at = |field: &str| Some(field.to_owned());
        assert_eq!(refused::<DiskForm>(r#"{"twin": 5}"#), (Code::Invalid, at("migration_socket")));
        assert_eq!(refused::<DiskForm>(r#"{"twin": "/a", "migration_socket": "/a"}"#).0, Code::Invalid);
        let usual: UpgradeForm = form_or_usual(Ok(Bytes::new())).unwrap();
        assert!(usual.binary.is_none());
    }
}
