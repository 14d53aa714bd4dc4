//! The table of `latch stats`: who holds and who waits, from a server's JSON.

use std::time::Duration;

use serde_json::Value;

use super::queue::while_settling;
use super::text_table::{header, Table};
use crate::client::{statistics, Holder, Kind, Party, Queue, Waiter};
use crate::os::text::{rough_time, rough_time_left, Readable};

#[derive(Debug)]
pub(super) struct Statistics {
    /// The keys in use. A server may list fewer holders and waiters than it counts. In plain
    /// `stats`, it lists only the holder of a lock, of which it says little.
    keys: Vec<(Queue, Option<PlaceRow>)>,
    /// The number of connections, which only plain `stats` reports.
    connections: Option<u64>,
    /// For how long the server grants nothing, because it has just restarted.
    settling: Duration,
    /// The number of connections that the server closed because of a cap.
    turned_away: u64,
}

/// What the tables show of a holder or a waiter: the client's address or connection, its slots, its
/// age, the rest of its lease, its fence and its tag. A cell is `-` if the server does not report
/// it.
type PlaceRow = [String; 6];

impl Statistics {
    /// Parses the answer to `stats`, in either form; `None` if it is something else.
    pub(super) fn parse(json: &str) -> Option<Statistics> {
        let settling = statistics::settling(json);
        let stats: Value = serde_json::from_str(json).ok()?;
        let turned_away = stats["turned_away"].as_u64().unwrap_or_default();
        if let Some(queues) = statistics::parse(json) {
            return Some(Statistics {
                keys: queues.into_iter().map(|queue| (queue, None)).collect(),
                connections: None,
                settling,
                turned_away,
            });
        }
        let locks = stats["locks"].as_array()?.iter().map(lock);
        let semaphores = stats["semaphores"].as_array()?.iter().map(semaphore);
        Some(Statistics {
            keys: locks.chain(semaphores).collect::<Option<_>>()?,
            connections: Some(stats["connections"].as_u64()?),
            settling,
            turned_away,
        })
    }

    /// The table of all keys in use, with a row for each holder. The keys with the most waiters
    /// come first. The foot shows `grant_rate`, in grants per second.
    pub(super) fn all(mut self, grant_rate: Option<f64>) -> Table {
        self.keys.sort_unstable_by(|(one, _), (other, _)| {
            let by_waiters = other.waiter_count.cmp(&one.waiter_count);
            by_waiters.then_with(|| one.key.cmp(&other.key))
        });
        let mut rows = Vec::new();
        for (queue, plain_holder) in &self.keys {
            let holders = queue.holders.iter().map(holder_row);
            let holders: Vec<PlaceRow> = holders.chain(plain_holder.clone()).collect();
            let listed = holders.len() as u64;
            let others = queue.holder_count.saturating_sub(listed);
            let name_of_others = match (others, listed) {
                (0, 1..) => None,
                (0, _) => Some("-".to_owned()),
                (others, 0) => Some(format!("{others} clients")),
                (others, _) => Some(format!("{others} more")),
            };
            let row_of_others = name_of_others.map(stranger);
            for holder in holders.into_iter().chain(row_of_others) {
                let [peer, slots, age, left, _, tag] = holder;
                let waiters = queue.waiter_count.to_string();
                let (kind, key) = (kind_and_use(queue), escaped(&queue.key));
                rows.push(vec![kind, key, peer, slots, age, left, waiters, tag]);
            }
        }
        let mut foot = vec![format!("{} in use", self.keys.len())];
        if let Some(connections) = self.connections {
            foot[0] += &format!(", {connections} connected");
        }
        if let Some(rate) = grant_rate {
            foot[0] += &format!(", {rate:.1} grants a second");
        }
        if self.turned_away > 0 {
            foot[0] += &format!(", {} connections turned away", self.turned_away);
        }
        foot.extend(while_settling(self.settling));
        Table {
            header: header("KIND,KEY,HOLDER,SLOTS,AGE,LEASE LEFT,WAITERS,TAG"),
            rows,
            foot,
            ..Table::default()
        }
    }

