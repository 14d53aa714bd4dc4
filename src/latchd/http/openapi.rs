//! The description of the routes, for programs that make clients (OpenAPI 3.1). Pure: no I/O and no
//! clock.

use super::body::MAX_BODY_LEN;
use super::reply::JSON;
use super::request::SESSION_HEADER;
use super::routes::{offered, BodyField, FieldValue, Method, Resource, Route};
use crate::wire::limits::MAX_KEY_LEN;

/// The codes of errors, each with the statuses that it comes with.
#[rustfmt::skip]
const ERRORS: &[(u16, &str)] = &[
    (400, "bad_request"),
    (401, "unauthorized"),
    (403, "forbidden"),
    (404, "not_found or not_held"),
    (405, "method_not_allowed"),
    (408, "timeout"),
    (409, "limit_mismatch, already_enqueued, not_enqueued or lease_expired"),
    (410, "session_gone"),
    (429, "rate_limited"),
    (503, "max_locks, max_waiters, max_sessions, max_sessions_per_ip, draining, not_leader or \
           unavailable"),
];

/// What is behind the paths.
const COMPONENTS: &str = concat!(
    r#""components":{"securitySchemes":{"bearer":{"type":"http","scheme":"bearer"}},"#,
    r#""schemas":{"Error":{"type":"object","required":["error"],"#,
    r#""properties":{"error":{"type":"string"},"detail":{"type":"string"}}}}}"#,
);

/// Describes the routes, as JSON. Without `with_changes`, describes only those that change nothing.
pub(super) fn describe(with_changes: bool) -> Vec<u8> {
    let info = concat!(
        r#"{"title":"latchd","version":""#,
        env!("CARGO_PKG_VERSION"),
        r#""}"#
    );
    let paths = joined(offered(with_changes), describe_route);
    let about = format!(r#""openapi":"3.1.0","info":{info},"servers":[{{"url":"/"}}]"#);
    let whole = format!(r#"{about},"paths":{{{paths}}},{COMPONENTS}"#);
    format!("{{{whole}}}\n").into_bytes()
}

/// Describes each item, with commas between them.
fn joined<T>(items: impl IntoIterator<Item = T>, describe: impl Fn(T) -> String) -> String {
    Vec::from_iter(items.into_iter().map(describe)).join(",")
}

/// No two routes have the same path, so each is the only operation of its path.
fn describe_route(route: &Route) -> String {
    let Route { path, id, .. } = route;
    let method = match route.method {
        Method::Get => "get",
        Method::Post => "post",
        Method::Delete => "delete",
    };
    let with_secret = r#"{},{"bearer":[]}"#;
    let security = route.needs.as_ref().map_or("{}", |_| with_secret);
    let (parameters, body, mut responses) = (parameters(route), body(route), success(route));
    if route.is_change() {
        responses = responses + "," + &joined(ERRORS, describe_error);
    }
    let about = format!(r#""operationId":"{id}","security":[{security}]"#);
    let about = format!(r#"{about}{parameters}{body},"responses":{{{responses}}}"#);
    format!(r#""{path}":{{"{method}":{{{about}}}}}"#)
}

fn describe_error((status, codes): &(u16, &str)) -> String {
    let content = content(JSON, r##""$ref":"#/components/schemas/Error""##);
    format!(r#""{status}":{{"description":"{codes}",{content}}}"#)
}

fn parameters(route: &Route) -> String {
    let Some(name) = route.path.split(['{', '}']).nth(1) else {
        return String::new();
    };
    let schema = format!(r#"{{"type":"string","minLength":1,"maxLength":{MAX_KEY_LEN}}}"#);
    let in_path = format!(r#"{{"name":"{name}","in":"path","required":true,"schema":{schema}}}"#);
    let Resource::Key(command, _) = route.resource else {
        return format!(r#","parameters":[{in_path}]"#);
    };
    let is_required = matches!(command, "e" | "se" | "w" | "sw");
    let session = format!(r#""name":"{SESSION_HEADER}","in":"header","required":{is_required}"#);
    format!(r#","parameters":[{in_path},{{{session},"schema":{{"type":"string"}}}}]"#)
}

fn body(route: &Route) -> String {
    let Resource::Key(_, fields) = route.resource else {
        return String::new();
    };
    let is_required = fields.iter().any(|(_, is_required, ..)| *is_required);
    let about = format!(r#""description":"At most {MAX_BODY_LEN} bytes","required":{is_required}"#);
    let schema = r#""additionalProperties":false,"#.to_owned() + &object(fields);
    format!(r#","requestBody":{{{about},{}}}"#, content(JSON, &schema))
}

/// The answer if the server does what is asked.
fn success(route: &Route) -> String {
    let (content_type, fields) = route.answer;
    let content = match content_type {
        "" => return r#""204":{"description":"Done"}"#.to_owned(),
        JSON => content(JSON, &object(fields)),
        other => content(other, r#""type":"string""#),
    };
    format!(r#""200":{{"description":"Done",{content}}}"#)
}

fn content(content_type: &str, schema: &str) -> String {
    format!(r#""content":{{"{content_type}":{{"schema":{{{schema}}}}}}}"#)
}

/// An object in JSON with these fields.
fn object(fields: &[BodyField]) -> String {
    let required = fields.iter().filter(|(_, is_required, ..)| *is_required);
    let required = joined(required, |(name, ..)| format!("{name:?}"));
    let properties = joined(fields, |(name, _, value, meaning)| {
        let value = match value {
            FieldValue::Number(lowest, highest) => {
                format!(r#""integer","minimum":{lowest},"maximum":{highest}"#)
            }
            FieldValue::Text => r#""string""#.to_owned(),
            FieldValue::OneOf(words) => format!(r#""string","enum":{words:?}"#),
        };
        format!(r#""{name}":{{"description":"{meaning}","type":{value}}}"#)
    });
    format!(r#""type":"object","required":[{required}],"properties":{{{properties}}}"#)
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
            assert_eq!(paths.len(), offered(with_changes).count());
            for route in offered(with_changes) {
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
