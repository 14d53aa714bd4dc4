//! HTTP requests: what a client asks for, and whether it may have it. Pure: no I/O and no clock.

use core::net::IpAddr;

use httparse::{Error, Header, Status, EMPTY_HEADER};

use super::body::MAX_BODY_LEN;
use super::routes::{self, Allowed, Method, NoRoute, Resource};
use crate::base64;
use crate::text::in_brackets;

/// The maximum length of a request head in bytes, not counting the extra room for the secret.
pub(super) const MAX_HEAD_LEN: usize = 8 * 1024;

/// The maximum number of headers in a request.
const MAX_HEADERS: usize = 64;

/// The header that names a session.
pub(super) const SESSION_HEADER: &str = "X-Dflockd-Session";

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
    /// What the path has in the place of the key or of the session, still percent-encoded.
    pub(super) parameter: String,
    /// The host name by which the client addressed this server.
    pub(super) host: Option<String>,
    /// The secret in the header `Authorization`.
    pub(super) secret: Option<Vec<u8>>,
    /// The session that the request belongs to.
    pub(super) session: Option<String>,
    /// Empty unless the request changes something.
    pub(super) body: Vec<u8>,
}

/// Why a request cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpRefusal {
    Malformed,
    NotFound,
    OtherMethod(Allowed),
    /// The server changes nothing over HTTP.
    NoChanges,
    TooLong,
    /// The body is too long or of another type. The field is the reason.
    UnfitBody(&'static str),
    /// A page of another host has sent the request.
    OtherOrigin,
}

/// A request whose head has arrived.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    request: HttpRequest,
    len: usize,
    body_len: usize,
    /// The client sends the body only after it was told to.
    waits_for_invitation: bool,
}

/// Where a request comes from.
pub(super) trait RequestInput {
    /// Fills a buffer, and returns the number of bytes that it has put there; 0 at the end.
    fn read(&mut self, room: &mut [u8]) -> usize;

    /// Tells the client to send the body.
    fn invite_body(&mut self);
}

/// Reads a request, whose head may be up to `max_len` bytes long. Without `with_changes`, refuses a
/// request that would change something. Returns `None` if the input ends before the request does.
pub(super) fn read(
    max_len: usize,
    with_changes: bool,
    source: &mut impl RequestInput,
) -> Option<Arrived> {
    let (mut input, mut len) = (Vec::new(), 0);
    let head = loop {
        if len == max_len {
            break Err(HttpRefusal::TooLong);
        }
        if len == input.len() {
            input.resize((2 * len).clamp(1024, max_len), 0);
        }
        match source.read(&mut input[len..]) {
            0 => return None,
            read_len => len += read_len,
        }
        if let Some(head) = parse(&input[..len], with_changes).transpose() {
            break head;
        }
    };
    let is_head = is_head(&input[..len]);
    let request = match head {
        Ok(head) => {
            let body = input[head.len..len].to_vec();
            Ok(read_body(head, body, source)?)
        }
        Err(refusal) => Err(refusal),
    };
    Some(Arrived { is_head, request })
}

