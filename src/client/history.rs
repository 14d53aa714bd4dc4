//! The past holders of a key, as reported by a server: see latch-protocol(7), STATISTICS.

use std::time::Duration;

use serde_json::Value;

use super::connection::Connection;
use super::error::Error;
use super::slot::ENDED;
use super::statistics::seconds;

/// What a server remembers of a key.
#[derive(Debug, PartialEq)]
pub(crate) struct History {
    /// The latest first.
    pub(crate) past: Vec<PastHold>,
    pub(crate) expected: Option<Expected>,
    /// The server's answer as a whole.
    pub(crate) json: String,
}

#[derive(Debug, PartialEq)]
pub(crate) struct PastHold {
    pub(crate) fence: u64,
    pub(crate) tag: Option<String>,
    pub(crate) ended_ago: Duration,
    pub(crate) waited: Duration,
    pub(crate) held: Duration,
    /// How the hold ended, in one word.
    pub(crate) end: String,
    /// The exit status of the work, if the client told it.
    pub(crate) status: Option<u8>,
}

/// That the server's operator expects work under the key to succeed.
#[derive(Debug, PartialEq)]
pub(crate) struct Expected {
    /// The maximum time from one success to the next.
    pub(crate) within: Duration,
    /// How long ago the last success was, or else the start of the server.
    pub(crate) age: Duration,
    pub(crate) has_succeeded: bool,
    /// How the work is doing, in a few words.
    pub(crate) state: String,
}

impl Connection {
    /// Returns the past holders of a key. Blocks and fails like [`Connection::queues`].
    pub(crate) fn history(&mut self, key: &str) -> Result<History, Error> {
        // An older server answers the request, too, but without the history.
        self.introduce("");
        let answer = self.holders(Some(key));
        let json = match answer {
            _ if self.introduction.is_unknown_to_server => {
                return Err(Error::Unsupported(self.asked()))
            }
            answer => answer?,
        };
        let history = parse(json).filter(|_| self.introduction.abilities.status);
        history.ok_or_else(|| Error::Unsupported(self.asked()))
    }
}

/// Parses the answer to `stats` with the key line `holders` and a key.
fn parse(json: String) -> Option<History> {
    let answer: Value = serde_json::from_str(&json).ok()?;
    let past = answer["history"].as_array().into_iter().flatten();
    Some(History {
        past: past.map(past_holder).collect::<Option<_>>()?,
        expected: match answer.get("expected") {
            Some(expected) => Some(expectation(expected)?),
            None => None,
        },
        json,
    })
}

fn past_holder(entry: &Value) -> Option<PastHold> {
    let tag = entry["tag"].as_str();
    // That its work has ended is true of every past holder.
    let tag = tag.map(|tag| tag.strip_suffix(ENDED).unwrap_or(tag).trim_end());
    Some(PastHold {
        fence: entry["fence"].as_str()?.parse().ok()?,
        tag: tag.map(str::to_owned),
        ended_ago: seconds(&entry["ended_ago_s"])?,
        waited: seconds(&entry["waited_s"])?,
        held: seconds(&entry["held_s"])?,
        end: entry["end"].as_str()?.to_owned(),
        status: match &entry["status"] {
            Value::Null => None,
            status => Some(status.as_u64()?.try_into().ok()?),
        },
    })
}

fn expectation(entry: &Value) -> Option<Expected> {
    Some(Expected {
        within: seconds(&entry["every_s"])?,
        age: seconds(&entry["success_age_s"])?,
        has_succeeded: entry["succeeded"].as_bool()?,
        state: entry["state"].as_str()?.replace('-', " "),
    })
}
