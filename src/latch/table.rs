//! The table of `latch stats`: who holds and who waits, from a server's JSON.

use serde_json::Value;

use crate::client::{self, statistics, Kind, Party};
use crate::text::Escaped;

/// The statistics of one server.
#[derive(Debug)]
pub(super) struct Statistics {
    queues: Vec<KeyRow>,
    /// The number of connections, in the form of `stats` that every server knows. The form with
    /// holders does not have it.
    connections: Option<u64>,
}

/// A key in use.
#[derive(Debug)]
struct KeyRow {
    key: String,
    kind: &'static str,
    limit: u64,
    /// How many slots of a semaphore are held.
    taken: u64,
    is_shared: bool,
    holder_count: u64,
    waiter_count: u64,
    /// Those that the server lists: at most as many as it counts.
    holders: Vec<PlaceRow>,
    waiters: Vec<PlaceRow>,
}

/// What the tables show of a holder or a waiter: the address of the client, or the number of its
/// connection; its tag; since when; what is left of its lease; its fence. A server does not tell
/// everything of each.
type PlaceRow = [String; 5];

/// Lines for the terminal, of which the rows can be cut.
#[derive(Debug, Default)]
pub(super) struct Table {
    head: Vec<String>,
    rows: Vec<String>,
    foot: Vec<String>,
}

impl Statistics {
    /// Reads the answer to `stats`, in either form. `None` if it is something else.
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

    /// All keys in use, those with the most waiters first, with a row for each holder.
    pub(super) fn all(mut self) -> Table {
        self.queues.sort_unstable_by(|one, other| {
            let by_waiters = other.waiter_count.cmp(&one.waiter_count);
            by_waiters.then_with(|| one.key.cmp(&other.key))
        });
        let mut rows = vec![header("KIND,KEY,HOLDER,TAG,AGE,LEASE LEFT,WAITERS")];
        for queue in &self.queues {
            let listed = queue.holders.len() as u64;
            let others = queue.holder_count.saturating_sub(listed);
            let others = match (others, listed) {
                (0, 1..) => None,
                (0, _) => Some("-".to_owned()),
                (others, 0) => Some(format!("{others} clients")),
                (others, _) => Some(format!("{others} more")),
            };
            for holder in queue.holders.iter().chain(&others.map(stranger)) {
                let mut row = vec![queue.kind(), escaped(&queue.key)];
                row.extend_from_slice(&holder[..4]);
                row.push(queue.waiter_count.to_string());
                rows.push(row);
            }
        }
        let mut in_use = format!("{} in use", self.queues.len());
        if let Some(connections) = self.connections {
            in_use += &format!(", {connections} connected");
        }
        Table::new(Vec::new(), &rows, [4, 5, 6], vec![in_use])
    }

    /// One key with all its holders and waiters.
    pub(super) fn of(&self, key: &str) -> Table {
        let shown = escaped(key);
        let Some(queue) = self.queues.iter().find(|queue| queue.key == key) else {
            return Table::line(format!("{shown}: not in use"));
        };
        let held = match (queue.is_shared, queue.kind) {
            (true, _) => format!("shared by {}", queue.holder_count),
            (_, "lock") => format!("{} of 1 held", queue.holder_count),
            _ => format!("{} of {} held", queue.taken, queue.limit),
        };
        let title = format!(
            "{shown}: {}, {held}, {} waiting",
            queue.kind, queue.waiter_count
        );
        let mut rows = vec![header("PLACE,CLIENT,TAG,AGE,LEASE LEFT,FENCE")];
        let holders = queue.holders.iter();
        rows.extend(holders.map(|place| [&["holder".into()], &place[..]].concat()));
        for (number, place) in (1..).zip(&queue.waiters) {
            rows.push([&[format!("waiter {number}")], &place[..]].concat());
        }
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
        Table::new(vec![title], &rows, [3, 4, 5], foot)
    }
}

impl KeyRow {
    fn kind(&self) -> String {
        match self.kind {
            "lock" if self.is_shared => "shared lock".to_owned(),
            "lock" => "lock".to_owned(),
            kind => format!("{kind} {}/{}", self.taken, self.limit),
        }
    }
}

impl Table {
    /// Aligns rows, of which the first is the header, the columns `right` at their right end.
    fn new(
        mut head: Vec<String>,
        rows: &[Vec<String>],
        right: [usize; 3],
        foot: Vec<String>,
    ) -> Table {
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max();
        let widths: Vec<usize> = (0..rows[0].len()).filter_map(width).collect();
        let mut lines = rows.iter().map(|row| {
            let cells = row.iter().enumerate().map(|(column, cell)| {
                let width = widths[column];
                match right.contains(&column) {
                    true => format!("{cell:>width$}"),
                    false => format!("{cell:width$}"),
                }
            });
            cells.collect::<Vec<_>>().join("  ")
        });
        head.extend(lines.next());
        Table {
            head,
            rows: lines.collect(),
            foot,
        }
    }

    pub(super) fn line(text: String) -> Table {
        Table {
            head: vec![text],
            ..Table::default()
        }
    }

    pub(super) fn under(mut self, title: String) -> Table {
        self.head.insert(0, title);
        self
    }

    fn len(&self) -> usize {
        self.head.len() + self.rows.len() + self.foot.len()
    }

    pub(super) fn lines(self) -> Vec<String> {
        [self.head, self.rows, self.foot].concat()
    }

    /// At most `count` lines, if there are more: the rows are cut, with the number of those that
    /// are not there.
    fn lines_within(mut self, count: usize) -> Vec<String> {
        if self.len() > count {
            let others = self.head.len() + self.foot.len();
            let kept = count.saturating_sub(others + 1);
            let cut = self.rows.len().saturating_sub(kept);
            self.rows.truncate(kept);
            self.rows.push(format!("... and {cut} more lines"));
        }
        let mut lines = self.lines();
        lines.truncate(count);
        lines
    }
}