/// Reads what is missing of a body of which a part has arrived.
fn read_body(head: Head, mut body: Vec<u8>, source: &mut impl RequestInput) -> Option<HttpRequest> {
    let mut len = body.len().min(head.body_len);
    body.resize(head.body_len, 0);
    if len < head.body_len && head.waits_for_invitation {
        source.invite_body();
    }
    while len < head.body_len {
        match source.read(&mut body[len..]) {
            0 => return None,
            read_len => len += read_len,
        }
    }
    Some(HttpRequest {
        body,
        ..head.request
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
fn parse(bytes: &[u8], with_changes: bool) -> Result<Option<Head>, HttpRefusal> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let len = match head.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return Ok(None),
        Err(Error::TooManyHeaders) => return Err(HttpRefusal::TooLong),
        Err(_) => return Err(HttpRefusal::Malformed),
    };
    let method = match head.method {
        Some("GET" | "HEAD") => Some(Method::Get),
        _ if !with_changes => return Err(HttpRefusal::NoChanges),
        Some("POST") => Some(Method::Post),
        Some("DELETE") => Some(Method::Delete),
        _ => None,
    };
    let target = head.path.unwrap_or_default();
    let target = target.split_once('?').map_or(target, |(target, _)| target);
    let (authority, path) = parts(target);
    let found = routes::find(method, path, with_changes);
    let (resource, parameter) = found.map_err(|missing| match missing {
        NoRoute::NotFound => HttpRefusal::NotFound,
        NoRoute::OtherMethod(allowed) => HttpRefusal::OtherMethod(allowed),
    })?;
    let headers = Headers(head.headers);
    let host = headers.only("host")?;
    // An HTTP/1.0 client may omit Host; browsers always send it.
    if host.is_none() && head.version == Some(1) {
        return Err(HttpRefusal::Malformed);
    }
    // An authority in the target overrides the Host header.
    let host = authority.or(host);
    let body_len = if resource.is_change() {
        headers.check_origin(host)?;
        headers.body_len()?
    } else {
        0
    };
    let request = HttpRequest {
        resource,
        parameter: parameter.to_owned(),
        host: host.map(str::to_owned),
        secret: headers.named("authorization").find_map(secret),
        session: headers.only(SESSION_HEADER)?.map(str::to_owned),
        body: Vec::new(),
    };
    let waits_for_invitation = headers.named("expect").next().is_some();
    Ok(Some(Head {
        request,
        len,
        body_len,
        waits_for_invitation,
    }))
}

/// The headers of a request.
struct Headers<'a>(&'a [Header<'a>]);

impl<'a> Headers<'a> {
    /// The values of the headers with this name.
    fn named(&self, name: &'static str) -> impl Iterator<Item = &'a [u8]> {
        let headers = self.0.iter();
        let named = headers.filter(move |header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| header.value)
    }

    /// The value of the header with this name, of which there may be only one.
    fn only(&self, name: &'static str) -> Result<Option<&'a str>, HttpRefusal> {
        let mut named = self.named(name);
        let value = named.next().map(std::str::from_utf8).transpose();
        match (value, named.next()) {
            (Ok(value), None) => Ok(value),
            _ => Err(HttpRefusal::Malformed),
        }
    }

    /// Refuses a request that a page of another host has had a browser send. A browser says which
    /// page it is with every request that can change something.
    fn check_origin(&self, host: Option<&str>) -> Result<(), HttpRefusal> {
        let Some(origin) = self.only("origin")? else {
            return Ok(());
        };
        let of_host = |host: &str| {
            let schemes = ["http://", "https://"].into_iter();
            let mut authorities = schemes.filter_map(|scheme| origin.strip_prefix(scheme));
            authorities.any(|authority| authority.eq_ignore_ascii_case(host))
        };
        if host.is_some_and(of_host) {
            Ok(())
        } else {
            Err(HttpRefusal::OtherOrigin)
        }
    }

    /// The length of the body, which must be JSON.
    fn body_len(&self) -> Result<usize, HttpRefusal> {
        if self.named("transfer-encoding").next().is_some() {
            let why = "a body needs a Content-Length, and no Transfer-Encoding";
            return Err(HttpRefusal::UnfitBody(why));
        }
        let Some(len) = self.only("content-length")? else {
            return Ok(0);
        };
        if len.is_empty() || !len.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(HttpRefusal::Malformed);
        }
        let len = len.parse().ok().filter(|len| *len <= MAX_BODY_LEN);
        let len = len.ok_or(HttpRefusal::UnfitBody("the body is longer than 4096 bytes"))?;
        let given = self.only("content-type")?.unwrap_or("application/json");
        let media_type = given.split(';').next().unwrap_or_default().trim();
        let is = |known: &str| media_type.eq_ignore_ascii_case(known);
        // curl calls a body the values of a form unless it is told otherwise. So may a page of
        // another host, but its requests have an Origin.
        if len == 0 || is("application/json") || is("application/x-www-form-urlencoded") {
            Ok(len)
        } else {
            let why = "expected a body with Content-Type: application/json";
            Err(HttpRefusal::UnfitBody(why))
        }
    }
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
    use crate::latchd::http::pieces::Pieces;

    fn request(head: &str) -> HttpRequest {
        let head = parse(head.as_bytes(), false).expect("well-formed");
        head.expect("all of it").request
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
            let mut whole = Pieces::new(head.as_bytes(), usize::MAX);
            read(MAX_HEAD_LEN, false, &mut whole).expect("a whole head")
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
            ("POST / HTTP/1.1\r\nHost: a\r\n\r\n", HttpRefusal::NoChanges),
            ("get / HTTP/1.1\r\nHost: a\r\n\r\n", HttpRefusal::NoChanges),
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
            let parsed = parse(head.as_bytes(), false);
            assert_eq!(parsed, Err(refusal), "{head:?}");
        }
        let not_text = b"GET / HTTP/1.1\r\nHost: \xe9\r\n\r\n";
        assert_eq!(parse(not_text, false), Err(HttpRefusal::Malformed));
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        let parsed = parse(format!("GET / HTTP/1.0\r\n{many}\r\n").as_bytes(), false);
        assert_eq!(parsed, Err(HttpRefusal::TooLong));
        let whole = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for len in 0..whole.len() {
            assert_eq!(parse(&whole.as_bytes()[..len], false), Ok(None), "{len}");
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

    /// A request that changes something, as far as it can be carried out.
    fn change(request: &str) -> Result<HttpRequest, HttpRefusal> {
        let mut whole = Pieces::new(request.as_bytes(), usize::MAX);
        let asked = read(MAX_HEAD_LEN, true, &mut whole);
        asked.expect("a whole request").request
    }

    #[test]
    fn a_change_has_a_key_a_session_and_a_body() {
        let head = "POST /v1/locks/a%2Fb?x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n";
        let asked = change(&format!("{head}x-dflockd-session: s\r\n\r\n{{}}more"));
        let asked = asked.expect("well-formed");
        assert_eq!(asked.parameter, "a%2Fb");
        assert_eq!(asked.session.as_deref(), Some("s"));
        assert_eq!(asked.body, b"{}");
        let invited = format!("{head}Expect: 100-continue\r\n\r\n");
        let mut pieces = Pieces::new(invited.as_bytes(), usize::MAX);
        assert_eq!(read(MAX_HEAD_LEN, true, &mut pieces), None, "no body");
        assert_eq!(pieces.invitation_count, 1);
    }

    #[test]
    fn a_body_of_another_type_or_length_is_refused() {
        for (headers, is_fit) in [
            ("Content-Type: Application/JSON; charset=utf-8\r\n", true),
            ("Content-Type: application/x-www-form-urlencoded\r\n", true),
            ("Content-Type: text/plain\r\n", false),
            ("Transfer-Encoding: chunked\r\n", false),
            ("", true),
        ] {
            let head = "POST /v1/sessions HTTP/1.0\r\nContent-Length: 2\r\n";
            let asked = change(&format!("{head}{headers}\r\n{{}}"));
            assert_eq!(asked.is_ok(), is_fit, "{headers}: {asked:?}");
        }
        for len in [
            "4097",
            "99999999999999999999",
            "+2",
            "",
            "2\r\nContent-Length: 2",
        ] {
            let head = format!("POST /v1/sessions HTTP/1.0\r\nContent-Length: {len}\r\n\r\n");
            assert!(change(&head).is_err(), "{len}");
        }
    }

    #[test]
    fn a_page_of_another_host_changes_nothing() {
        for (origin, is_own) in [
            ("http://a:80", true),
            ("https://A:80", true),
            ("http://a", false),
            ("http://evil.example", false),
            ("http://evil.example/a:80", false),
            ("ftp://a:80", false),
            ("null", false),
            ("", false),
        ] {
            let request =
                format!("POST /v1/sessions HTTP/1.1\r\nHost: a:80\r\nOrigin: {origin}\r\n\r\n");
            let refusal = (!is_own).then_some(HttpRefusal::OtherOrigin);
            assert_eq!(change(&request).err(), refusal, "{origin}");
        }
    }
}
