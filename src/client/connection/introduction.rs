//! What a client says of itself before its first claim, and again over each new connection.

use std::time::Instant;

use super::{Abilities, Connection, Error, Reply, Request};

/// A request in front of the first one, whose reply is still to come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Opening {
    Auth,
    Hello,
    Tag,
}

/// What this client can do.
const OURS: Abilities = Abilities {
    adopt: true,
    slots: false,
    keeps: false,
};

impl Connection {
    /// Puts `hello` and, unless it is empty, the tag in front of the next request. A server that
    /// does not know them may close the connection.
    pub(in crate::client) fn introduce(&mut self, tag: &str) {
        self.tag = Some(tag.to_owned());
        self.write_introduction();
    }

    /// Puts the auth token and the introduction in front of the first request over a new stream.
    pub(super) fn write_opening(&mut self, auth_token: Option<&str>) {
        if let Some(token) = auth_token {
            Request::Auth(token).write(&mut self.opening);
            self.awaited.push_back(Opening::Auth);
            self.knows_secret = true;
        }
        self.write_introduction();
    }

    fn write_introduction(&mut self) {
        let Some(tag) = &self.tag else {
            return;
        };
        Request::Hello(OURS).write(&mut self.opening);
        self.awaited.push_back(Opening::Hello);
        if !tag.is_empty() {
            Request::Tag(tag).write(&mut self.opening);
            self.awaited.push_back(Opening::Tag);
        }
    }

    /// Sends a claim, behind the introduction in the same write, and reads all replies. Calls
    /// `answered` before that to the claim.
    pub(super) fn claim(
        &mut self,
        request: &Request<'_>,
        due: Option<Instant>,
        answered: impl FnOnce(&Connection),
    ) -> Result<Reply, Error> {
        let sent = self.send(request, self.time_to_send(due));
        let opened = sent.and_then(|()| self.receive_opening(self.opening_due(due)));
        self.close_on_error(opened)?;
        if !self.abilities.includes(self.needs) {
            // The server drops the claim with the connection.
            self.close();
            return Err(Error::Unsupported(self.asked()));
        }
        answered(self);
        let reply = self.receive(request, due);
        self.close_on_error(reply)
    }

    fn receive_opening(&mut self, due: Option<Instant>) -> Result<(), Error> {
        while !self.take_opening()? {
            self.read_by(due)?;
        }
        Ok(())
    }

    /// Quotes a reply that does not fit its request, unless a secret may be in it.
    pub(super) fn bad_reply(&self, reply: &[u8]) -> Error {
        let shown = if self.knows_secret {
            b"nonsense"
        } else {
            reply
        };
        Error::bad_reply(&self.server, shown)
    }

    /// Takes the replies to what came before the first request; true once it has all of them.
    pub(super) fn take_opening(&mut self) -> Result<bool, Error> {
        while let Some(opening) = self.awaited.front().copied() {
            let Some(reply) = self.take_next_reply(0)? else {
                return Ok(false);
            };
            match (opening, &reply) {
                (Opening::Auth, Reply::Ok) => {}
                (Opening::Hello, Reply::Hello(abilities)) => {
                    self.abilities = *abilities;
                    self.is_welcome = true;
                }
                (Opening::Tag, Reply::Ok) => self.is_welcome = true,
                // An older server, which does not know the request or lists no abilities.
                (Opening::Hello, Reply::Ok) | (Opening::Hello | Opening::Tag, Reply::Error) => {}
                _ => return Err(self.refusal(&reply)),
            }
            self.awaited.pop_front();
        }
        Ok(true)
    }

    /// When the replies to the introduction are due. A working server sends them at once, even if
    /// the claim, whose reply is due at `due`, waits without limit. The other servers get their
    /// share of the time.
    fn opening_due(&self, due: Option<Instant>) -> Option<Instant> {
        let Some(due) = due else {
            return self.reply_due();
        };
        if self.others == 0 {
            return Some(due);
        }
        let now = Instant::now();
        let share = due.saturating_duration_since(now) / (self.others + 1);
        Some(now + share.min(self.settings.connect_timeout))
    }
}
