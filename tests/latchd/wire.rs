//! The wire protocol, to the byte: plays the transcripts in `tests/latchd/wire/`.
//!
//! The connections speak the `SCHEME` of the test crate: plain text, or the same over TLS.
//!
//! With `LATCHD_WIRE_SERVER=host:port` the transcripts are played against that server instead;
//! sections which need options, signals, the log or an empty table are then skipped.

use std::net::{SocketAddr, ToSocketAddrs};
use std::thread;

use crate::support::transcript::{transcripts, Folder, PAUSE_BETWEEN_BYTES};
use crate::support::{described, shown, Daemon, Event, PATIENCE};
use crate::SCHEME;

const FOLDER: Folder = Folder {
    path: "tests/latchd/wire",
    scheme: SCHEME,
    start: |options, _| Daemon::start_over(SCHEME, options),
    other: other_server,
};

transcripts! {
    FOLDER;
    adopt
    auth
    clients
    closing
    disconnect
    documented
    draining
    expiry
    first_words
    framing
    integers
    limits
    locks
    numbers_of_arguments
    operators
    order
    pipelining
    read_timeout
    semaphores
    stats
    status
    telnet
    two_phases
    weights
}

#[test]
fn where_the_stream_is_split_changes_no_reply() {
    let Some(server) = own_server(&["--max-locks", "2000"]) else {
        return;
    };
    // Six digits for the number of the run, so that no run meets the keys of another.
    let frames = [
        "l\nkeyNNNNNN\n0\nr\nkeyNNNNNN\nbogus\nping\n_\n_\n",
        "e\r\nkeyNNNNNN\r\n 7 \r\ne\r\nkeyNNNNNN\r\n\r\nw\r\nkeyNNNNNN\r\n0\r\nw\r\nkeyNNNNNN\r\n0\r\n",
        "se\nkeyNNNNNN\n2 9\nl\nkeyNNNNNN\n0\nsl\nkeyNNNNNN\n0 2\nsw\nkeyNNNNNN\n0\n",
        "bogus\nk\n\nl\n\n1\nl\nk k\n1\nl\nk\n1x\nl\nkeyNNNNNN\u{e9}\u{20ac}\n0 7\nping\n\n\n",
    ];
    let mut run = 0;
    let mut replies = |frames: &str, split_at: usize| {
        run += 1;
        let bytes = frames.replace("NNNNNN", &format!("{run:06}")).into_bytes();
        split_replies(&server, &bytes, split_at)
    };
    for frames in frames {
        let whole = replies(frames, 0);
        for split_at in 1..frames.len() {
            let split = replies(frames, split_at);
            assert_eq!(
                split,
                whole,
                "split after byte {split_at} of {}",
                shown(frames.as_bytes())
            );
        }
    }
}

/// What the server answers to `bytes` in two writes, with tokens blotted out.
fn split_replies(server: &Daemon, bytes: &[u8], split_at: usize) -> Vec<String> {
    let mut client = server.connect();
    let (head, tail) = bytes.split_at(split_at);
    if !head.is_empty() {
        client.send_bytes(head);
        thread::sleep(PAUSE_BETWEEN_BYTES);
    }
    client.send_bytes(tail);
    client.half_close();
    let mut replies = Vec::new();
    loop {
        match client.next_event(PATIENCE) {
            Event::Line(line) => replies.push(without_token(&shown(&line))),
            Event::Eof => return replies,
            other => panic!("after {replies:?} came {}", described(&other)),
        }
    }
}

fn without_token(reply: &str) -> String {
    reply
        .split(' ')
        .map(|word| if word.len() == 32 { "<token>" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn ten_thousand_pings_in_one_stream_get_ten_thousand_replies() {
    const PINGS: usize = 10_000;
    let Some(server) = own_server(&[]) else {
        return;
    };
    let mut client = server.connect();
    let mut writer = client.writer();
    // Neither side may wait for the other to read: the replies do not fit into the buffers.
    let writing = thread::spawn(move || writer.write_all("ping\n_\n_\n".repeat(PINGS).as_bytes()));
    for _ in 0..PINGS {
        client.expect("ok");
    }
    writing
        .join()
        .expect("it cannot panic")
        .expect("the server reads on");
    client.half_close();
    client.expect_eof();
}

/// A daemon of this build; none if the transcripts are played against another server, or if the
/// machine lacks what the connections take.
fn own_server(args: &[&str]) -> Option<Daemon> {
    let is_wanted = other_server().is_none() && SCHEME.is_available();
    is_wanted.then(|| Daemon::start_over(SCHEME, args))
}

fn other_server() -> Option<SocketAddr> {
    let name = std::env::var("LATCHD_WIRE_SERVER").ok()?;
    let mut addrs = name
        .to_socket_addrs()
        .unwrap_or_else(|error| panic!("LATCHD_WIRE_SERVER={name}: {error}"));
    addrs.next()
}
