//! Who holds and who waits, as a server tells it: latch-protocol(7), STATISTICS.

use std::time::Duration;

use serde_json::Value;

use super::connection::Connection;
use super::error::Error;
use super::granted::Granted;
use super::guard::Guard;
use super::{Client, Kind, Lock};
use crate::protocol::request::Request;

/// A key in use, with its holders and waiters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Queue {
    /// The key.
    pub key: String,
    /// Whether it is a lock or a semaphore.
    pub kind: Kind,
    /// How many slots a semaphore has; 1 for a lock.
    pub limit: u64,
    /// How many slots of a semaphore are held.
    pub taken: u64,
    /// Whether a lock is held by clients that share it.
    pub is_shared: bool,
    /// How many grants there are.
    pub holder_count: u64,
    /// How many claims wait.
    pub waiter_count: u64,
    /// The holders that the server lists, at most 64, in the order of their grants.
    pub holders: Vec<Holder>,
    /// The waiters that the server lists, at most 64, in the order of their turns.
    pub waiters: Vec<Waiter>,
}

/// A grant.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Holder {
    /// Who holds it.
    pub party: Party,
    /// The fence of the grant, see [`Token::fence`](super::Token::fence).
    pub fence: u64,
    /// What is left of its lease.
    pub lease_left: Duration,
    /// The numbers of its slots, if the server has given it some.
    pub slot_numbers: Vec<u32>,
}

/// A claim that waits.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Waiter {
    /// Who waits.
    pub party: Party,
}

/// The client of a holder or a waiter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Party {
    /// The number of its connection; 0 for a grant that no connection has: it is kept, or its
    /// client has yet to come back.
    pub connection: u64,
    /// Its address; `None` if the connection has ended.
    pub peer: Option<String>,
    /// What it says of itself.
    pub tag: Option<String>,
    /// Since when it holds or waits.
    pub age: Duration,
    /// How many slots of a semaphore it takes, or of the parts of a lock.
    pub slots: u64,
}

impl Connection {
    /// Returns who holds and who waits for a key, or for all keys in use. Blocks as
    /// [`Connection::holders`] does. A key that is not in use is not in the list.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the server does not know the request, or what can go wrong with a
    /// reply.
    pub fn queues(&mut self, key: Option<&str>) -> Result<Vec<Queue>, Error> {
        let answer = self.holders(key);
        self.parsed(answer)
    }

    /// Returns the grant of a key with this fence; `None` if it is not held. Over the connection
    /// that has the grant of a semaphore's slots, this also gives the slots numbers. Blocks for at
    /// most the reply timeout.
    ///
    /// # Errors
    ///
    /// As for [`Connection::queues`].
    pub fn holder(&mut self, key: &str, fence: u64) -> Result<Option<Holder>, Error> {
        super::slot::check_key(key)?;
        let answer = self.json(&Request::Holder { key, fence });
        let queues = self.parsed(answer)?;
        let holders = queues.into_iter().flat_map(|queue| queue.holders);
        Ok(holders.into_iter().find(|holder| holder.fence == fence))
    }

    fn parsed(&self, answer: Result<String, Error>) -> Result<Vec<Queue>, Error> {
        let unsupported = || Error::Unsupported(self.asked());
        match answer {
            Ok(json) => parse(&json).ok_or_else(unsupported),
            Err(Error::Refused(_)) => Err(unsupported()),
            Err(error) => Err(error),
        }
    }
}

impl Granted {
    /// Asks for the numbers of the slots, if the guard is to know them, and the server gives some.
    pub(super) fn slot_numbers(&mut self) -> Result<Vec<u32>, Error> {
        let Some(limit) = self.slot.limit.filter(|_| self.is_numbered) else {
            return Ok(Vec::new());
        };
        let numbers = match self.connection.holder(&self.key, self.grant.token.fence()) {
            Err(Error::Unsupported(_)) => Vec::new(),
            holder => holder?.map_or_else(Vec::new, |holder| holder.slot_numbers),
        };
        let is_sound = numbers.len() == self.slot.slots.unwrap_or(1) as usize
            && numbers.iter().all(|number| *number < limit);
        Ok(if is_sound { numbers } else { Vec::new() })
    }
}