    /// The table of one key, with all its holders and waiters.
    pub(super) fn of(&self, key: &str) -> Table {
        let shown = escaped(key);
        let mut keys = self.keys.iter();
        let Some((queue, plain_holder)) = keys.find(|(queue, _)| queue.key == key) else {
            let known = while_settling(self.settling).unwrap_or_else(|| "not in use".to_owned());
            return Table::line(format!("{shown}: {known}"));
        };
        let held = match (queue.is_shared, queue.kind) {
            (true, _) => format!("shared by {}", queue.holder_count),
            (_, Kind::Lock) => format!("{} of 1 held", queue.holder_count),
            _ => format!("{} of {} held", queue.taken, queue.limit),
        };
        let title = format!(
            "{shown}: {}, {held}, {} waiting",
            queue.kind.word(),
            queue.waiter_count
        );
        let holders = queue.holders.iter().map(holder_row);
        let mut rows: Vec<Vec<String>> = (holders.chain(plain_holder.clone()))
            .map(|place| [&["holder".to_owned()], &place[..]].concat())
            .collect();
        let listed = (rows.len(), queue.waiters.len());
        let waiters = (1..).zip(queue.waiters.iter().map(waiter_row));
        rows.extend(waiters.map(|(at, place)| [&[format!("waiter {at}")], &place[..]].concat()));
        let mut foot: Vec<String> = while_settling(self.settling).into_iter().collect();
        for (count, listed, name) in [
            (queue.holder_count, listed.0, "holders"),
            (queue.waiter_count, listed.1, "waiters"),
        ] {
            let others = count.saturating_sub(listed as u64);
            if others > 0 {
                foot.push(format!("and {others} {name} that the server does not list"));
            }
        }
        Table {
            head: vec![title],
            header: header("PLACE,CLIENT,SLOTS,AGE,LEASE LEFT,FENCE,TAG"),
            rows,
            foot,
        }
    }
}

/// The kind, and how many slots of a semaphore are held.
fn kind_and_use(queue: &Queue) -> String {
    let kind = queue.kind.word();
    match queue.kind {
        Kind::Lock if queue.is_shared => format!("shared {kind}"),
        Kind::Lock => kind.to_owned(),
        Kind::Semaphore => format!("{kind} {}/{}", queue.taken, queue.limit),
    }
}

fn holder_row(holder: &Holder) -> PlaceRow {
    let ShownParty { peer, tag, age } = ShownParty::of(&holder.party);
    let (left, fence) = (rough_time_left(holder.lease_left), holder.fence.to_string());
    [peer, holder.slots_in_words(), age, left, fence, tag]
}

fn waiter_row(waiter: &Waiter) -> PlaceRow {
    let ShownParty { peer, tag, age } = ShownParty::of(&waiter.party);
    let shared = waiter.party.is_shared.then_some(" shared");
    let slots = format!("{}{}", waiter.party.slots, shared.unwrap_or_default());
    [peer, slots, age, or_dash(None), or_dash(None), tag]
}

/// What is shown of the client of a claim.
pub(super) struct ShownParty {
    /// Its address, or its connection.
    pub(super) peer: String,
    pub(super) tag: String,
    /// How long it has held or waited.
    pub(super) age: String,
}

impl ShownParty {
    pub(super) fn of(party: &Party) -> ShownParty {
        let peer = party.peer.as_deref().map(unquoted);
        ShownParty {
            peer: peer.unwrap_or_else(|| match party.connection {
                0 => "no connection".to_owned(),
                connection => format!("connection {connection}"),
            }),
            tag: or_dash(party.tag.as_deref().map(unquoted)),
            age: rough_time(party.age),
        }
    }
}

/// A row about which only the client is known.
fn stranger(peer: String) -> PlaceRow {
    let mut row = [const { None }; 6].map(or_dash);
    row[0] = peer;
    row
}

/// A lock in plain `stats`, which every server knows.
fn lock(entry: &Value) -> Option<(Queue, Option<PlaceRow>)> {
    let left = rough_time_left(statistics::seconds(&entry["lease_expires_in_s"])?);
    let connection = entry["owner_conn_id"].as_u64()?;
    let mut holder = stranger(format!("connection {connection}"));
    holder[3] = left;
    Some((plain(entry, Kind::Lock, 1, 1)?, Some(holder)))
}

