//! Who holds and who waits, as reported by a server: see latch-protocol(7), STATISTICS.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use super::claim::ENDED;
use super::connection::Connection;
use super::error::Error;
use super::guard::Guard;
use super::{Client, Lock};
use crate::os::text::{rough_time, Plain};
#[cfg(feature = "programs")]
use crate::wire::abilities::Abilities;
use crate::wire::request::Request;
use crate::wire::terms::Kind;

/// A key in use, with its holders and waiters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Queue {
    /// The key.
    pub key: String,
    /// Whether the key is a lock or a semaphore.
    pub kind: Kind,
    /// How many slots a semaphore has; 1 for a lock.
    pub limit: u64,
    /// How many slots of a semaphore are held.
    pub taken: u64,
    /// Whether a lock is held by clients that share it.
    pub is_shared: bool,
    /// The number of holders, of which the server may list only some.
    pub holder_count: u64,
    /// The number of claims that wait.
    pub waiter_count: u64,
    /// The holders that the server lists, at most 64, in the order of their grants.
    pub holders: Vec<Holder>,
    /// The waiters that the server lists, at most 64, in the order of arrival.
    pub waiters: Vec<Waiter>,
}

/// The holder of a grant.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Holder {
    /// The client.
    pub party: Party,
    /// The fence of the grant, see [`Token::fence`](super::Token::fence).
    pub fence: u64,
    /// The time left of the lease.
    pub lease_left: Duration,
    /// The numbers of the holder's slots; empty if the server has not numbered them.
    pub slot_numbers: Vec<u32>,
    /// Whether the server keeps the grant without a connection, because its client asked for that:
    /// see [`Guard::keep_for`].
    pub is_kept: bool,
}

/// A claim that waits.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Waiter {
    /// The client.
    pub party: Party,
}

/// The client of a holder or a waiter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Party {
    /// The number of the client's connection; 0 if the grant has no connection, because the server
    /// keeps it or the client has yet to reconnect.
    pub connection: u64,
    /// The client's address; `None` if the connection has ended.
    pub peer: Option<String>,
    /// The tag that the client has set, if any.
    pub tag: Option<String>,
    /// How long the client has held or waited.
    pub age: Duration,
    /// How many slots of a semaphore the client holds or waits for; 1 for a lock.
    pub slots: u64,
    /// Whether the client shares a lock, or waits to share it.
    pub is_shared: bool,
}

impl Party {
    /// The client's tag, or else its address, for one line. If the server reports neither, says
    /// that the client has disconnected.
    fn who(&self) -> String {
        let known = [&self.tag, &self.peer].into_iter().flatten();
        let mut shown = known.map(|text| Plain(text.as_bytes()).to_string());
        let first = shown.find(|text| !text.is_empty());
        first.unwrap_or_else(|| "a client that has disconnected".to_owned())
    }
}

impl Holder {
    /// What is special about this hold: `shared`, `reserved`, or `kept` if its command has ended.
    pub(crate) fn marks(&self) -> impl Iterator<Item = &'static str> {
        let tag = self.party.tag.as_deref().unwrap_or_default();
        let kept =
            (self.is_kept).then_some(["reserved", "kept"][usize::from(tag.ends_with(ENDED))]);
        let shared = self.party.is_shared.then_some("shared");
        [shared, kept].into_iter().flatten()
    }

    /// How many slots this is, the number of each, and what is special: `2 #0 #3 reserved`. The
    /// numbers of many slots are left out, because they would fill the line.
    #[cfg(feature = "programs")]
    pub(crate) fn slots_in_words(&self) -> String {
        let numbers = Some(&self.slot_numbers).filter(|numbers| numbers.len() <= 8);
        let numbers = numbers.into_iter().flatten();
        let numbers = numbers.map(|number| format!("#{number}"));
        let marks: Vec<&str> = self.marks().collect();
        let marks = (!marks.is_empty()).then(|| marks.join(", "));
        let all = [self.party.slots.to_string()];
        let all: Vec<String> = all.into_iter().chain(numbers).chain(marks).collect();
        all.join(" ")
    }
}

/// Formats the holder as messages and tables do: `backup.sh@db1 pid 4711 (3 slots) for 12 m`. In
/// the parentheses are more than one slot, `shared`, `kept without a process`, and `kept` for a
/// grant that is kept after its command has ended.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.party.who())?;
        let slots = (self.party.slots > 1).then(|| format!("{} slots", self.party.slots));
        let marks = self.marks().map(str::to_owned);
        let words: Vec<String> = slots.into_iter().chain(marks).collect();
        if !words.is_empty() {
            let words = words
                .join(", ")
                .replace("reserved", "kept without a process");
            write!(f, " ({words})")?;
        }
        write!(f, " for {}", rough_time(self.party.age))
    }
}

