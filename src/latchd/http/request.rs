//! HTTP requests: what a client asks for, and whether it may have it. Pure: no I/O and no clock.

use core::net::IpAddr;
use std::io::{ErrorKind, Read};

use httparse::{parse_chunk_size, Error, Header, Status, EMPTY_HEADER};

use super::body::MAX_BODY_LEN;
use super::reply::HttpReply;
use super::routes::{self, Method, Route};
use crate::os::base64;
use crate::os::text::in_brackets;

/// The maximum length of a request head in bytes, not counting the extra room for the secret.
pub(super) const MAX_HEAD_LEN: usize = 16 * 1024;

/// How many bytes may come behind the longest head: a body, with all that is around its chunks.
pub(super) const MAX_FRAMED_LEN: usize = 4 * MAX_BODY_LEN;

/// The number of bytes to read at once.
const READ_LEN: usize = 2048;

/// The maximum number of headers in a request.
const MAX_HEADERS: usize = 64;

/// The header that names a session.
pub(super) const SESSION_HEADER: &str = "X-Dflockd-Session";

/// A request that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrived {
    /// The request is a HEAD, so the answer has no body, even if it is a refusal.
    pub(super) is_head: bool,
    pub(super) request: Result<HttpRequest, HttpReply>,
}

/// A request that can be answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HttpRequest {
    pub(super) route: &'static Route,
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

/// A request whose head has arrived.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    /// Its body is what has been taken of it.
    request: HttpRequest,
    /// The index of the next byte of the body, or of the next chunk.
    at: usize,
    /// `None` if the body comes in chunks, the last of which is empty.
    body_len: Option<usize>,
    /// The client sends the body only after it was told to.
    waits_for_invitation: bool,
}

/// Where a request comes from. A read that fails because of its time limit fails with
/// [`ErrorKind::TimedOut`] or [`ErrorKind::WouldBlock`].
pub(super) trait RequestInput: Read {
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
    let mut input = Vec::new();
    let request = match read_into(&mut input, max_len, with_changes, source) {
        Ok(request) => Ok(request),
        Err(refusal) => Err(refusal?),
    };
    let is_head = is_head(&input);
    Some(Arrived { is_head, request })
}

/// Reads a request into `input`. The error is the answer; `None` if there can be none.
fn read_into(
    input: &mut Vec<u8>,
    max_len: usize,
    with_changes: bool,
    source: &mut impl RequestInput,
) -> Result<HttpRequest, Option<HttpReply>> {
    let mut arrived = None;
    loop {
        let len = input.len();
        let max_len = max_len + arrived.as_ref().map_or(0, |_| MAX_FRAMED_LEN);
        if len == max_len {
            let too_long = HttpReply::too_long();
            return Err(Some(arrived.map_or(too_long, |_| HttpReply::long_body())));
        }
        input.resize((len + READ_LEN).min(max_len), 0);
        let read = source.read(&mut input[len..]);
        input.truncate(len + *read.as_ref().unwrap_or(&0));
        match read.map_err(|error| error.kind()) {
            Ok(1..) => {}
            Err(ErrorKind::TimedOut | ErrorKind::WouldBlock) if len > 0 => {
                return Err(Some(HttpReply::too_slow()));
            }
            _ => return Err(None),
        }
        if arrived.is_none() {
            arrived = parse(input, with_changes)?;
        }
        let Some(mut head) = arrived.take() else {
            continue;
        };
        if head.take_body(input)? {
            return Ok(head.request);
        }
        if std::mem::take(&mut head.waits_for_invitation) {
            source.invite_body();
        }
        arrived = Some(head);
    }
}

impl Head {
    /// Takes what has arrived of the body. Returns whether that is all of it.
    fn take_body(&mut self, input: &[u8]) -> Result<bool, HttpReply> {
        let Some(len) = self.body_len else {
            return self.take_chunks(input);
        };
        let body = input.get(self.at..self.at + len);
        self.request.body.extend(body.unwrap_or_default());
        Ok(body.is_some())
    }

    fn take_chunks(&mut self, input: &[u8]) -> Result<bool, HttpReply> {
        let body = &mut self.request.body;
        while let Some(digit @ 1..) = input.get(self.at) {
            // The parser takes a line without a digit for the last chunk.
            let line = parse_chunk_size(&input[self.at..]);
            let line = line.ok().filter(|_| digit.is_ascii_hexdigit());
            let (begin, len) = match line.ok_or_else(HttpReply::not_http)? {
                Status::Partial => break,
                Status::Complete((line_len, len)) => (self.at + line_len, len),
            };
            if len == 0 {
                // Fields may follow, which mean nothing here, and then an empty line.
                return Ok(input[begin - 2..].windows(4).any(|end| end == b"\r\n\r\n"));
            }
            let room = (MAX_BODY_LEN - body.len()) as u64;
            let len = Some(len).filter(|len| *len <= room);
            let end = begin + len.ok_or_else(HttpReply::long_body)? as usize;
            match input.get(end..end + 2) {
                Some(b"\r\n") => body.extend(&input[begin..end]),
                None => break,
                Some(_) => return Err(HttpReply::not_http()),
            }
            self.at = end + 2;
        }
        Ok(false)
    }
}

