//! A connection that a client makes in the place of one that has ended.

use std::time::Duration;

use super::{Address, Connection, Error, Reply, Request, Settings};
use crate::token::Token;

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
    /// Connects to the same server again, or to another one of its cluster, within `within`. The
    /// auth token and the tag go with the next request.
    pub(in crate::client) fn reconnect(&mut self, within: Duration) -> Result<(), Error> {
        let within = within.min(self.settings.connect_timeout);
        let (stream, _, reached) = self.settings.connect(&self.server, within, 0)?;
        self.close();
        (self.stream, self.reached) = (Some(stream), reached);
        self.greet()
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
            key: None,
            max_reply_len: 0,
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

    /// Puts the auth token and the tag in front of the next request.
    fn greet(&mut self) -> Result<(), Error> {
        let token = self.settings.auth_token()?;
        let greetings = [
            token.as_deref().map(Request::Auth),
            self.accepted_tag.as_deref().map(Request::Tag),
        ];
        for greeting in greetings.iter().flatten() {
            greeting.write(&mut self.greeting);
            self.greetings_due += 1;
        }
        Ok(())
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