impl Connection {
    /// Returns the holders and waiters of a key, or of all keys in use. Blocks for as long as
    /// [`Connection::holders`]. A key that is not in use is not in the list.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the server does not know the request, or [the errors of any
    /// request](#errors).
    pub fn queues(&mut self, key: Option<&str>) -> Result<Vec<Queue>, Error> {
        let answer = self.holders(key);
        self.parsed(answer)
    }

    /// Returns the queue of `key`, if it is in use, and for how long the server will grant nothing
    /// because it has just restarted. Blocks and fails like [`Connection::queues`].
    #[cfg(feature = "programs")]
    pub(crate) fn prospects(&mut self, key: &str) -> Result<(Option<Queue>, Duration), Error> {
        let answer = self.holders(Some(key));
        let settling = match &answer {
            Ok(json) => settling(json),
            Err(_) => Duration::ZERO,
        };
        let queues = self.parsed(answer)?;
        let queue = queues.into_iter().find(|queue| queue.key == key);
        Ok((queue, settling))
    }

    /// Returns the holder of `key` whose grant has this fence; `None` if there is none. If the
    /// grant is of semaphore slots and belongs to this connection, the server also numbers the
    /// slots. Blocks for at most the reply timeout.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`Connection::queues`].
    pub fn holder(&mut self, key: &str, fence: u64) -> Result<Option<Holder>, Error> {
        let queue = self.holding(key, fence)?;
        Ok(queue.and_then(|queue| queue.holders.into_iter().next()))
    }

    /// Returns the queue of `key` with the holder whose grant has this fence as the only holder;
    /// `None` if there is no such grant. Blocks and fails like [`Connection::holder`].
    pub(crate) fn holding(&mut self, key: &str, fence: u64) -> Result<Option<Queue>, Error> {
        super::claim::check_key(key)?;
        let answer = self.json(&Request::Holder { key, fence });
        let queues = self.parsed(answer)?.into_iter().map(|mut queue| {
            queue.holders.retain(|holder| holder.fence == fence);
            queue
        });
        Ok(queues.into_iter().find(|queue| !queue.holders.is_empty()))
    }

    /// Returns what the server remembers of a key, or of all keys, as it says it and parsed. Blocks
    /// and fails like [`Connection::queues`].
    #[cfg(feature = "programs")]
    pub(crate) fn history(&mut self, key: Option<&str>) -> Result<(String, Value), Error> {
        // An older server answers the request, too, but without the history.
        self.introduce("");
        let answer = match key {
            Some(_) => self.holders(key),
            None => self.json(&Request::Histories),
        };
        if self.introduction.is_unknown_to_server {
            return Err(Error::Unsupported(self.asked()));
        }
        let json = answer?;
        let is_known = self.introduction.abilities.has(Abilities::STATUS);
        let parsed: Option<Value> = serde_json::from_str(&json).ok();
        let parsed = parsed.filter(|it| is_known && it["keys"].is_array());
        let parsed = parsed.ok_or_else(|| Error::Unsupported(self.asked()))?;
        Ok((json, parsed))
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

impl Lock<'_> {
    /// Asks for the numbers of the slots of a semaphore after the grant: see
    /// [`Guard::slot_numbers`]. Acquiring then blocks for up to another reply timeout.
    pub fn numbered(mut self) -> Self {
        self.is_numbered = true;
        self
    }
}

impl Guard {
    /// The numbers of the slots of a semaphore, if they were [asked for](Lock::numbered). They are
    /// the lowest numbers, from 0 to the limit minus 1, that no other holder had, and stay the same
    /// as long as the slots are held. The list is empty for a lock, for more than 128 slots, and
    /// from an older server. It is also empty for several slots if numbers for them would exceed
    /// the server's `--max-slots`.
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
    /// Returns the holders and waiters of `key`; `None` if it is not in use. Connects for this one
    /// request, and takes no place in the queue.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`Connection::open`] and [`Connection::queues`].
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
        super::claim::check_key(key)?;
        let queues = self.ask(self.server_of(key), None, |connection| {
            connection.queues(Some(key))
        })?;
        Ok(queues.into_iter().find(|queue| queue.key == key))
    }
}

/// Parses the answer to `stats` with the key line `holders`; `None` if it has another form.
pub(crate) fn parse(json: &str) -> Option<Vec<Queue>> {
    let answer: Value = serde_json::from_str(json).ok()?;
    answer.get("keys")?.as_array()?.iter().map(queue).collect()
}

/// For how long a server will grant nothing, according to its answer; zero if it does not say.
#[cfg(feature = "programs")]
pub(crate) fn settling(json: &str) -> Duration {
    let answer: Value = serde_json::from_str(json).unwrap_or_default();
    seconds(&answer["settling_s"]).unwrap_or_default()
}

