//! A check of HTTP requests whose bytes arrive in arbitrary pieces, for tests and fuzzers.

use std::io::Read;

use super::request::{self, Arrived};
use crate::base64;

/// The maximum length of a head in bytes. Some inputs exceed it.
const MAX_LEN: usize = 3000;

/// A name of the server.
const NAME: &str = "db";

/// Asserts that a head is read in the same way in whatever pieces it arrives, that the server
/// answers only to its addresses and names, and that any secret can be given as a password.
pub fn http_request(input: &[u8]) {
    let Some((size, head)) = input.split_first() else {
        return;
    };
    let whole = read(head, MAX_LEN, u64::MAX);
    assert_eq!(read(head, MAX_LEN, 1 + u64::from(*size)), whole);
    if let Some(Ok(request)) = whole.map(|asked| asked.request) {
        if request.is_for(&[NAME.to_owned()]) {
            assert!(request.host.as_deref().is_none_or(is_own), "{request:?}");
        }
    }
    let password = base64::encode(&[b"any:", head].concat());
    let with_password = format!("GET / HTTP/1.0\r\nAuthorization: Basic {password}\r\n\r\n");
    let request = read(with_password.as_bytes(), usize::MAX, u64::MAX);
    let secret = request.and_then(|asked| asked.request.ok()?.secret);
    assert_eq!(secret.as_deref(), Some(head));
}

/// Reads a head that arrives in pieces of at most `size` bytes.
fn read(mut head: &[u8], max_len: usize, size: u64) -> Option<Arrived> {
    request::read(max_len, |room| {
        Read::take(&mut head, size).read(room).unwrap_or(0)
    })
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