impl Lock<'_> {
    /// Asks for the numbers of the slots of a semaphore, see [`Guard::slot_numbers`], behind the
    /// grant. The call blocks for at most the reply timeout more.
    pub fn numbered(mut self) -> Self {
        self.is_numbered = true;
        self
    }
}

impl Guard {
    /// The numbers of the slots of a semaphore, if they were [asked for](Lock::numbered):
    /// the lowest ones, from 0 to the limit less 1, that no other holder had. They stay the same as
    /// long as the lock is held. Empty for a lock, for more than 128 slots, from an older server,
    /// and for several slots if as many have numbers already as the server's `--max-slots`.
    ///
    /// ```
    /// use latchd::client::{Address, Client};
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server: Address = "127.0.0.1:6388".parse()?;
    /// # let (_running, server) = Server::in_place_of(server);
    /// let client = Client::new([server]);
    /// let gpus = client.semaphore("gpus", 8).numbered();
    /// let (first, second) = (gpus.acquire()?, gpus.acquire()?);
    /// assert_eq!([first.slot_numbers(), second.slot_numbers()], [[0], [1]]);
    /// first.release()?;
    /// assert_eq!(gpus.slots(3).acquire()?.slot_numbers(), [0, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn slot_numbers(&self) -> &[u32] {
        &self.slot_numbers
    }
}

impl Client {
    /// Asks the server of `key` who holds it and who waits for it; `None` if it is not in use.
    /// Connects, asks nothing else, and takes no place in the queue.
    ///
    /// # Errors
    ///
    /// Those of [`Connection::open`] and [`Connection::queues`].
    ///
    /// ```
    /// use latchd::client::{Address, Client};
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server: Address = "127.0.0.1:6388".parse()?;
    /// # let (_running, server) = Server::in_place_of(server);
    /// let client = Client::new([server]);
    /// assert!(client.queue("ledger")?.is_none());
    /// let guard = client.lock("ledger").tag("worker 7").acquire()?;
    /// let queue = client.queue("ledger")?.expect("it is held");
    /// assert_eq!(queue.holders[0].fence, guard.fence());
    /// assert_eq!(queue.holders[0].party.tag.as_deref(), Some("worker 7"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn queue(&self, key: &str) -> Result<Option<Queue>, Error> {
        super::slot::check_key(key)?;
        let queues = self.ask(self.server_of(key), |connection| {
            connection.queues(Some(key))
        })?;
        Ok(queues.into_iter().find(|queue| queue.key == key))
    }
}

/// Reads the answer to `stats` with the key line `holders`. `None` if it is something else.
pub(crate) fn parse(json: &str) -> Option<Vec<Queue>> {
    let answer: Value = serde_json::from_str(json).ok()?;
    answer.get("keys")?.as_array()?.iter().map(queue).collect()
}

fn queue(entry: &Value) -> Option<Queue> {
    let kind = match entry["kind"].as_str()? {
        "lock" => Kind::Lock,
        "semaphore" => Kind::Semaphore,
        _ => return None,
    };
    let holder_count = entry["holder_count"].as_u64()?;
    // An older server does not say, and each holder has one slot.
    let taken = entry["taken"].as_u64().unwrap_or(holder_count);
    let is_part = entry["slots"].as_u64().is_some_and(|slots| taken < slots);
    Some(Queue {
        key: entry["key"].as_str()?.to_owned(),
        kind,
        limit: entry["limit"].as_u64()?,
        taken,
        is_shared: kind == Kind::Lock && holder_count > 0 && is_part,
        holder_count,
        waiter_count: entry["waiter_count"].as_u64()?,
        holders: list(entry, "holders", holder)?,
        waiters: list(entry, "waiters", |entry| {
            party(entry).map(|party| Waiter { party })
        })?,
    })
}

fn list<T>(entry: &Value, name: &str, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    entry[name].as_array()?.iter().map(read).collect()
}

