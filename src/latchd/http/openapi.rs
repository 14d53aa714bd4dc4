//! The description of the routes, for programs that make clients (OpenAPI 3.1). Pure: no I/O and no
//! clock.

use super::body::{BodyField, MAX_BODY_LEN};
use super::request::SESSION_HEADER;
use super::routes::{Method, Resource, Route, Verb, ROUTES};
use crate::protocol::limits::MAX_KEY_LEN;
use crate::protocol::stats::put;

/// The codes of errors, each with the statuses that it comes with.
const ERRORS: &[(u16, &str)] = &[
    (400, "bad_request"),
    (401, "unauthorized"),
    (403, "forbidden"),
    (404, "not_found or not_held"),
    (405, "method_not_allowed"),
    (
        409,
        "limit_mismatch, already_enqueued, not_enqueued or lease_expired",
    ),
    (410, "session_gone"),
    (429, "rate_limited"),
    (
        503,
        "max_locks, max_waiters, max_sessions, max_sessions_per_ip, draining, not_leader or \
         unavailable",
    ),
];

/// Describes the routes, as JSON. Without `with_changes`, describes only those that change nothing.
pub(super) fn describe(with_changes: bool) -> Vec<u8> {
    let mut out = Vec::new();
    put!(
        &mut out,
        "{{\"openapi\":\"3.1.0\",\"info\":{{\"title\":\"latchd\",\"version\":\"{}\"}},\"paths\":{{",
        env!("CARGO_PKG_VERSION")
    );
    let offered = |route: &&Route| with_changes || !route.resource.is_change();
    for (at, route) in ROUTES.iter().filter(offered).enumerate() {
        if at > 0 {
            out.push(b',');
        }
        describe_route(route, &mut out);
    }
    out.extend(b"},\"components\":{\"securitySchemes\":{\"bearer\":");
    out.extend(b"{\"type\":\"http\",\"scheme\":\"bearer\"}},\"schemas\":{\"Error\":");
    out.extend(b"{\"type\":\"object\",\"required\":[\"error\"],\"properties\":");
    out.extend(b"{\"error\":{\"type\":\"string\"},\"detail\":{\"type\":\"string\"}}}}}}\n");
    out
}

/// No two routes have the same path, so each is the only operation of its path.
fn describe_route(route: &Route, out: &mut Vec<u8>) {
    let Route {
        method,
        path,
        resource,
        summary,
    } = route;
    let method = match method {
        Method::Get => "get",
        Method::Post => "post",
        Method::Delete => "delete",
    };
    put!(out, "\"{path}\":{{\"{method}\":{{\"summary\":\"{summary}\"");
    let security = if resource.is_open() {
        "{}"
    } else {
        "{},{\"bearer\":[]}"
    };
    put!(out, ",\"security\":[{security}]");
    describe_parameters(route, out);
    if let Resource::Key(verb, kind) = resource {
        describe_body(verb.fields(*kind), out);
    }
    out.extend(b",\"responses\":{");
    describe_success(*resource, out);
    if resource.is_change() {
        for (status, codes) in ERRORS {
            put!(out, ",\"{status}\":{{\"description\":\"{codes}\"");
            out.extend(b",\"content\":{\"application/json\":{\"schema\":");
            out.extend(b"{\"$ref\":\"#/components/schemas/Error\"}}}}");
        }
    }
    out.extend(b"}}}");
}

fn describe_parameters(route: &Route, out: &mut Vec<u8>) {
    let name = route.path.split(['{', '}']).nth(1);
    let Some(name) = name else {
        return;
    };
    put!(
        out,
        ",\"parameters\":[{{\"name\":\"{name}\",\"in\":\"path\",\"required\":true,\
         \"schema\":{{\"type\":\"string\",\"minLength\":1,\"maxLength\":{MAX_KEY_LEN}}}}}"
    );
    if let Resource::Key(verb, _) = route.resource {
        let is_required = matches!(verb, Verb::Enqueue | Verb::Wait);
        put!(
            out,
            ",{{\"name\":\"{SESSION_HEADER}\",\"in\":\"header\",\"required\":{is_required},\
             \"schema\":{{\"type\":\"string\"}}}}"
        );
    }
    out.push(b']');
}

fn describe_body(fields: &[BodyField], out: &mut Vec<u8>) {
    let required: Vec<String> = fields
        .iter()
        .filter(|field| field.is_required)
        .map(|field| format!("\"{}\"", field.name))
        .collect();
    put!(
        out,
        ",\"requestBody\":{{\"description\":\"At most {MAX_BODY_LEN} bytes\",\"required\":{},\
         \"content\":{{\"application/json\":{{\"schema\":{{\"type\":\"object\",\
         \"additionalProperties\":false,\"required\":[{}],\"properties\":{{",
        !required.is_empty(),
        required.join(",")
    );
    for (at, field) in fields.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        put!(
            out,
            "\"{}\":{{\"description\":\"{}\",",
            field.name,
            field.meaning
        );
        match field.range {
            Some((lowest, highest)) => put!(
                out,
                "\"type\":\"integer\",\"minimum\":{lowest},\"maximum\":{highest}}}"
            ),
            None => out.extend(b"\"type\":\"string\"}"),
        }
    }
    out.extend(b"}}}}}");
}

/// The answer to a request that is carried out.
fn describe_success(resource: Resource, out: &mut Vec<u8>) {
    let fields: &[(&str, &str)] = match resource {
        Resource::NewSession => &[("session_id", "string"), ("idle_timeout_s", "integer")],
        Resource::Key(Verb::Renew, _) => &[("remaining_s", "integer")],
        Resource::Key(Verb::Acquire | Verb::Enqueue | Verb::Wait, _) => &[
            ("status", "string"),
            ("token", "string"),
            ("lease_ttl_s", "integer"),
        ],
        Resource::Session | Resource::SessionPing | Resource::Key(Verb::Release, _) => {
            out.extend(b"\"204\":{\"description\":\"Done\"}");
            return;
        }
        _ => {
            out.extend(b"\"200\":{\"description\":\"What was asked for\"}");
            return;
        }
    };
    out.extend(b"\"200\":{\"description\":\"Done\",\"content\":{\"application/json\":{\"schema\":");
    out.extend(b"{\"type\":\"object\",\"properties\":{");
    for (at, (name, kind)) in fields.iter().enumerate() {
        let separator = if at > 0 { "," } else { "" };
        put!(out, "{separator}\"{name}\":{{\"type\":\"{kind}\"}}");
    }
    out.extend(b"}}}}}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn described(with_changes: bool) -> Value {
        serde_json::from_slice(&describe(with_changes)).expect("JSON")
    }

    #[test]
    fn every_route_is_described_and_no_other() {
        for with_changes in [true, false] {
            let description = described(with_changes);
            let paths = description["paths"].as_object().expect("an object");
            let offered = |route: &&Route| with_changes || !route.resource.is_change();
            assert_eq!(paths.len(), ROUTES.iter().filter(offered).count());
            for route in ROUTES.iter().filter(offered) {
                assert!(paths.contains_key(route.path), "{}", route.path);
            }
        }
    }

    #[test]
    fn a_body_has_the_fields_that_are_read() {
        let description = described(true);
        let schema = &description["paths"]["/v1/semaphores/{key}"]["post"]["requestBody"]
            ["content"]["application/json"]["schema"];
        assert_eq!(schema["required"], serde_json::json!(["limit"]));
        assert_eq!(schema["properties"]["limit"]["maximum"], 1_048_576);
        let properties = schema["properties"].as_object().expect("an object");
        assert_eq!(properties.len(), 3);
    }
}
