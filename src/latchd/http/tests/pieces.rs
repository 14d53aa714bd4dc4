//! Checks of HTTP requests whose bytes arrive in arbitrary pieces, for tests and fuzzers.

use std::io::{self, Read};

use super::body::{self, MAX_BODY_LEN};
use super::request::{self, Arrived, RequestInput};
use super::routes::{Resource, ROUTES};
use crate::os::base64;
use crate::wire::limits;
use crate::wire::request::parse;

/// The maximum length of a head in bytes. Some inputs exceed it.
const MAX_LEN: usize = 3000;

/// A name of the server.
const NAME: &str = "db";

/// A request that arrives in pieces.
pub(super) struct Pieces<'a> {
    rest: &'a [u8],
    max_size: usize,
    /// How often the client has been told to send the body.
    pub(super) invitation_count: usize,
}

impl<'a> Pieces<'a> {
    /// A request in pieces of at most `max_size` bytes.
    pub(super) fn new(request: &'a [u8], max_size: usize) -> Pieces<'a> {
        Pieces {
            rest: request,
            max_size,
            invitation_count: 0,
        }
    }
}

impl Read for Pieces<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let len = room.len().min(self.max_size).min(self.rest.len());
        let (piece, rest) = self.rest.split_at(len);
        room[..len].copy_from_slice(piece);
        self.rest = rest;
        Ok(len)
    }
}

impl RequestInput for Pieces<'_> {
    fn invite_body(&mut self) {
        self.invitation_count += 1;
    }
}

/// Asserts that a request is read in the same way in whatever pieces it arrives, that the server
/// answers only to its addresses and names, that only a request which may change something has a
/// body, and that any secret can be given as a password.
pub fn http_request(input: &[u8]) {
    let Some((size, request)) = input.split_first() else {
        return;
    };
    for with_changes in [false, true] {
        let whole = read(request, MAX_LEN, with_changes, usize::MAX);
        let in_pieces = read(request, MAX_LEN, with_changes, 1 + usize::from(*size));
        assert_eq!(in_pieces, whole);
        if let Some(Ok(request)) = whole.map(|asked| asked.request) {
            if request.is_for(&[NAME.to_owned()]) {
                assert!(request.host.as_deref().is_none_or(is_own), "{request:?}");
            }
            let is_change = request.route.is_change();
            assert!(with_changes || !is_change, "{request:?}");
            assert!(is_change || request.body.is_empty(), "{request:?}");
            assert!(request.body.len() <= MAX_BODY_LEN);
        }
    }
    let password = base64::encode(&[b"any:", request].concat());
    let with_password = format!("GET / HTTP/1.0\r\nAuthorization: Basic {password}\r\n\r\n");
    let read = read(with_password.as_bytes(), usize::MAX, false, usize::MAX);
    let secret = read.and_then(|asked| asked.request.ok()?.secret);
    assert_eq!(secret.as_deref(), Some(request));
}

/// Asserts that a key in a path and a body make a request of the line protocol, in the form in
/// which a client writes it.
pub fn http_body(input: &[u8]) {
    let Some((choice, input)) = input.split_first() else {
        return;
    };
    let commands = ROUTES.iter().filter_map(|route| match route.resource {
        Resource::Key(command, fields) => Some((command, fields)),
        _ => None,
    });
    let command = commands.cycle().nth(usize::from(*choice));
    let (command, fields) = command.expect("there are such routes");
    let end_of_key = input.iter().position(|byte| *byte == b'\n');
    let (segment, body) = input.split_at(end_of_key.unwrap_or(input.len()));
    let Some(key) = std::str::from_utf8(segment)
        .ok()
        .and_then(|it| body::key(it).ok())
    else {
        return;
    };
    assert!(limits::is_key(&key));
    if let Ok(argument) = body::argument(fields, body) {
        let frame = [command, &key, &argument];
        let mut lines = Vec::new();
        parse(frame).expect("a request").write(&mut lines);
        assert_eq!(lines, (frame.join("\n") + "\n").into_bytes());
    }
}

/// Reads a request that arrives in pieces of at most `size` bytes.
fn read(request: &[u8], max_len: usize, with_changes: bool, size: usize) -> Option<Arrived> {
    request::read(max_len, with_changes, &mut Pieces::new(request, size))
}

/// Whether `host` may mean this server. This check is independent of the server's own check.
fn is_own(host: &str) -> bool {
    let host = host.to_ascii_lowercase();
    let (name, port) = host.split_once(':').unwrap_or((&host, ""));
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit());
    let is_in_address = |byte: u8| byte.is_ascii_hexdigit() || b".:[]".contains(&byte);
    ([NAME, "localhost"].contains(&name) && is_port) || host.bytes().all(is_in_address)
}
