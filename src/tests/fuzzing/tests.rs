//! Each target with random inputs, and the inputs that once broke a promise.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::inputs::call;
use super::*;
use crate::latchd::line::connection::pieces::SECRET;

const INPUTS: u64 = 20_000;

/// A history has many steps.
const HISTORIES: u64 = 2_000;

const TOKEN: &[u8] = b"0001a3f217b3c4d87f3c1f2b3e9a8d6e";

#[test]
fn any_three_lines_are_a_request_or_an_error() {
    let words: [&[u8]; 41] = [
        b"adopt\n",
        b"keep\n",
        b"hello\n",
        b"help\n",
        b"quit\n",
        b" adopt",
        b" slots=2",
        b" shared",
        b"l\n",
        b"sl\n",
        b"e\n",
        b"se\n",
        b"w\n",
        b"sw\n",
        b"r\n",
        b"sr\n",
        b"n\n",
        b"sn\n",
        b"ping\n",
        b"stats\n",
        b"holders\n",
        b"tag\n",
        b"break\n",
        b"auth\n",
        b"key\n",
        b"_\n",
        b"\n",
        b"\r\n",
        b"0",
        b"1",
        b"10",
        b"-1",
        b"+5",
        b" ",
        b"\t",
        TOKEN,
        b"9223372036",
        b"9223372037",
        b"4294967296",
        "\u{a0}".as_bytes(),
        "鍵\n".as_bytes(),
    ];
    call(request, &words, INPUTS);
}

#[test]
fn any_chunks_of_telnet_and_text_mean_the_same() {
    let words: [&[u8]; 24] = [
        b"l\n",
        b"key\r\n",
        b"10\r\0",
        b"auth\n",
        b"\n",
        b"\r",
        b"\0",
        b"\x03",
        b"\xff",
        b"\xff\xff",
        b"\xff\xfb",
        b"\xff\xfc",
        b"\xff\xfd\x06",
        b"\xff\xfd\x01",
        b"\xff\xfe",
        b"\xff\xfa",
        b"\xff\xf0",
        b"\xff\xf4",
        b"\xff\xf2",
        b"\xff\xec",
        b"\xff\xfa\x18\x01\xff\xf0",
        &[b'x'; 255],
        &[b'x'; 256],
        &[b'x'; 4096],
    ];
    // The longest words of all make these inputs the slowest.
    call(lines, &words, INPUTS / 4);
}

#[test]
fn any_pieces_of_an_opening_mean_the_same() {
    let words: [&[u8]; 30] = [
        &[0, 0, 0],
        &[1, 5, 2],
        b"help\n",
        b"?\r\n",
        b"quit\n",
        b"_\n",
        b"\n",
        b"\r",
        b"\0",
        b"auth\n",
        SECRET,
        b" ",
        b"l\nkey\n10\n",
        b"relay\n",
        b"cluster\n",
        b"GET / HTTP/1.1\r\n",
        b"Host: a\r\n",
        b"HTTP/",
        b"\x16",
        b"\x16\x03\x01\x02",
        b"\x03",
        b"\xff",
        b"\xff\xf4",
        b"\xff\xf4",
        b"\xff\xf4\xff\xfd\x06",
        b"\xff\xfd\x01",
        b"\xff\xfa",
        b"\xff\xf0",
        &[b'x'; 255],
        &[b'x'; 256],
    ];
    // Each takes a few sockets.
    call(opening, &words, INPUTS / 4);
}

#[test]
fn any_pieces_of_a_request_in_http_mean_the_same() {
    let words: [&[u8]; 33] = [
        b"GET / HTTP/1.1\r\n",
        b"POST /v1/locks/k HTTP/1.1\r\nHost: db\r\n",
        b"DELETE /v1/sessions/0 HTTP/1.0\r\n",
        b"Content-Length: 2\r\n",
        b"Content-Type: application/json\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\nOrigin: http://db\r\n",
        b"GET /metrics?x HTTP/1.0\n",
        b"HEAD /v1/stats HTTP/1.1\r\nHost: db\r\n",
        b"POST ",
        b"/",
        b"?",
        b" HTTP/1.1\r\n",
        b"Host: ",
        b"host:",
        b"localhost",
        b"db",
        b".example",
        b"127.0.0.1",
        b"[::1]",
        b":6389",
        b"Authorization: Basic ",
        b"authorization: bearer ",
        b"YTpiOmM=",
        b"=",
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\t ",
        b"\0",
        b"\xc3\xa4",
        &[b'a'; 1000],
    ];
    call(http_request, &words, INPUTS);
}

