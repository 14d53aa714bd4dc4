//! A connection that a client makes in the place of one that has ended.

use std::io;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Address, Connection, Error, Reply, Request, Settings};
use crate::net::stream::Stream;
use crate::token::Token;

/// The stack of a thread that connects, in bytes.
const STACK_LEN: usize = 128 * 1024;

/// An attempt to connect, on a thread of its own: looking up a name may take longer than a guard
/// may wait. If it is dropped, its connection is closed as soon as there is one.
pub(in crate::client) type Attempt = Receiver<Connected>;

/// What [`Settings::connect`] returns.
type Connected = Result<(Stream, Instant, Address), Error>;

fn start_attempt(connect: impl FnOnce() -> Connected + Send + 'static) -> io::Result<Attempt> {
    let (sender, outcome) = channel();
    thread::Builder::new()
        .name("connecting".into())
        .stack_size(STACK_LEN)
        .spawn(move || drop(sender.send(connect())))?;
    Ok(outcome)
}

/// What a server says of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Held {
    /// Its connection was one of another server, from which this one has taken over.
    Orphaned,
    /// Its connection is open, as far as the server knows: it is released when that ends.
    ByConnection,
    /// There is no such grant, or it ends with its connection just now.
    Gone,
}

impl Connection {
    /// Connects to the same server again, or to another one of its cluster. Waits for at most
    /// `within`, and leaves an attempt that takes longer in `attempt`, for the next call to wait
    /// for. The auth token and the tag go with the next request.
    pub(in crate::client) fn reconnect(
        &mut self,
        attempt: &mut Option<Attempt>,
        within: Duration,
    ) -> Result<(), Error> {
        let under_way = attempt.take();
        let under_way = under_way.map_or_else(|| self.start_attempt(within), Ok)?;
        let (stream, _, reached) = match under_way.recv_timeout(within) {
            Ok(connected) => connected?,
            Err(RecvTimeoutError::Timeout) => {
                *attempt = Some(under_way);
                let error = io::ErrorKind::TimedOut.into();
                return Err(Error::unreachable(&self.server, error));
            }
            Err(RecvTimeoutError::Disconnected) => unreachable!("the thread does not panic"),
        };
        self.close();
        (self.stream, self.reached) = (Some(stream), reached);
        self.greet();
        Ok(())
    }

    /// A connection that has yet to be made.
    pub(super) fn unconnected(server: &Address, settings: &Settings) -> Connection {
        Connection {
            server: server.clone(),
            others: 0,
            reached: server.clone(),
            stream: None,
            buffer: Vec::new(),
            has_answered: false,
            settings: settings.clone(),
            tag: None,
            accepted_tag: None,
            greeting: Vec::new(),
            greetings_due: 0,
            cancelled_by: None,
        }
    }

    /// Another connection to the same servers, that has yet to be made.
    pub(in crate::client) fn another(&self) -> Connection {
        Connection {
            reached: self.reached.clone(),
            accepted_tag: self.accepted_tag.clone(),
            ..Connection::unconnected(&self.server, &self.settings)
        }
    }

    fn start_attempt(&self, within: Duration) -> Result<Attempt, Error> {
        // Without a lookup, it ends in the time for which it is waited for.
        let within = within.min(self.settings.connect_timeout) * 9 / 10;
        let (server, settings) = (self.server.clone(), self.settings.clone());
        start_attempt(move || settings.connect(&server, within, 0)).map_err(Error::System)
    }

    /// Puts the auth token and the tag in front of the next request.
    fn greet(&mut self) {
        let token = self.settings.auth_token.as_deref().map(str::trim);
        let greetings = [
            token.map(Request::Auth),
            self.accepted_tag.as_deref().map(Request::Tag),
        ];
        for greeting in greetings.iter().flatten() {
            greeting.write(&mut self.greeting);
            self.greetings_due += 1;
        }
    }

    /// What the reply to [`Request::Holder`] says of the grant with this token; `None` if not all
    /// of it has come.
    pub(in crate::client) fn look_reply(&mut self, token: Token) -> Result<Option<Held>, Error> {
        Ok(match self.reply_so_far()? {
            None => None,
            Some(Reply::Stats(json)) => Some(held(&json, token)),
            Some(other) => return Err(self.refusal(&other)),
        })
    }
}

/// What the statistics of a key's queue say of the grant with this token. A quote within a text has
/// a backslash before it, so a name with its quotes is none of a text.
fn held(json: &str, token: Token) -> Held {
    let fence = format!("\"fence\":\"{}\"", token.fence());
    let Some((before, _)) = json.split_once(&fence) else {
        return Held::Gone;
    };
    let place = &before[before.rfind("{\"conn_id\":").unwrap_or_default()..];
    if place.starts_with("{\"conn_id\":0,") {
        Held::Orphaned
    } else if place.contains("\"peer\":null,") {
        Held::Gone
    } else {
        Held::ByConnection
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn an_attempt_is_left_under_way_and_waited_for_again() {
        let (_server, ours) = UnixStream::pair().expect("two descriptors");
        let (found, is_found) = channel::<()>();
        let slow_lookup = move || {
            let _ = is_found.recv();
            let nowhere = Address::Unix("/nowhere".into());
            Ok((Stream::Unix(ours), Instant::now(), nowhere))
        };
        let attempt = start_attempt(slow_lookup).expect("a thread");
        let moment = Duration::from_millis(10);
        assert_eq!(
            attempt.recv_timeout(moment).err(),
            Some(RecvTimeoutError::Timeout)
        );
        found.send(()).expect("a reader");
        assert!(attempt.recv_timeout(Duration::from_secs(60)).is_ok());
    }

    #[test]
    fn no_text_of_a_client_passes_for_an_orphan() {
        let token: Token = "0000000000000007aaaaaaaaaaaaaaaa".parse().expect("one");
        let place = |conn: u64, peer: &str, tag: &str, fence: u64| {
            format!(
                r#"{{"conn_id":{conn},"peer":{peer},"tag":{tag},"age_s":1.0,"fence":"{fence}"}}"#
            )
        };
        let queue =
            |places: &[String]| format!(r#"{{"keys":[{{"holders":[{}]}}]}}"#, places.join(","));
        let trap = r#""\"peer\":null,\"fence\":\"7\"{\"conn_id\":0,""#;
        let other = place(0, "null", "null", 77);
        for (places, expected) in [
            (vec![], Held::Gone),
            (vec![other.clone()], Held::Gone),
            (vec![place(1, r#""a""#, trap, 8)], Held::Gone),
            (vec![place(1, "null", trap, 7)], Held::Gone),
            (
                vec![other.clone(), place(0, "null", trap, 7)],
                Held::Orphaned,
            ),
            (vec![other, place(1, r#""a""#, trap, 7)], Held::ByConnection),
        ] {
            assert_eq!(held(&queue(&places), token), expected, "{places:?}");
        }
    }
}