/// A semaphore in plain `stats`.
fn semaphore(entry: &Value) -> Option<(Queue, Option<PlaceRow>)> {
    let (limit, taken) = (entry["limit"].as_u64()?, entry["holders"].as_u64()?);
    Some((plain(entry, Kind::Semaphore, limit, taken)?, None))
}

/// A key in plain `stats`. Its holders have a slot each.
fn plain(entry: &Value, kind: Kind, limit: u64, taken: u64) -> Option<Queue> {
    Some(Queue {
        key: entry["key"].as_str()?.to_owned(),
        kind,
        limit,
        taken,
        is_shared: false,
        holder_count: taken,
        waiter_count: entry["waiters"].as_u64()?,
        holders: Vec::new(),
        waiters: Vec::new(),
    })
}

fn escaped(text: &str) -> String {
    Readable(text).to_string()
}

/// Escapes text for a column of its own, where spaces need no quotes.
pub(super) fn unquoted(text: &str) -> String {
    let escaped = escaped(text);
    let inner = escaped
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    inner.map(str::to_owned).unwrap_or(escaped)
}

pub(super) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latch::text_table::fit;

    fn table(json: &str) -> Vec<String> {
        Statistics::parse(json)
            .expect("statistics")
            .all(None)
            .lines()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split("  ")
            .map(str::trim)
            .filter(|word| !word.is_empty())
            .collect()
    }

    const PLAIN: &str = concat!(
        r#"{"connections":3,"locks":[{"key":"a\u001b[2J","owner_conn_id":7,"#,
        r#""lease_expires_in_s":18.200,"waiters":0}],"semaphores":[{"key":"pool","limit":5,"#,
        r#""holders":4,"waiters":2}],"idle_locks":[],"idle_semaphores":[]}"#
    );

    const HOLDERS: &str = concat!(
        r#"{"keys":[{"key":"deploy","kind":"lock","limit":1,"holder_count":1,"waiter_count":1,"#,
        r#""holders":[{"conn_id":7,"peer":"10.0.0.5:4711","tag":"a@b pid 1\u009b","age_s":200.5,"#,
        r#""fence":"12","lease_expires_in_s":30.000}],"#,
        r#""waiters":[{"conn_id":8,"peer":null,"tag":null,"age_s":1.500}]},"#,
        r#"{"key":"pool","kind":"semaphore","limit":9,"holder_count":3,"waiter_count":6,"#,
        r#""holders":[{"conn_id":9,"peer":"unix pid 5 uid 0 x","tag":null,"age_s":7201,"#,
        r#""fence":"11","lease_expires_in_s":1e9}],"waiters":[]}]}"#
    );

    #[test]
    fn a_table_has_a_row_for_each_holder_by_waiters() {
        let lines = table(HOLDERS);
        let expected = [
            "KIND  KEY  HOLDER  SLOTS  AGE  LEASE LEFT  WAITERS  TAG",
            "semaphore 3/9  pool  unix pid 5 uid 0 x  1  2 h  11574 d  6  -",
            "semaphore 3/9  pool  2 more  -  -  -  6  -",
            "lock  deploy  10.0.0.5:4711  1  3 m  30 s  1  a@b pid 1\\xc2\\x9b",
            "2 in use",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(words(line), words(expected));
        }
        let tags = ["TAG", "-", "-", "a@b"].iter().zip(&lines);
        let tags: Vec<_> = tags.map(|(tag, line)| line.rfind(tag)).collect();
        assert!(tags.iter().all(|at| *at == tags[0]), "{lines:?}");
    }

    #[test]
    fn the_form_without_holders_makes_a_table_too() {
        let lines = table(PLAIN);
        let expected = [
            "KIND  KEY  HOLDER  SLOTS  AGE  LEASE LEFT  WAITERS  TAG",
            "semaphore 4/5  pool  4 clients  -  -  -  2  -",
            "lock  a\\x1b[2J  connection 7  -  -  19 s  0  -",
            "2 in use, 3 connected",
        ];
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(words(line), words(expected));
        }
    }

    #[test]
    fn the_foot_says_how_many_connections_were_turned_away() {
        let lines = table(r#"{"keys":[],"turned_away":3}"#);
        let foot = lines.last().map(String::as_str);
        assert_eq!(foot, Some("0 in use, 3 connections turned away"));
    }

    #[test]
    fn one_key_is_shown_with_all_its_places() {
        let statistics = Statistics::parse(HOLDERS).expect("statistics");
        let lines = statistics.of("deploy").lines();
        let expected = [
            "deploy: lock, 1 of 1 held, 1 waiting",
            "PLACE  CLIENT  SLOTS  AGE  LEASE LEFT  FENCE  TAG",
            "holder  10.0.0.5:4711  1  3 m  30 s  12  a@b pid 1\\xc2\\x9b",
            "waiter 1  connection 8  1  2 s  -  -  -",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(words(line), words(expected));
        }
        let last = statistics.of("pool").lines().split_off(3);
        assert_eq!(
            last,
            [
                "and 2 holders that the server does not list",
                "and 6 waiters that the server does not list"
            ]
        );
        assert_eq!(statistics.of("other").lines(), ["other: not in use"]);
    }

    #[test]
    fn slots_are_shown_with_what_is_special_about_them() {
        let numbered = r#""slots":3,"slot_numbers":[0,2,7],"kept":true,"fence":"11""#;
        let json = HOLDERS.replace(r#""fence":"11""#, numbered).replace(
            r#""age_s":1.500"#,
            r#""slots":1,"shared":true,"age_s":1.500"#,
        );
        let statistics = Statistics::parse(&json).expect("statistics");
        let pool = statistics.of("pool").lines();
        assert_eq!(
            words(&pool[2])[..3],
            ["holder", "unix pid 5 uid 0 x", "3 #0 #2 #7 reserved"]
        );
        let deploy = statistics.of("deploy").lines();
        assert_eq!(
            words(&deploy[3])[..3],
            ["waiter 1", "connection 8", "1 shared"]
        );
    }

    #[test]
    fn a_long_key_and_a_long_tag_hide_no_other_column() {
        let json = HOLDERS.replace("deploy", &"k".repeat(60));
        let json = json.replace("a@b pid 1", &"t".repeat(60));
        let lines = |width| {
            let table = Statistics::parse(&json)
                .expect("statistics")
                .all(Some(1.25));
            fit(vec![table], 24, width)
        };
        let at_80 = lines(80);
        assert_eq!(
            words(&at_80[0]),
            [
                "KIND",
                "KEY",
                "HOLDER",
                "AGE",
                "LEASE LEFT",
                "WAITERS",
                "TAG"
            ]
        );
        assert!(at_80[3].contains("kkk...  10.0.0.5:4711"), "{at_80:?}");
        assert!(at_80[3].ends_with("ttt..."), "{at_80:?}");
        assert_eq!(at_80[4], "2 in use, 1.2 grants a second");
        let at_40 = lines(40);
        assert_eq!(words(&at_40[0]), ["KEY", "AGE", "WAITERS", "TAG"]);
        assert!(at_40[3].ends_with("ttt..."), "{at_40:?}");
        for (lines, width) in [(at_80, 80), (at_40, 40), (lines(30), 30)] {
            assert!(lines.iter().all(|line| line.len() <= width), "{lines:?}");
        }
        assert!(lines(1)[3].starts_with("kkkkk..."));
    }

    #[test]
    fn what_no_row_has_goes_first() {
        let lines = fit(
            vec![Statistics::parse(PLAIN).expect("statistics").all(None)],
            24,
            60,
        );
        assert_eq!(
            words(&lines[0]),
            ["KIND", "KEY", "HOLDER", "LEASE LEFT", "WAITERS"]
        );
    }

    #[test]
    fn a_long_cell_widens_no_other_row() {
        for name in ["deploy", "10.0.0.5:4711", "a@b pid 1"] {
            let lines = table(&HOLDERS.replace(name, &"x".repeat(100_000)));
            let lens: Vec<usize> = lines.iter().map(String::len).collect();
            assert!(lens[3] > 100_000, "{name}: {lens:?}");
            assert!(lens[..3].iter().all(|len| *len < 300), "{name}: {lens:?}");
        }
    }

    #[test]
    fn other_json_makes_no_table() {
        for json in [
            "",
            "{}",
            "[]",
            r#"{"keys":[{}]}"#,
            r#"{"connections":1,"locks":[{}],"semaphores":[]}"#,
        ] {
            assert!(Statistics::parse(json).is_none(), "{json}");
        }
    }
}
