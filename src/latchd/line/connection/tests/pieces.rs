//! A check of openings whose bytes arrive in arbitrary pieces, for tests and fuzzers.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use rustix::cmsg_space;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::input::Input;
use super::outbox::Outbox;
use crate::latchd::auth::tokens::Tokens;
use crate::latchd::context::{Offer, ServerContext};
use crate::latchd::line::ending::Ending;
use crate::latchd::line::opening::open;
use crate::latchd::table::ConnId;
use crate::os::stream::{Socket, Stream};
use crate::shared::log::{Log, Throttle};
use crate::shared::net::connections::Connections;
use crate::shared::net::hangup::HangupWatch;
use crate::wire::abilities::Abilities;

/// The auth token of a server that has one.
pub(crate) const SECRET: &[u8] = b"secret";

/// The maximum number of bytes that the client sends. The replies to them must fit into the
/// socket's buffer.
const MAX_LEN: usize = 1024;

/// The maximum number of pieces between the first and the last one. Each piece is sent with a
/// descriptor, and the system limits the descriptors in flight.
const MAX_PIECES: usize = 64;

const HOUR: Duration = Duration::from_secs(3600);

/// Asserts that the result of an opening, and what it leaves to the session, do not depend on the
/// pieces in which the bytes arrive.
pub fn opening(input: &[u8]) {
    let [secret, first_len, len, bytes @ ..] = input else {
        return;
    };
    let bytes = &bytes[..bytes.len().min(MAX_LEN)];
    let context = context((secret % 2 == 1).then(|| SECRET.into()));
    let whole = Opened::from([bytes], &context);
    let (first, rest) = bytes.split_at(bytes.len().min(usize::from(*first_len)));
    let len = 1 + usize::from(*len);
    let (short, last) = rest.split_at(rest.len().min(len * MAX_PIECES));
    let pieces = [first].into_iter().chain(short.chunks(len)).chain([last]);
    assert_eq!(Opened::from(pieces, &context), whole);
}

/// The context of a server that lets its clients take an hour for everything.
pub fn context(auth_token: Option<Box<[u8]>>) -> ServerContext {
    ServerContext {
        offer: Offer {
            default_lease: HOUR,
            max_lease: HOUR,
            abilities: Abilities::NONE,
        },
        read_timeout: HOUR,
        write_timeout: Some(Duration::ZERO),
        auto_release: true,
        auth_tokens: auth_token.map(|token| Arc::new(Tokens::single(&token))),
        admin_tokens: None,
        operator_socket: None,
        auth_refusals: Throttle::default(),
        right_refusals: Throttle::default(),
        malformed: Throttle::default(),
        cap_warnings: Throttle::default(),
        replies: RwLock::default(),
        worst_case: 0,
        connections: Arc::new(Connections::new(1, None, b"")),
        log: Log::silent(),
        node: None,
        state: None,
    }
}

/// The result of an opening.
#[derive(Debug, PartialEq, Eq)]
struct Opened {
    /// Why the connection ended in its opening; `None` if the session got the rest.
    refused: Option<String>,
    frames: Vec<[Vec<u8>; 3]>,
    end: String,
    replies: String,
    /// The replies to telnet commands. Such a reply may overtake replies to text that came before
    /// its command.
    telnet: Vec<u8>,
}

impl Opened {
    fn from<'p>(pieces: impl IntoIterator<Item = &'p [u8]>, context: &ServerContext) -> Opened {
        static WATCH: OnceLock<HangupWatch> = OnceLock::new();
        let watch = WATCH.get_or_init(|| HangupWatch::new().expect("an epoll instance"));
        let (client, ours) = UnixStream::pair().expect("a socket pair");
        client.set_nonblocking(true).expect("a socket");
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            send_apart(&client, piece);
        }
        client.shutdown(Shutdown::Write).expect("a connection");
        let stream = Stream::new(Socket::Unix(ours));
        let mut input = Input::new(&stream, context);
        let mut outbox = Outbox::new(&stream, context, watch, ConnId(1));
        let opened = open(&mut input, &mut outbox, context);
        let mut frames = Vec::new();
        let (refused, end) = match opened {
            Err(ending) => (Some(ending.reason()), ending),
            Ok(_) => (None, rest_of(&mut input, &mut outbox, &mut frames)),
        };
        let mut sent = Vec::new();
        let received = (&client).read_to_end(&mut sent);
        assert!(received.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        sent.append(&mut outbox.out);
        let (replies, mut telnet) = apart(&sent);
        // If the server ends the connection, it depends on timing whether it answers a later telnet
        // command.
        if !matches!(end, Ending::PeerClosed) {
            telnet.clear();
        }
        Opened {
            refused,
            frames,
            end: end.reason(),
            replies,
            telnet,
        }
    }
}

/// Reads the frames that a session would get. Returns why the connection ends.
fn rest_of(input: &mut Input, outbox: &mut Outbox, frames: &mut Vec<[Vec<u8>; 3]>) -> Ending {
    loop {
        let read = match input.has_frame() {
            Ok(true) => {
                frames.push(input.frame().map(<[u8]>::to_vec));
                input.end_frame();
                continue;
            }
            Ok(false) => input.read(None, &mut outbox.out),
            Err(ending) => Err(ending),
        };
        if let Err(ending) = read {
            return ending;
        }
    }
}

/// Sends bytes that no read returns together with other bytes. On a Unix socket, a read ends after
/// a message that carries a descriptor.
fn send_apart(client: &UnixStream, piece: &[u8]) {
    static NOTHING: OnceLock<File> = OnceLock::new();
    let nothing = NOTHING.get_or_init(|| File::open("/dev/null").expect("/dev/null"));
    let descriptors = [nothing.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = sendmsg(
        client,
        &[IoSlice::new(piece)],
        &mut ancillary,
        SendFlags::empty(),
    );
    assert_eq!(sent, Ok(piece.len()));
}

/// Separates the replies in text from those to telnet commands, which are IAC and two more bytes.
fn apart(sent: &[u8]) -> (String, Vec<u8>) {
    let (mut text, mut telnet) = (String::new(), Vec::new());
    let mut bytes = sent.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            0xff => telnet.extend(bytes.by_ref().take(2)),
            byte => text.push(char::from(*byte)),
        }
    }
    (text, telnet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_arrive_one_by_one() {
        let (client, ours) = UnixStream::pair().expect("a socket pair");
        for piece in [&b"ab"[..], b"c", b"def"] {
            send_apart(&client, piece);
        }
        let mut buffer = [0; 8];
        let mut lens = [0; 3];
        for len in &mut lens {
            *len = (&ours).read(&mut buffer).expect("input");
        }
        assert_eq!(lens, [2, 1, 3]);
    }

    #[test]
    fn a_line_behind_an_interrupt_is_judged_as_a_first_line() {
        let context = context(None);
        for (line, refused) in [
            (&b"quit\n"[..], Some("quit")),
            (b"GET / HTTP/1.1\r\n", Some("http")),
            (b"\x16\x03\x01\n", Some("tls")),
            (b"ping\n", None),
        ] {
            let stream = [b"l\n\xff\xf4", line, b"_\n_\n"].concat();
            let opened = Opened::from([&stream[..]], &context);
            assert_eq!(opened.refused.as_deref(), refused);
        }
    }
}
