//! The table of `latch stats`: who holds and who waits, from a server's JSON.

use serde_json::Value;

use super::text_table::{header, Table};
use crate::client::{self, statistics, Kind, Party};
use crate::text::{rough_time, Readable};

#[derive(Debug)]
pub(super) struct Statistics {
    queues: Vec<KeyRow>,
    /// The number of connections, which only plain `stats` reports.
    connections: Option<u64>,
}

/// A key in use.
#[derive(Debug)]
struct KeyRow {
    key: String,
    kind: Kind,
    limit: u64,
    /// How many slots of a semaphore are held.
    taken: u64,
    is_shared: bool,
    holder_count: u64,
    waiter_count: u64,
    /// The holders that the server lists, which may be fewer than it counts.
    holders: Vec<PlaceRow>,
    waiters: Vec<PlaceRow>,
}

/// What the tables show of a holder or a waiter. A cell is `-` if the server does not report it.
#[derive(Clone, Debug)]
struct PlaceRow {
    /// The client's address or connection number.
    peer: String,
    tag: String,
    /// How many slots it has or waits for, and whether it shares them or the server keeps them.
    slots: String,
    age: String,
    lease_left: String,
    fence: String,
}

impl Statistics {
    /// Parses the answer to `stats`, in either form; `None` if it is something else.
    pub(super) fn parse(json: &str) -> Option<Statistics> {
        if let Some(queues) = statistics::parse(json) {
            return Some(Statistics {
                queues: queues.into_iter().map(KeyRow::from).collect(),
                connections: None,
            });
        }
        let stats: Value = serde_json::from_str(json).ok()?;
        let locks = stats["locks"].as_array()?.iter().map(lock);
        let semaphores = stats["semaphores"].as_array()?.iter().map(semaphore);
        Some(Statistics {
            queues: locks.chain(semaphores).collect::<Option<_>>()?,
            connections: Some(stats["connections"].as_u64()?),
        })
    }

    /// The table of all keys in use, with a row for each holder. The keys with the most waiters
    /// come first. The foot shows `grant_rate`, in grants per second.
    pub(super) fn all(mut self, grant_rate: Option<f64>) -> Table {
        self.queues.sort_unstable_by(|one, other| {
            let by_waiters = other.waiter_count.cmp(&one.waiter_count);
            by_waiters.then_with(|| one.key.cmp(&other.key))
        });
        let mut rows = Vec::new();
        for queue in &self.queues {
            let listed = queue.holders.len() as u64;
            let others = queue.holder_count.saturating_sub(listed);
            let name_of_others = match (others, listed) {
                (0, 1..) => None,
                (0, _) => Some("-".to_owned()),
                (others, 0) => Some(format!("{others} clients")),
                (others, _) => Some(format!("{others} more")),
            };
            let row_of_others = name_of_others.map(PlaceRow::stranger);
            for holder in queue.holders.iter().cloned().chain(row_of_others) {
                let waiters = queue.waiter_count.to_string();
                let (kind, key) = (queue.kind_and_use(), escaped(&queue.key));
                let (peer, slots, age) = (holder.peer, holder.slots, holder.age);
                let left = holder.lease_left;
                rows.push(vec![kind, key, peer, slots, age, left, waiters, holder.tag]);
            }
        }
        let mut in_use = format!("{} in use", self.queues.len());
        if let Some(connections) = self.connections {
            in_use += &format!(", {connections} connected");
        }
        if let Some(rate) = grant_rate {
            in_use += &format!(", {rate:.1} grants a second");
        }
        Table {
            header: header("KIND,KEY,HOLDER,SLOTS,AGE,LEASE LEFT,WAITERS,TAG"),
            rows,
            foot: vec![in_use],
            ..Table::default()
        }
    }