fn queue(entry: &Value) -> Option<Queue> {
    let kind = Kind::from_word(entry["kind"].as_str()?)?;
    let holder_count = entry["holder_count"].as_u64()?;
    // An older server does not report this. Each of its holders has one slot.
    let taken = entry["taken"].as_u64().unwrap_or(holder_count);
    let slots = entry["slots"].as_u64();
    let is_part = slots.is_some_and(|slots| taken < slots);
    let party = |entry: &Value| party(entry, kind, slots);
    let holder = |entry: &Value| {
        Some(Holder {
            party: party(entry)?,
            fence: entry["fence"].as_str()?.parse().ok()?,
            lease_left: seconds(&entry["lease_expires_in_s"])?,
            slot_numbers: slot_numbers(entry),
            is_kept: entry["kept"] == true,
        })
    };
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

/// A single number is under `slot`, several are under `slot_numbers`.
fn slot_numbers(entry: &Value) -> Vec<u32> {
    let several = entry["slot_numbers"].as_array();
    let all = several.into_iter().flatten().chain(entry.get("slot"));
    all.filter_map(|number| number.as_u64()?.try_into().ok())
        .collect()
}

/// Reads the client of a holder or a waiter of a key that has this many slots.
fn party(entry: &Value, kind: Kind, slots_of_key: Option<u64>) -> Option<Party> {
    let text = |name: &str| Some(entry.get(name)?.as_str().map(str::to_owned));
    // An older server does not report this.
    let slots = entry["slots"].as_u64().unwrap_or(1);
    // A server of version 1.1 has many slots for each lock. A client that shares it takes one.
    let is_part = || slots_of_key.is_some_and(|all| slots < all);
    let is_shared = || entry["shared"].as_bool().unwrap_or_else(is_part);
    Some(Party {
        connection: entry["conn_id"].as_u64()?,
        peer: text("peer")?,
        tag: text("tag")?,
        age: seconds(&entry["age_s"])?,
        slots: match kind {
            Kind::Lock => 1,
            Kind::Semaphore => slots,
        },
        is_shared: kind == Kind::Lock && is_shared(),
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
            is_shared: false,
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
                is_kept: false,
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
    fn a_client_shares_a_lock_if_the_server_says_so() {
        let places = |rest: &str| {
            let place = |rest: &str| {
                format!(
                    r#"{{"conn_id":1,"peer":null,"tag":null,{rest},"age_s":0,"fence":"1",
                    "lease_expires_in_s":1}}"#
                )
            };
            let json = format!(
                r#"{{"keys":[{{"key":"k","kind":"lock","limit":1,"slots":1048576,"taken":1,
                "holder_count":1,"waiter_count":1,"holders":[{0}],"waiters":[{0}]}}]}}"#,
                place(rest)
            );
            let queue = parse(&json).expect("an answer").remove(0);
            let places = [&queue.holders[0].party, &queue.waiters[0].party];
            assert!(places.iter().all(|party| party.slots == 1), "{rest}");
            places.map(|party| party.is_shared)
        };
        assert_eq!(places(r#""slots":1,"shared":true"#), [true; 2]);
        assert_eq!(places(r#""slots":1,"shared":false"#), [false; 2]);
        // As a server of version 1.1 says it.
        assert_eq!(places(r#""slots":1"#), [true; 2]);
        assert_eq!(places(r#""slots":1048576"#), [false; 2]);
    }

    #[test]
    fn a_holder_is_shown_with_its_slots_and_what_is_special() {
        let shown = |slots, tag: &str, is_shared, is_kept| {
            let party = Party {
                connection: 0,
                peer: None,
                tag: Some(tag.to_owned()).filter(|tag| !tag.is_empty()),
                age: Duration::from_secs(720),
                slots,
                is_shared,
            };
            let holder = Holder {
                party,
                fence: 1,
                lease_left: Duration::ZERO,
                slot_numbers: Vec::new(),
                is_kept,
            };
            holder.to_string()
        };
        assert_eq!(shown(1, "a@b", false, false), "a@b for 12 m");
        assert_eq!(
            shown(3, "a@b", false, true),
            "a@b (3 slots, kept without a process) for 12 m"
        );
        assert_eq!(
            shown(1, "a (ended)", true, true),
            "a (ended) (shared, kept) for 12 m"
        );
        assert_eq!(
            shown(1, "", false, false),
            "a client that has disconnected for 12 m"
        );
    }

    #[test]
    fn a_server_may_say_when_it_begins_to_grant() {
        let json = r#"{"keys":[],"settling_s":11.500}"#;
        assert_eq!(parse(json), Some(Vec::new()));
        assert_eq!(settling(json), Duration::from_millis(11_500));
        assert_eq!(settling(r#"{"keys":[]}"#), Duration::ZERO);
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
