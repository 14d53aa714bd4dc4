//! A claim with what the client says of itself.

use std::time::Instant;

use super::{Connection, Error, Reply, Request};

impl Connection {
    /// Sends a claim, behind the tag in the same write, and reads both replies. Calls `answered` in
    /// between; at once if there is no tag.
    pub(super) fn claim(
        &mut self,
        request: &Request<'_>,
        due: Option<Instant>,
        answered: impl FnOnce(&Connection),
    ) -> Result<Reply, Error> {
        let Some(tag) = self.tag.clone() else {
            answered(self);
            return self.exchange(request, due);
        };
        let tag = Request::Tag(&tag);
        let sent = self.send(&[&tag, request], self.time_to_send(due));
        let told = sent.and_then(|()| self.receive(&tag, self.tag_due(due)));
        match self.unless_closed(told)? {
            Reply::Ok => self.accepted_tag = self.tag.take(),
            // The server does not know tags. It serves the claim, or closes the connection.
            Reply::Error => {}
            other => return Err(self.refusal(&other)),
        }
        answered(self);
        let reply = self.receive(request, due);
        self.unless_closed(reply)
    }

    /// When the reply to the tag is due: a server that is of use sends it at once, also if the
    /// claim, which is due at `due`, waits for ever. Other servers get their share of the time.
    fn tag_due(&self, due: Option<Instant>) -> Option<Instant> {
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
