//! The OpenAPI document as a promise: every answer that is recorded is one that it describes.

use std::cell::RefCell;
use std::collections::BTreeMap;

use jsonschema::Validator;
use serde_json::{Value, json};

use super::daemon::TestDaemon;

/// The document of a daemon.
pub struct Contract {
    document: Value,
    validators: RefCell<BTreeMap<String, Validator>>,
}

impl Contract {
    pub fn of(daemon: &TestDaemon) -> Contract {
        let (status, document) = daemon.http("GET", "/v1/openapi.json", "");
        assert_eq!((status, &document["openapi"]), (200, &json!("3.1.0")));
        Contract { document, validators: RefCell::default() }
    }

    /// Panics unless the document has this answer to this request.
    pub fn check(&self, method: &str, target: &str, status: u16, media: &str, answer: &Value) {
        let request = format!("{method} {target}");
        let path = target.split('?').next().unwrap();
        let (schema, by) = match self.operation(method, path) {
            Some((operation, by)) => {
                let responses = &operation["responses"];
                let response = responses.get(status.to_string()).unwrap_or(&responses["default"]);
                let schema = response["content"].get(media).map(|content| &content["schema"]);
                assert!(status >= 300 || responses.get(status.to_string()).is_some(), "{request}: {status}");
                (schema.unwrap_or_else(|| panic!("{request}: {status} with {media}")).clone(), by)
            }
            // No resource, or no such method of it.
            None => {
                assert!(
                    matches!(status, 404 | 405),
                    "{request} is not in the document, and is answered with {status}"
                );
                (json!({ "$ref": "#/components/schemas/RefusalBody" }), "no operation".to_owned())
            }
        };
        let mut validators = self.validators.borrow_mut();
        let validator = validators.entry(format!("{by} {status}")).or_insert_with(|| self.validator(schema));
        let errors: Vec<String> =
            validator.iter_errors(answer).map(|error| format!("{}: {error}", error.instance_path)).collect();
        assert!(errors.is_empty(), "{request}: {status}: {errors:#?}");
    }

    fn operation(&self, method: &str, path: &str) -> Option<(&Value, String)> {
        let fits = |template: &str| {
            let (template, path): (Vec<&str>, Vec<&str>) =
                (template.split('/').collect(), path.split('/').collect());
            template.len() == path.len()
                && template.iter().zip(path).all(|(a, b)| a.starts_with('{') || *a == b)
        };
        let (template, methods) = self.document["paths"].as_object()?.iter().find(|(path, _)| fits(path))?;
        Some((methods.get(method.to_ascii_lowercase())?, format!("{method} {template}")))
    }

    /// References begin at the root of the document.
    fn validator(&self, schema: Value) -> Validator {
        let whole = json!({ "components": self.document["components"], "allOf": [schema] });
        jsonschema::draft202012::new(&whole).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The document itself.
    pub fn document(&self) -> &Value {
        &self.document
    }
}
