//! HTTP requests: what a client asks for, and whether it may have it. Pure: no I/O and no clock.

use core::net::IpAddr;

use httparse::{Error, Status, EMPTY_HEADER};

use crate::base64;
use crate::text::in_brackets;

/// The maximum length of a request head in bytes, not counting the extra room for the secret.
pub(super) const MAX_HEAD_LEN: usize = 8 * 1024;

/// The maximum number of headers in a request.
const MAX_HEADERS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Health,
    Ready,
    Metrics,
    /// The JSON that `stats` returns without a key line. The next two are the JSON for the key
    /// lines `holders` and `counters`.
    Keys,
    Holders,
    Counters,
    /// The samples of the last five minutes, as JSON.
    History,
    /// The HTML page. The next three are its stylesheet, script and icon.
    Page,
    Style,
    Script,
    Icon,
}

const RESOURCES: [(&str, Resource); 11] = [
    ("/health", Resource::Health),
    ("/ready", Resource::Ready),
    ("/metrics", Resource::Metrics),
    ("/v1/stats", Resource::Keys),
    ("/v1/stats/holders", Resource::Holders),
    ("/v1/stats/counters", Resource::Counters),
    ("/v1/stats/history", Resource::History),
    ("/", Resource::Page),
    ("/page.css", Resource::Style),
    ("/page.js", Resource::Script),
    ("/icon.svg", Resource::Icon),
];

impl Resource {
    /// Whether a health check may ask for this without the secret.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Resource::Health | Resource::Ready)
    }
}

/// A request that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrived {
    /// The request is a HEAD, so the answer has no body, even if it is a refusal.
    pub(super) is_head: bool,
    pub(super) request: Result<HttpRequest, HttpRefusal>,
}

/// A request that can be answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HttpRequest {
    pub(super) resource: Resource,
    /// The host name by which the client addressed this server.
    pub(super) host: Option<String>,
    /// The secret in the header `Authorization`.
    pub(super) secret: Option<Vec<u8>>,
}

/// Why a request cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpRefusal {
    Malformed,
    NotFound,
    OtherMethod,
    TooLong,
}

/// Reads the head of a request, up to `max_len` bytes long. `read` fills a buffer and returns the
/// number of bytes that it has put there. Returns `None` if the input ends before the head does.
pub(super) fn read(max_len: usize, mut read: impl FnMut(&mut [u8]) -> usize) -> Option<Arrived> {
    let (mut head, mut len) = (Vec::new(), 0);
    let request = loop {
        if len == max_len {
            break Err(HttpRefusal::TooLong);
        }
        if len == head.len() {
            head.resize((2 * len).clamp(1024, max_len), 0);
        }
        match read(&mut head[len..]) {
            0 => return None,
            read_len => len += read_len,
        }
        if let Some(request) = parse(&head[..len]).transpose() {
            break request;
        }
    };
    Some(Arrived {
        is_head: is_head(&head[..len]),
        request,
    })
}

/// Whether the first word of a request is HEAD. Ignores empty lines before it, as the parser does.
fn is_head(mut head: &[u8]) -> bool {
    while let Some(rest) = head.strip_prefix(b"\r\n").or(head.strip_prefix(b"\n")) {
        head = rest;
    }
    head.starts_with(b"HEAD ")
}

/// Parses the head of a request; `None` if the head has not arrived in full.
fn parse(bytes: &[u8]) -> Result<Option<HttpRequest>, HttpRefusal> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    match head.parse(bytes) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) => return Ok(None),
        Err(Error::TooManyHeaders) => return Err(HttpRefusal::TooLong),
        Err(_) => return Err(HttpRefusal::Malformed),
    }
    if !matches!(head.method, Some("GET" | "HEAD")) {
        return Err(HttpRefusal::OtherMethod);
    }
    let target = head.path.unwrap_or_default();
    let target = target.split_once('?').map_or(target, |(target, _)| target);
    let (authority, path) = parts(target);
    let found = RESOURCES.iter().find(|(known, _)| *known == path);
    let (_, resource) = found.ok_or(HttpRefusal::NotFound)?;
    let named = |name: &'static str| {
        let named = head.headers.iter();
        named.filter(move |header| header.name.eq_ignore_ascii_case(name))
    };
    let mut hosts = named("host");
    let host = hosts.next();
    let host = host.map(|host| std::str::from_utf8(host.value));
    let host = host.transpose().map_err(|_| HttpRefusal::Malformed)?;
    // An HTTP/1.0 client may omit Host; browsers always send it.
    if hosts.next().is_some() || (host.is_none() && head.version == Some(1)) {
        return Err(HttpRefusal::Malformed);
    }
    Ok(Some(HttpRequest {
        resource: *resource,
        // An authority in the target overrides the Host header.
        host: authority.or(host).map(str::to_owned),
        secret: named("authorization").find_map(|header| secret(header.value)),
    }))
}

/// Splits a target into its authority and its path. Only a target in absolute form has an
/// authority.
fn parts(target: &str) -> (Option<&str>, &str) {
    match target.split_once("://") {
        Some((_, rest)) if !target.starts_with('/') => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            (Some(authority), path)
        }
        _ => (None, target),
    }
}

/// The secret in the value of `Authorization`: a Bearer token, or the password of Basic
/// authentication with any user name. Basic is accepted so that browsers can prompt for the secret.
fn secret(value: &[u8]) -> Option<Vec<u8>> {
    let at = value.iter().position(|byte| *byte == b' ')?;
    let (scheme, given) = (&value[..at], value[at..].trim_ascii());
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(given.to_vec());
    }
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    let mut given = base64::decode(std::str::from_utf8(given).ok()?)?;
    let colon = given.iter().position(|byte| *byte == b':')?;
    Some(given.split_off(colon + 1))
}