#[test]
fn a_body_asks_for_what_lines_can_ask_for() {
    let words: [&[u8]; 26] = [
        b"\x00k\n{\"acquire_timeout_s\":10}",
        b"\x01k\n{\"limit\":3,",
        b"\x02k\n",
        b"\x04k\n",
        b"\x06k\n",
        b"\x08k\n",
        b"%2F",
        b"%0a",
        b"%C3%A4",
        b"%",
        b"{",
        b"}",
        b"\"acquire_timeout_s\":",
        b"\"timeout_s\":",
        b"\"lease_ttl_s\":",
        b"\"limit\":",
        b"\"token\":\"",
        TOKEN,
        b"\"",
        b",",
        b"0",
        b"1048576",
        b"9223372036",
        b"9223372037",
        b"-1",
        b"null",
    ];
    call(http_body, &words, INPUTS);
}

#[test]
fn any_line_is_a_reply_or_none() {
    let words: [&[u8]; 16] = [
        b"ok",
        b"ok ",
        b"acquired ",
        b"queued",
        b"timeout",
        b"error",
        b"error_",
        b"auth",
        b"max_locks",
        b"draining",
        b"lease_expired",
        b" ",
        TOKEN,
        b"10",
        b"9223372036",
        b"{\"locks\":[]}",
    ];
    call(reply, &words, INPUTS);
}

#[test]
fn any_history_of_the_table_agrees_with_the_model() {
    let words: [&[u8]; 4] = [&[0, 0, 0, 0], &[7, 1, 1, 0], &[10, 0, 0], &[13, 0, 0, 0]];
    let steps = AtomicUsize::new(0);
    let count = |input: &[u8]| {
        steps.fetch_add(table(input), Ordering::Relaxed);
    };
    call(count, &words, HISTORIES);
    println!("{} requests", steps.into_inner());
}

#[test]
fn any_fence_file_is_recovered_or_refused() {
    let words: [&[u8]; 8] = [
        b"dflfnc1\n",
        &[0; 8],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0xff; 8],
        &[5, 40, 0],
        &[9, 33, 1],
        &[200, 17, 3],
        &[0; 32],
    ];
    call(fence_file, &words, INPUTS);
}

#[test]
fn any_state_file_is_read_or_refused() {
    let words: [&[u8]; 19] = [
        b"{\"dead\":7,\"left_ms\":0,\"end_ms\":1,\"end_boot_ms\":1}\n",
        b"{\"next_fence\":7,\"state\":\"open\",\"settle_s\":33,\"settling_ms\":5,",
        b"{\"key\":\"a\",\"kind\":\"lock\",\"limit\":1,\"token\":\"",
        TOKEN,
        b"\",\"kept\":true,\"left_s\":30}\n",
        b"{\"key\":\"s\",\"kind\":\"semaphore\",\"limit\":3,\"weight\":2,\"numbers\":[1],\"token\":\"",
        b"\"tag\":\"t\"",
        b"\"numbers\":[]",
        b"latchd-handover 4 ",
        b"18446744073709551615",
        b"4294967296",
        b"1e999",
        b"[[[[[[[[",
        b",",
        b":",
        b"\n",
        b"\\u0000",
        b"\\ud800",
        "\u{2028}".as_bytes(),
    ];
    call(state_file, &words, INPUTS);
}

#[test]
fn any_lock_file_is_read_and_what_is_written_read_back() {
    let words: [&[u8]; 23] = [
        b"pid=",
        b"timestamp=",
        b"tag=",
        b"x-since=",
        b"x-host=",
        b"x-boot=",
        b"x-pidns=",
        b"x-start=",
        b"x-token=",
        b"x-live=flock",
        b"\n",
        b"\r\n",
        b"\r",
        b" ",
        b"=",
        b"\t",
        b"4711",
        b"1700000000",
        b"0",
        b"-1",
        b"4294967296",
        "\u{feff}".as_bytes(),
        "\u{2028}ü".as_bytes(),
    ];
    call(lock_file_record, &words, INPUTS);
}

#[test]
fn any_uucp_lock_file_names_a_process_or_none() {
    let words: [&[u8]; 10] = [
        b"      4711\n",
        b" ",
        b"\n",
        b"\0",
        b"1",
        b"2147483647",
        b"2147483648",
        b"-1",
        b"getty",
        &[49, 0, 0, 0],
    ];
    call(uucp_record, &words, INPUTS);
}

#[test]
fn any_line_is_an_lfp_command_or_none() {
    let words: [&[u8]; 18] = [
        b"LOCK",
        b"unlock",
        b"Noop",
        b"HELP",
        b"stat",
        b"QUIT",
        b" ",
        b"\t",
        b"/dev/ttyS1",
        b"4711",
        b"-1",
        b"+007",
        b"2147483648",
        b"GET / HTTP/1.1",
        b"Host: ",
        b"\x16\x03",
        b"\r\n",
        &[b'9'; 30],
    ];
    call(lfp_command, &words, INPUTS);
}

#[test]
fn a_target_that_panics_is_noticed() {
    let fails = |input: &[u8]| assert!(!input.starts_with(b"ab"));
    let called = std::panic::catch_unwind(|| call(fails, &[b"a", b"b"], INPUTS));
    assert!(called.is_err());
}