/// The tables in at most `room` lines: each has what it needs, and those that need more share what
/// is left.
pub(super) fn fit(tables: Vec<Table>, room: usize) -> Vec<String> {
    let needed = |most: usize| -> usize { tables.iter().map(|table| table.len().min(most)).sum() };
    let most = (1..=room).rev().find(|most| needed(*most) <= room);
    let lines = tables
        .into_iter()
        .flat_map(|table| table.lines_within(most.unwrap_or(1)));
    lines.take(room).collect()
}

fn header(names: &str) -> Vec<String> {
    names.split(',').map(str::to_owned).collect()
}

impl From<client::Queue> for KeyRow {
    fn from(queue: client::Queue) -> KeyRow {
        let holders = queue.holders.iter().map(|holder| {
            let [peer, tag, age] = party(&holder.party);
            let left = time(holder.lease_left.as_secs_f64());
            [peer, tag, age, left, holder.fence.to_string()]
        });
        let waiters = queue.waiters.iter().map(|waiter| {
            let [peer, tag, age] = party(&waiter.party);
            [peer, tag, age, or_dash(None), or_dash(None)]
        });
        KeyRow {
            holders: holders.collect(),
            waiters: waiters.collect(),
            key: queue.key,
            kind: match queue.kind {
                Kind::Lock => "lock",
                Kind::Semaphore => "semaphore",
            },
            limit: queue.limit,
            taken: queue.taken,
            is_shared: queue.is_shared,
            holder_count: queue.holder_count,
            waiter_count: queue.waiter_count,
        }
    }
}

/// The address of a client, its tag, and since when it holds or waits.
pub(super) fn party(party: &Party) -> [String; 3] {
    let peer = party.peer.as_deref().map(unquoted);
    let peer = peer.unwrap_or_else(|| match party.connection {
        0 => "no connection".to_owned(),
        connection => format!("connection {connection}"),
    });
    let tag = or_dash(party.tag.as_deref().map(unquoted));
    [peer, tag, time(party.age.as_secs_f64())]
}

/// A place of which nothing is known but who it is.
fn stranger(peer: String) -> PlaceRow {
    let mut place = [0; 5].map(|_| or_dash(None));
    place[0] = peer;
    place
}

/// A lock in the form that every server knows.
fn lock(entry: &Value) -> Option<KeyRow> {
    let mut holder = stranger(format!("connection {}", entry["owner_conn_id"].as_u64()?));
    holder[3] = time(entry["lease_expires_in_s"].as_f64()?);
    Some(KeyRow {
        key: entry["key"].as_str()?.to_owned(),
        kind: "lock",
        limit: 1,
        taken: 1,
        is_shared: false,
        holder_count: 1,
        waiter_count: entry["waiters"].as_u64()?,
        holders: vec![holder],
        waiters: Vec::new(),
    })
}

/// A semaphore in that form.
fn semaphore(entry: &Value) -> Option<KeyRow> {
    Some(KeyRow {
        key: entry["key"].as_str()?.to_owned(),
        kind: "semaphore",
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
    Escaped(text.as_bytes()).to_string()
}

/// The same for a column of its own, where blanks need no quotes.
fn unquoted(text: &str) -> String {
    let escaped = escaped(text);
    let inner = escaped
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    inner.map(str::to_owned).unwrap_or(escaped)
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A time in the largest unit of which there are at least two.
fn time(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} m", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(json: &str) -> Vec<String> {
        Statistics::parse(json).expect("statistics").all().lines()
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
            "KIND  KEY  HOLDER  TAG  AGE  LEASE LEFT  WAITERS",
            "semaphore 3/9  pool  unix pid 5 uid 0 x  -  2 h  11574 d  6",
            "semaphore 3/9  pool  2 more  -  -  -  6",
            "lock  deploy  10.0.0.5:4711  a@b pid 1\\xc2\\x9b  3 m  30 s  1",
            "2 in use",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(words(line), words(expected));
        }
        let ends: Vec<usize> = lines[..4].iter().map(String::len).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{lines:?}");
    }

    #[test]
    fn the_form_without_holders_makes_a_table_too() {
        let lines = table(PLAIN);
        let expected = [
            "KIND  KEY  HOLDER  TAG  AGE  LEASE LEFT  WAITERS",
            "semaphore 4/5  pool  4 clients  -  -  -  2",
            "lock  a\\x1b[2J  connection 7  -  -  18 s  0",
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
            "PLACE  CLIENT  TAG  AGE  LEASE LEFT  FENCE",
            "holder  10.0.0.5:4711  a@b pid 1\\xc2\\x9b  3 m  30 s  12",
            "waiter 1  connection 8  -  2 s  -  -",
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
    fn rows_that_do_not_fit_are_counted() {
        let rows = (0..10).map(|row| row.to_string());
        let table = || Table {
            head: vec!["head".into()],
            rows: rows.clone().collect(),
            foot: vec!["foot".into()],
        };
        assert_eq!(table().lines_within(12).len(), 12);
        let cut = table().lines_within(5);
        assert_eq!(cut, ["head", "0", "1", "... and 8 more lines", "foot"]);
        assert_eq!(table().lines_within(1), ["head"]);
        // A table that needs less than its share leaves the rest to the others.
        let two = || vec![Table::line("short".into()), table()];
        assert_eq!(fit(two(), 6), [&["short".to_owned()], &cut[..]].concat());
        assert_eq!(fit(two(), 20).len(), 13);
        assert_eq!(fit(two(), 1), ["short"]);
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