    /// The table of one key, with all its holders and waiters.
    pub(super) fn of(&self, key: &str) -> Table {
        let shown = escaped(key);
        let Some(queue) = self.queues.iter().find(|queue| queue.key == key) else {
            return Table::line(format!("{shown}: not in use"));
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
        let row = |name: String, place: &PlaceRow| {
            let place = place.clone();
            let (left, fence) = (place.lease_left, place.fence);
            vec![
                name,
                place.peer,
                place.slots,
                place.age,
                left,
                fence,
                place.tag,
            ]
        };
        let holders = queue.holders.iter();
        let holder_rows = holders.map(|place| row("holder".to_owned(), place));
        let waiters = (1..).zip(&queue.waiters);
        let waiter_rows = waiters.map(|(number, place)| row(format!("waiter {number}"), place));
        let rows = holder_rows.chain(waiter_rows).collect();
        let mut foot = Vec::new();
        for (count, listed, name) in [
            (queue.holder_count, &queue.holders, "holders"),
            (queue.waiter_count, &queue.waiters, "waiters"),
        ] {
            let others = count.saturating_sub(listed.len() as u64);
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

impl KeyRow {
    /// The kind, and how many slots of a semaphore are held.
    fn kind_and_use(&self) -> String {
        let kind = self.kind.word();
        match self.kind {
            Kind::Lock if self.is_shared => format!("shared {kind}"),
            Kind::Lock => kind.to_owned(),
            Kind::Semaphore => format!("{kind} {}/{}", self.taken, self.limit),
        }
    }
}

impl From<client::Queue> for KeyRow {
    fn from(queue: client::Queue) -> KeyRow {
        let holders = queue.holders.iter().map(|holder| PlaceRow {
            lease_left: rough_time(holder.lease_left),
            fence: holder.fence.to_string(),
            ..PlaceRow::of(&holder.party, holder.slots_in_words())
        });
        let waiters = queue.waiters.iter().map(|waiter| {
            let shared = if waiter.party.is_shared {
                " shared"
            } else {
                ""
            };
            PlaceRow::of(&waiter.party, format!("{}{shared}", waiter.party.slots))
        });
        KeyRow {
            holders: holders.collect(),
            waiters: waiters.collect(),
            key: queue.key,
            kind: queue.kind,
            limit: queue.limit,
            taken: queue.taken,
            is_shared: queue.is_shared,
            holder_count: queue.holder_count,
            waiter_count: queue.waiter_count,
        }
    }
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

impl PlaceRow {
    /// A row about which only the client is known.
    fn stranger(peer: String) -> PlaceRow {
        let unknown = || or_dash(None);
        PlaceRow {
            peer,
            tag: unknown(),
            slots: unknown(),
            age: unknown(),
            lease_left: unknown(),
            fence: unknown(),
        }
    }

    /// A row with what is known of each client.
    fn of(client: &Party, slots: String) -> PlaceRow {
        let ShownParty { peer, tag, age } = ShownParty::of(client);
        PlaceRow {
            tag,
            age,
            slots,
            ..PlaceRow::stranger(peer)
        }
    }
}

/// A lock in plain `stats`, which every server knows.
fn lock(entry: &Value) -> Option<KeyRow> {
    let peer = format!("connection {}", entry["owner_conn_id"].as_u64()?);
    let holder = PlaceRow {
        lease_left: rough_time(statistics::seconds(&entry["lease_expires_in_s"])?),
        ..PlaceRow::stranger(peer)
    };
    Some(KeyRow {
        key: entry["key"].as_str()?.to_owned(),
        kind: Kind::Lock,
        limit: 1,
        taken: 1,
        is_shared: false,
        holder_count: 1,
        waiter_count: entry["waiters"].as_u64()?,
        holders: vec![holder],
        waiters: Vec::new(),
    })
}

/// A semaphore in plain `stats`.
fn semaphore(entry: &Value) -> Option<KeyRow> {
    Some(KeyRow {
        key: entry["key"].as_str()?.to_owned(),
        kind: Kind::Semaphore,
        limit: entry["limit"].as_u64()?,
        taken: entry["holders"].as_u64()?,
        is_shared: false,
        holder_count: entry["holders"].as_u64()?,
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
            "lock  a\\x1b[2J  connection 7  -  -  18 s  0  -",
            "2 in use, 3 connected",
        ];
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(words(line), words(expected));
        }
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
