//! The interface as an OpenAPI document, made of [`Operation`] and of the types that it names.

use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::operation::{BodyNeed, JSON, Operation};
use crate::refusal::{MEDIA, RefusalBody};

/// Where the schemas of types are.
const SCHEMAS: &str = "/components/schemas";

/// The document (OpenAPI 3.1, whose schemas are JSON Schema 2020-12). `version` is the program's.
pub fn document(version: &str) -> Value {
    let settings = || SchemaSettings::draft2020_12().with(|it| it.definitions_path = SCHEMAS.into());
    // What a field is that may be left out differs between what is read and what is written.
    let mut read = settings().for_deserialize().into_generator();
    let mut written = settings().for_serialize().into_generator();
    let refusal = written.subschema_for::<RefusalBody>();
    let mut paths: Map<String, Value> = Map::new();
    for operation in Operation::ALL {
        let described = describe(*operation, &mut read, &mut written, &refusal);
        let path = paths.entry(operation.path()).or_insert_with(|| json!({}));
        path[operation.method().word().to_ascii_lowercase()] = described;
    }
    let mut schemas = written.take_definitions(true);
    // A type that is both is read as strictly as it is written.
    schemas.extend(read.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ioplane",
            "version": version,
            "description": "The control interface of the ioplane daemon: HTTP on its control socket. docs/guide/errors.md has the codes of errors.",
            "license": { "name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT" },
        },
        "servers": [{ "url": "http://ioplane", "description": "any host name: the control socket is a unix socket" }],
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

fn describe(
    operation: Operation,
    read: &mut SchemaGenerator,
    written: &mut SchemaGenerator,
    refusal: &Schema,
) -> Value {
    let in_path = operation.path().split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let in_path = in_path.map(|name| {
        let kind = if name == "id" { "integer" } else { "string" };
        json!({ "name": name, "in": "path", "required": true, "schema": { "type": kind } })
    });
    let in_query = operation.query().iter().map(|key| {
        let schema = json!({ "type": key.holds });
        json!({ "name": key.name, "in": "query", "description": key.about, "schema": schema })
    });
    let mut responses = Map::new();
    for reply in operation.replies(written) {
        let about = if reply.status == 201 { "It is new." } else { "It is so." };
        let content = json!({ reply.media: { "schema": reply.schema } });
        responses.insert(reply.status.to_string(), json!({ "description": about, "content": content }));
    }
    let refused =
        json!({ "description": "Nothing has changed.", "content": { MEDIA: { "schema": refusal } } });
    responses.insert("default".to_owned(), refused);
    let mut described = json!({
        "operationId": operation.name(),
        "summary": operation.about(),
        "responses": responses,
    });
    let parameters: Vec<Value> = in_path.chain(in_query).collect();
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    if let Some(schema) = operation.body(read) {
        let required = operation.need() == BodyNeed::Required;
        described["requestBody"] = json!({ "required": required, "content": { JSON: { "schema": schema } } });
    }
    described
}