/// Whether the first word of a request is HEAD. Ignores empty lines before it, as the parser does.
fn is_head(mut head: &[u8]) -> bool {
    while let Some(rest) = head.strip_prefix(b"\r\n").or(head.strip_prefix(b"\n")) {
        head = rest;
    }
    head.starts_with(b"HEAD ")
}

/// Parses the head of a request; `None` if the head has not arrived in full.
fn parse(bytes: &[u8], with_changes: bool) -> Result<Option<Head>, HttpReply> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let len = match head.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return Ok(None),
        Err(Error::TooManyHeaders) => return Err(HttpReply::too_long()),
        Err(_) => return Err(HttpReply::not_http()),
    };
    let method = match head.method {
        Some("GET" | "HEAD") => Some(Method::Get),
        _ if !with_changes => return Err(HttpReply::no_changes()),
        Some("POST") => Some(Method::Post),
        Some("DELETE") => Some(Method::Delete),
        _ => None,
    };
    let target = head.path.unwrap_or_default();
    let target = target.split_once('?').map_or(target, |(target, _)| target);
    let (authority, path) = parts(target);
    let (route, parameter) = routes::find(method, path, with_changes)?;
    let headers = Headers(head.headers);
    let host = headers.only("host")?;
    // An HTTP/1.0 client may omit Host; browsers always send it.
    if host.is_none() && head.version == Some(1) {
        return Err(HttpReply::not_http());
    }
    // An authority in the target overrides the Host header.
    let host = authority.or(host);
    let body_len = if route.is_change() {
        headers.check_origin(host)?;
        headers.body_len()?
    } else {
        Some(0)
    };
    let request = HttpRequest {
        route,
        parameter: parameter.to_owned(),
        host: host.map(str::to_owned),
        secret: headers.named("authorization").find_map(secret),
        session: headers.only(SESSION_HEADER)?.map(str::to_owned),
        body: Vec::new(),
    };
    let waits_for_invitation = headers.named("expect").next().is_some();
    Ok(Some(Head {
        request,
        at: len,
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
    fn only(&self, name: &'static str) -> Result<Option<&'a str>, HttpReply> {
        let mut named = self.named(name);
        let value = named.next().map(std::str::from_utf8).transpose();
        match (value, named.next()) {
            (Ok(value), None) => Ok(value),
            _ => Err(HttpReply::not_http()),
        }
    }

    /// Refuses a request that a page of another host has had a browser send. A browser says which
    /// page it is with every request that can change something.
    fn check_origin(&self, host: Option<&str>) -> Result<(), HttpReply> {
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
            Err(HttpReply::other_origin())
        }
    }

    /// The length of the body; `None` if the body comes in chunks. A request with both is refused:
    /// a proxy may see another end of it.
    fn body_len(&self) -> Result<Option<usize>, HttpReply> {
        match (
            self.only("transfer-encoding")?,
            self.only("content-length")?,
        ) {
            (None, None) => Ok(Some(0)),
            (Some(coding), None) if coding.eq_ignore_ascii_case("chunked") => Ok(None),
            (None, Some(len)) if !len.is_empty() && len.bytes().all(|it| it.is_ascii_digit()) => {
                let len = len.parse().ok().filter(|len| *len <= MAX_BODY_LEN);
                len.map(Some).ok_or_else(HttpReply::long_body)
            }
            _ => Err(HttpReply::malformed(
                "a body needs one Content-Length, or Transfer-Encoding: chunked",
            )),
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
    use crate::latchd::http::routes::Resource;

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
            assert_eq!(request.route.resource, Resource::Metrics);
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
            ("/etc HTTP/1.0", Some(HttpReply::not_found())),
            ("/ HTTP/1.1", Some(HttpReply::not_http())),
            (&long, Some(HttpReply::too_long())),
        ] {
            for (method, is_head) in [("HEAD", true), ("\r\nHEAD", true), ("GET", false)] {
                let asked = asked(&format!("{method} {line}\r\n\r\n"));
                assert_eq!(asked.is_head, is_head, "{method}");
                assert_eq!(asked.request.err().as_ref(), refusal.as_ref(), "{method}");
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
            assert_eq!(request.route.resource, Resource::Metrics, "{target}");
            assert_eq!(request.host.as_deref(), Some(host), "{target}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused_for_its_reason() {
        for (head, refusal) in [
            (
                "POST / HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpReply::no_changes(),
            ),
            ("get / HTTP/1.1\r\nHost: a\r\n\r\n", HttpReply::no_changes()),
            (
                "GET /.. HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpReply::not_found(),
            ),
            (
                "GET /http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
                HttpReply::not_found(),
            ),
            ("GET / HTTP/1.1\r\n\r\n", HttpReply::not_http()),
            (
                "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
                HttpReply::not_http(),
            ),
            ("\u{0}", HttpReply::not_http()),
            ("l\nk\n0\n", HttpReply::not_http()),
        ] {
            let parsed = parse(head.as_bytes(), false);
            assert_eq!(parsed, Err(refusal), "{head:?}");
        }
        let not_text = b"GET / HTTP/1.1\r\nHost: \xe9\r\n\r\n";
        assert_eq!(parse(not_text, false), Err(HttpReply::not_http()));
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        let parsed = parse(format!("GET / HTTP/1.0\r\n{many}\r\n").as_bytes(), false);
        assert_eq!(parsed, Err(HttpReply::too_long()));
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
    fn change(request: &str) -> Result<HttpRequest, HttpReply> {
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
    fn a_body_may_have_any_type_and_one_length() {
        for headers in [
            "Content-Type: Application/JSON; charset=utf-8\r\n",
            "Content-Type: application/x-www-form-urlencoded\r\n",
            "Content-Type: text/plain\r\n",
            "",
        ] {
            let head = "POST /v1/sessions HTTP/1.0\r\nContent-Length: 2\r\n";
            let asked = change(&format!("{head}{headers}\r\n{{}}"));
            assert!(asked.is_ok(), "{headers}: {asked:?}");
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
    fn a_body_in_chunks_ends_at_the_empty_one() {
        let malformed = || Some(Err(HttpReply::not_http()));
        let many = "1;x=y\r\nx\r\n".repeat(MAX_BODY_LEN);
        let full = "x".repeat(MAX_BODY_LEN);
        let whole = format!("{MAX_BODY_LEN:x}\r\n{full}\r\n");
        for (chunks, body) in [
            ("0\r\n\r\n", Some(Ok(""))),
            ("2\r\n{}\r\n0\r\n\r\nmore", Some(Ok("{}"))),
            (
                "1\r\n{\r\n01;a=b\r\n}\r\n00\r\nA: b\r\n\r\n",
                Some(Ok("{}")),
            ),
            ("A\r\n0123456789\r\n0\r\n\r\n", Some(Ok("0123456789"))),
            (&format!("{whole}0\r\n\r\n"), Some(Ok(&full))),
            (&format!("{whole}1\r\n"), Some(Err(HttpReply::long_body()))),
            ("ffffffffffffffff\r\n", Some(Err(HttpReply::long_body()))),
            (&many, Some(Err(HttpReply::long_body()))),
            ("2\r\n{}0\r\n\r\n", malformed()),
            ("\r\n\r\n", malformed()),
            (";\r\n\r\n", malformed()),
            ("-1\r\n", malformed()),
            ("0\n\n", malformed()),
            ("2\r\n{}\r\n", None),
            ("2\r\n{}\r\n0\r\n", None),
            ("", None),
        ] {
            for size in [1, 7, usize::MAX] {
                let head =
                    "POST /v1/sessions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n";
                let request = format!("{head}\r\n{chunks}");
                let asked = read(
                    MAX_HEAD_LEN,
                    true,
                    &mut Pieces::new(request.as_bytes(), size),
                );
                let read = asked.map(|asked| asked.request.map(|request| request.body));
                let body = body
                    .clone()
                    .map(|body| body.map(|body| body.as_bytes().to_vec()));
                assert_eq!(read, body, "{chunks:.40}");
            }
        }
    }

    #[test]
    fn a_body_with_two_ends_is_refused() {
        for headers in [
            "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: identity\r\nContent-Length: 2\r\n",
            "Transfer-Encoding: \r\n",
        ] {
            let head = format!("POST /v1/sessions HTTP/1.1\r\nHost: a\r\n{headers}\r\n");
            let refusal = change(&format!("{head}2\r\n{{}}\r\n0\r\n\r\n")).expect_err(headers);
            assert_eq!(refusal.status, "400 Bad Request", "{headers}");
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
            let refusal = (!is_own).then(HttpReply::other_origin);
            assert_eq!(change(&request).err(), refusal, "{origin}");
        }
    }
}