impl HttpRequest {
    /// Whether the client addressed this server by an IP address, as localhost, or by one of its
    /// `names`. Without this check, a web page could make its own host name resolve to this server
    /// and read everything (DNS rebinding).
    pub(super) fn is_for(&self, names: &[String]) -> bool {
        let Some(host) = &self.host else {
            return true;
        };
        let host = match host.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => host,
        };
        // A name with a dot at its end is absolute: no search list of a resolver applies to it.
        let host = host.strip_suffix('.').unwrap_or(host);
        let is_name = |name: &str| name.eq_ignore_ascii_case(host);
        in_brackets(host).unwrap_or(host).parse::<IpAddr>().is_ok()
            || is_name("localhost")
            || names.iter().any(|name| is_name(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(head: &str) -> HttpRequest {
        let request = parse(head.as_bytes()).expect("well-formed");
        request.expect("all of it")
    }

    #[test]
    fn a_request_names_its_resource_and_its_secret() {
        let head = "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAuthorization: ";
        for (value, secret) in [
            ("Bearer s3 cret", Some("s3 cret")),
            ("bearer  s", Some("s")),
            ("Basic YTpiOmM=", Some("b:c")),
            ("basic Og==", Some("")),
            ("Basic YQ==", None),
            ("Basic ?", None),
            ("Bearer", None),
            ("Digest x", None),
        ] {
            let request = request(&format!("{head}{value}\r\n\r\n"));
            assert_eq!(request.resource, Resource::Metrics);
            assert_eq!(
                request.secret.as_deref(),
                secret.map(str::as_bytes),
                "{value}"
            );
        }
    }

    #[test]
    fn a_refused_head_wants_no_body_either() {
        let asked = |head: &str| {
            let mut rest = head.as_bytes();
            let read_some =
                |room: &mut [u8]| std::io::Read::read(&mut rest, room).expect("a slice");
            read(MAX_HEAD_LEN, read_some).expect("a whole head")
        };
        let long = "x".repeat(2 * MAX_HEAD_LEN);
        for (line, refusal) in [
            ("/ HTTP/1.0", None),
            ("/etc HTTP/1.0", Some(HttpRefusal::NotFound)),
            ("/ HTTP/1.1", Some(HttpRefusal::Malformed)),
            (&long, Some(HttpRefusal::TooLong)),
        ] {
            for (method, is_head) in [("HEAD", true), ("\r\nHEAD", true), ("GET", false)] {
                let asked = asked(&format!("{method} {line}\r\n\r\n"));
                assert_eq!(asked.is_head, is_head, "{method}");
                assert_eq!(asked.request.err(), refusal, "{method}");
            }
        }
    }

    #[test]
    fn a_target_in_absolute_form_names_the_host() {
        for (target, host) in [
            ("http://db1:80/metrics?x=/", "db1:80"),
            ("HTTPS://evil.example/metrics", "evil.example"),
            ("http:///metrics", ""),
            ("/metrics?x=http://b/", "a"),
        ] {
            let request = request(&format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
            assert_eq!(request.resource, Resource::Metrics, "{target}");
            assert_eq!(request.host.as_deref(), Some(host), "{target}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused_for_its_reason() {
        for (head, refusal) in [
            (
                "POST / HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpRefusal::OtherMethod,
            ),
            (
                "get / HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpRefusal::OtherMethod,
            ),
            ("GET /.. HTTP/1.1\r\nHost: a\r\n\r\n", HttpRefusal::NotFound),
            (
                "GET /http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpRefusal::NotFound,
            ),
            ("GET / HTTP/1.1\r\n\r\n", HttpRefusal::Malformed),
            (
                "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
                HttpRefusal::Malformed,
            ),
            ("\u{0}", HttpRefusal::Malformed),
            ("l\nk\n0\n", HttpRefusal::Malformed),
        ] {
            let parsed = parse(head.as_bytes());
            assert_eq!(parsed, Err(refusal), "{head:?}");
        }
        let not_text = b"GET / HTTP/1.1\r\nHost: \xe9\r\n\r\n";
        assert_eq!(parse(not_text), Err(HttpRefusal::Malformed));
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        let parsed = parse(format!("GET / HTTP/1.0\r\n{many}\r\n").as_bytes());
        assert_eq!(parsed, Err(HttpRefusal::TooLong));
        let whole = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for len in 0..whole.len() {
            assert_eq!(parse(&whole.as_bytes()[..len]), Ok(None), "{len}");
        }
    }

    #[test]
    fn a_name_of_another_host_is_not_this_server() {
        let names = ["db1".to_owned()];
        let is_for = |host: &str| {
            let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
            request(&head).is_for(&names)
        };
        for host in [
            "127.0.0.1",
            "10.0.0.1:80",
            "[::1]:80",
            "localhost:1",
            "DB1",
            "db1:80",
            "db1.",
            "db1.:80",
            "localhost.",
        ] {
            assert!(is_for(host), "{host}");
        }
        for host in [
            "evil.example",
            "db1.evil.example:80",
            "localhost.evil",
            "",
            ".",
            "db1..",
            "db1.evil.example.",
            "db1@evil.example",
            "db1:x",
            ":1",
        ] {
            assert!(!is_for(host), "{host}");
        }
        assert!(request("GET / HTTP/1.0\r\n\r\n").is_for(&[]));
    }
}
