//! The introduction: what a client tells a server about itself before its first claim over a
//! connection.

use std::time::{Duration, Instant};

use super::{Abilities, Connection, Error, Reply, Request};
use crate::client::address::{Address, LONGEST_ATTEMPT};
use crate::client::claim::ended_tag;
use crate::client::connecting::end_of_share;

/// A request that is sent before the caller's first request, and whose reply is still to come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Opening {
    Auth,
    Hello,
    Tag,
}

/// What the client and the server have told each other.
#[derive(Clone, Debug, Default)]
pub(in crate::client) struct Introduction {
    /// The tag, which precedes the first request over each stream. Empty if there is no tag; `None`
    /// if the client does not introduce itself.
    tag: Option<String>,
    /// The abilities that the server has named.
    pub(in crate::client) abilities: Abilities,
    /// The path of the server's operator socket, if it has named one.
    operator_socket: Option<String>,
    /// Whether the server has accepted the introduction.
    pub(in crate::client) is_accepted: bool,
    /// Whether the server has answered `error` to `hello`, which it does not know.
    pub(in crate::client) is_unknown_to_server: bool,
}

impl Introduction {
    /// The same introduction, for a server that has not answered it yet. It is expected to have the
    /// abilities of the previous one.
    pub(super) fn unanswered(&self) -> Introduction {
        Introduction {
            is_accepted: false,
            is_unknown_to_server: false,
            ..self.clone()
        }
    }
}

/// The abilities of this client.
const OURS: Abilities = Abilities::ADOPT
    .and(Abilities::HEARS_BREAKS)
    .and(Abilities::HEARS_NOT_WRITTEN);

impl Connection {
    /// Queues `hello`, and the tag unless it is empty, to be sent before the next request. A server
    /// that does not know these requests answers `error`, and may then close the connection.
    pub(in crate::client) fn introduce(&mut self, tag: &str) {
        self.introduce_later(tag);
        self.write_introduction();
    }

    /// Asks the server for its operator socket. It tells only a client on its own host.
    pub(crate) fn operator_socket(&mut self) -> Option<Address> {
        self.introduce("");
        self.ping().ok()?;
        let path = self.introduction.operator_socket.take()?;
        Some(Address::Unix(path.into()))
    }

    /// Sends the introduction over later streams only, not over this one.
    pub(in crate::client) fn introduce_later(&mut self, tag: &str) {
        self.introduction.tag = Some(tag.to_owned());
    }

    /// Makes the tag say that the work of this client has ended, if the client has introduced
    /// itself. Waits for the answer for at most `within`.
    pub(in crate::client) fn mark_tag_ended(&mut self, within: Duration) -> Result<(), Error> {
        let Some(tag) = self.introduction.tag.as_deref().map(ended_tag) else {
            return Ok(());
        };
        // A server that does not know the request answers `error`, and shows no tags.
        let answered = self.exchange(&Request::Tag(&tag), Instant::now().checked_add(within));
        self.introduction.tag = Some(tag);
        answered.map(drop)
    }

    /// Queues the auth token and the introduction, to be sent before the first request over a new
    /// stream.
    pub(super) fn write_opening(&mut self, auth_token: Option<&str>) {
        if let Some(token) = auth_token {
            Request::Auth(token).write(&mut self.link.opening);
            self.link.awaited.push_back(Opening::Auth);
            self.has_sent_secret = true;
        }
        self.write_introduction();
    }

    fn write_introduction(&mut self) {
        let Some(tag) = &self.introduction.tag else {
            return;
        };
        Request::Hello(OURS).write(&mut self.link.opening);
        self.link.awaited.push_back(Opening::Hello);
        if !tag.is_empty() {
            Request::Tag(tag).write(&mut self.link.opening);
            self.link.awaited.push_back(Opening::Tag);
        }
    }

    /// Sends the introduction and a claim in one write, and reads all replies. Calls
    /// `on_introduced` after the replies to the introduction, before the reply to the claim.
    pub(super) fn claim(
        &mut self,
        request: &Request<'_>,
        due: Option<Instant>,
        on_introduced: impl FnOnce(&Connection),
    ) -> Result<Reply, Error> {
        let sent = self.send(request, self.time_to_send(due));
        let opening_due = self.opening_due(due);
        let opened = sent.and_then(|()| {
            while !self.take_opening()? {
                self.read_by(opening_due)?;
            }
            Ok(())
        });
        self.close_on_error(opened)?;
        if !self.introduction.abilities.has(self.needs) {
            // Closing the connection makes the server drop the claim.
            self.close();
            return Err(Error::Unsupported(self.asked()));
        }
        on_introduced(self);
        let reply = self.receive(request, due);
        self.close_on_error(reply)
    }

    /// The error for a reply that does not fit its request. It quotes the reply, unless the reply
    /// may contain a secret.
    pub(super) fn bad_reply(&self, reply: &[u8]) -> Error {
        let shown = if self.has_sent_secret {
            b"nonsense"
        } else {
            reply
        };
        Error::bad_reply(&self.server, shown)
    }

    /// Takes the replies to the opening requests. Returns true once all of them have arrived.
    pub(super) fn take_opening(&mut self) -> Result<bool, Error> {
        while let Some(opening) = self.link.awaited.front().copied() {
            let Some(reply) = self.take_next_reply(0)? else {
                return Ok(false);
            };
            match (opening, &reply) {
                (Opening::Auth, Reply::Ok) => self.link.is_let_in = true,
                (Opening::Hello, Reply::Hello(abilities, socket)) => {
                    self.introduction.abilities = *abilities;
                    self.introduction.operator_socket.clone_from(socket);
                    self.introduction.is_accepted = true;
                }
                (Opening::Tag, Reply::Ok) => self.introduction.is_accepted = true,
                // An older server does not know the request, or lists no abilities.
                (Opening::Hello, Reply::Error) => self.introduction.is_unknown_to_server = true,
                (Opening::Hello, Reply::Ok) | (Opening::Tag, Reply::Error) => {}
                _ => return Err(self.error_for(&reply)),
            }
            self.link.awaited.pop_front();
        }
        Ok(true)
    }

    /// The deadline for the replies to the introduction. A working server sends them at once, even
    /// if the claim waits without limit. `due` is the deadline for the reply to the claim. Each
    /// server that is left to ask gets an equal share of the time until `due`.
    fn opening_due(&self, due: Option<Instant>) -> Option<Instant> {
        let Some(due) = due else {
            return self.reply_due();
        };
        if self.servers_left == 0 {
            return Some(due);
        }
        let at_most = Instant::now() + self.settings.connect_timeout.min(LONGEST_ATTEMPT);
        Some(end_of_share(due, self.servers_left).min(at_most))
    }
}