fn holder(entry: &Value) -> Option<Holder> {
    Some(Holder {
        party: party(entry)?,
        fence: entry["fence"].as_str()?.parse().ok()?,
        lease_left: seconds(&entry["lease_expires_in_s"])?,
        slot_numbers: slot_numbers(entry),
    })
}

/// Of one slot, it is a number; of several, a list.
fn slot_numbers(entry: &Value) -> Vec<u32> {
    let several = entry["slot_numbers"].as_array();
    let all = several.into_iter().flatten().chain(entry.get("slot"));
    all.filter_map(|number| number.as_u64()?.try_into().ok())
        .collect()
}

fn party(entry: &Value) -> Option<Party> {
    let text = |name: &str| Some(entry.get(name)?.as_str().map(str::to_owned));
    Some(Party {
        connection: entry["conn_id"].as_u64()?,
        peer: text("peer")?,
        tag: text("tag")?,
        age: seconds(&entry["age_s"])?,
        // An older server does not say.
        slots: entry["slots"].as_u64().unwrap_or(1),
    })
}

pub(crate) fn seconds(value: &Value) -> Option<Duration> {
    Duration::try_from_secs_f64(value.as_f64()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_of_a_server_becomes_types() {
        let json = concat!(
            r#"{"keys":[{"key":"pool","kind":"semaphore","limit":9,"taken":2,"holder_count":1,"#,
            r#""waiter_count":1,"holders":[{"conn_id":0,"peer":null,"tag":"a\u001b","age_s":1.5,"#,
            r#""fence":"18446744073709551615","lease_expires_in_s":3600.250,"slot":4}],"#,
            r#""waiters":[{"conn_id":8,"peer":"10.0.0.5:4711","tag":null,"slots":3,"age_s":0}]}]}"#
        );
        let party = |connection, peer: Option<&str>, tag: Option<&str>, millis, slots| Party {
            connection,
            peer: peer.map(str::to_owned),
            tag: tag.map(str::to_owned),
            age: Duration::from_millis(millis),
            slots,
        };
        let expected = Queue {
            key: "pool".into(),
            kind: Kind::Semaphore,
            limit: 9,
            taken: 2,
            is_shared: false,
            holder_count: 1,
            waiter_count: 1,
            holders: vec![Holder {
                party: party(0, None, Some("a\u{1b}"), 1500, 1),
                fence: u64::MAX,
                lease_left: Duration::from_millis(3_600_250),
                slot_numbers: vec![4],
            }],
            waiters: vec![Waiter {
                party: party(8, Some("10.0.0.5:4711"), None, 0, 3),
            }],
        };
        assert_eq!(parse(json), Some(vec![expected]));
        let several = json.replace(r#""slot":4"#, r#""slot_numbers":[0, 8]"#);
        let queues = parse(&several).expect("an answer");
        assert_eq!(queues[0].holders[0].slot_numbers, [0, 8]);
        assert_eq!(parse(r#"{"keys":[]}"#), Some(Vec::new()));
    }

    #[test]
    fn a_lock_is_shared_if_its_holders_have_a_part_of_it() {
        for (figures, is_shared) in [
            (r#""slots":1048576,"taken":2"#, true),
            (r#""slots":1048576,"taken":1048576"#, false),
            // An older server has no shared locks.
            (r#""unknown":1"#, false),
        ] {
            let json = format!(
                r#"{{"keys":[{{"key":"k","kind":"lock","limit":1,{figures},"holder_count":2,
                "waiter_count":0,"holders":[],"waiters":[]}}]}}"#
            );
            let queues = parse(&json).expect("an answer");
            assert_eq!(queues[0].is_shared, is_shared, "{figures}");
        }
    }

    #[test]
    fn something_else_is_no_answer() {
        for json in [
            "",
            "{}",
            "[]",
            r#"{"keys":[{}]}"#,
            r#"{"connections":1,"locks":[],"semaphores":[]}"#,
        ] {
            assert_eq!(parse(json), None, "{json}");
        }
    }
}
