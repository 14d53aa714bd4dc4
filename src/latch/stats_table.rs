//! The table of `latch stats`: who holds and who waits, from a server's JSON.

use serde_json::Value;

use crate::client::{self, statistics, Party};
use crate::text::{beginning, columns, rough_time, Readable};

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
    kind: &'static str,
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

/// A table for the terminal, which can be made to fit a window. Its cells hide no characters.
#[derive(Debug, Default)]
pub(super) struct Table {
    head: Vec<String>,
    /// The names of the columns; empty if there are no columns.
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    foot: Vec<String>,
}

/// The columns of numbers, which are aligned to the right.
const NUMBERS: [&str; 4] = ["AGE", "LEASE LEFT", "WAITERS", "FENCE"];

/// The columns that are shortened to make a table fit, and their minimum width.
const SHORTENED: [&str; 2] = ["KEY", "TAG"];
const SHORTEST: usize = 8;

/// The columns of addresses. If a table does not fit, they are first cut to this width, the maximum
/// for an IPv4 address with a port.
const ADDRESSES: [&str; 2] = ["HOLDER", "CLIENT"];
const ADDRESS_WIDTH: usize = 21;

/// The columns that are dropped in a narrow window, the least important first.
const DROPPED: [&str; 7] = [
    "LEASE LEFT",
    "FENCE",
    "KIND",
    "SLOTS",
    "HOLDER",
    "CLIENT",
    "AGE",
];

const GAP: &str = "  ";
const ELLIPSIS: &str = "...";

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
            let others = match (others, listed) {
                (0, 1..) => None,
                (0, _) => Some("-".to_owned()),
                (others, 0) => Some(format!("{others} clients")),
                (others, _) => Some(format!("{others} more")),
            };
            let others = others.map(PlaceRow::stranger);
            for holder in queue.holders.iter().cloned().chain(others) {
                let waiters = queue.waiter_count.to_string();
                let (kind, key) = (queue.kind(), escaped(&queue.key));
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
            (_, "lock") => format!("{} of 1 held", queue.holder_count),
            _ => format!("{} of {} held", queue.taken, queue.limit),
        };
        let title = format!(
            "{shown}: {}, {held}, {} waiting",
            queue.kind, queue.waiter_count
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
        let holders = holders.map(|place| row("holder".to_owned(), place));
        let waiters = (1..).zip(&queue.waiters);
        let waiters = waiters.map(|(number, place)| row(format!("waiter {number}"), place));
        let rows = holders.chain(waiters).collect();
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
    fn kind(&self) -> String {
        match self.kind {
            "lock" if self.is_shared => "shared lock".to_owned(),
            "lock" => "lock".to_owned(),
            kind => format!("{kind} {}/{}", self.taken, self.limit),
        }
    }
}

impl Table {
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
        let header = usize::from(!self.header.is_empty());
        self.head.len() + header + self.rows.len() + self.foot.len()
    }

    pub(super) fn lines(self) -> Vec<String> {
        self.lines_within(usize::MAX, None)
    }

    /// The table in at most `count` lines: rows that do not fit are only counted. Columns are
    /// shortened or dropped to fit into the `width` of a window.
    fn lines_within(mut self, count: usize, width: Option<usize>) -> Vec<String> {
        let mut cut = None;
        if self.len() > count {
            let others = self.len() - self.rows.len();
            let kept = count.saturating_sub(others + 1);
            let more = self.rows.len().saturating_sub(kept);
            self.rows.truncate(kept);
            cut = Some(format!("... and {more} more lines"));
        }
        let aligned = if self.header.is_empty() {
            Vec::new()
        } else {
            aligned(&self.header, &self.rows, width)
        };
        let lines = self.head.into_iter().chain(aligned).chain(cut);
        lines.chain(self.foot).take(count).collect()
    }
}

/// The maximum width to which cells are padded outside a window. A longer cell moves only the rest
/// of its row: a server can list one long key and very many short ones.
const WIDEST: usize = 80;

/// The maximum width that `format!` accepts.
const LONGEST: usize = 65_535;

/// The header and the rows as aligned lines, which fit into the window's width if possible.
fn aligned(header: &[String], rows: &[Vec<String>], window: Option<usize>) -> Vec<String> {
    let all = || std::iter::once(header).chain(rows.iter().map(Vec::as_slice));
    let table = header.iter().enumerate().map(|(at, name)| {
        let width = all().map(|row| columns(&row[at])).max();
        let width = width.unwrap_or_default();
        (
            at,
            name.as_str(),
            width.min(window.map_or(WIDEST, |_| LONGEST)),
        )
    });
    let says_nothing = |at: usize| {
        let is_usual = |cell: &str| cell == "-" || (header[at] == "SLOTS" && cell == "1");
        !rows.is_empty() && rows.iter().all(|row| is_usual(&row[at]))
    };
    let table = fitted(table.collect(), says_nothing, window.unwrap_or(usize::MAX));
    let line = |row: &[String]| {
        let cells = table.iter().map(|(at, name, width)| {
            let cell = match window {
                Some(_) => &shortened(&row[*at], *width),
                None => &row[*at],
            };
            let pad = " ".repeat(width.saturating_sub(columns(cell)));
            if NUMBERS.contains(name) {
                pad + cell
            } else {
                cell.clone() + &pad
            }
        });
        cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    };
    all().map(line).collect()
}

/// A column: its index in a row, its name and its width.
type Column<'a> = (usize, &'a str, usize);

/// The columns that fit into a line of this width, with their widths.
fn fitted<'a>(
    mut columns: Vec<Column<'a>>,
    says_nothing: impl Fn(usize) -> bool,
    width: usize,
) -> Vec<Column<'a>> {
    let total = |columns: &[Column<'_>]| -> usize {
        let gaps = GAP.len() * columns.len().saturating_sub(1);
        columns.iter().map(|(_, _, width)| width).sum::<usize>() + gaps
    };
    if total(&columns) <= width {
        return columns;
    }
    columns.retain(|(at, name, _)| SHORTENED[0] == *name || !says_nothing(*at));
    for (_, name, width) in &mut columns {
        if ADDRESSES.contains(name) {
            *width = (*width).min(ADDRESS_WIDTH);
        }
    }
    let mut dropped = DROPPED.iter();
    loop {
        let mut fitted = columns.clone();
        while total(&fitted) > width {
            let is_long =
                |column: &&mut Column<'_>| SHORTENED.contains(&column.1) && column.2 > SHORTEST;
            match fitted.iter_mut().filter(is_long).max_by_key(|it| it.2) {
                Some(widest) => widest.2 -= 1,
                None => break,
            }
        }
        match dropped.next() {
            Some(name) if total(&fitted) > width => columns.retain(|column| column.1 != *name),
            _ => return fitted,
        }
    }
}

fn shortened(cell: &str, width: usize) -> String {
    if columns(cell) > width {
        beginning(cell, width.saturating_sub(ELLIPSIS.len())).to_owned() + ELLIPSIS
    } else {
        cell.to_owned()
    }
}

/// The tables in at most `room` lines of this width. A table that is short gets all its lines, and
/// the longer ones share the rest equally.
pub(super) fn fit(tables: Vec<Table>, room: usize, width: usize) -> Vec<String> {
    let needed = |most: usize| -> usize { tables.iter().map(|table| table.len().min(most)).sum() };
    let most = (1..=room).rev().find(|most| needed(*most) <= room);
    let lines = tables
        .into_iter()
        .flat_map(|table| table.lines_within(most.unwrap_or(1), Some(width)));
    lines.take(room).collect()
}

fn header(names: &str) -> Vec<String> {
    names.split(',').map(str::to_owned).collect()
}

impl From<client::Queue> for KeyRow {
    fn from(queue: client::Queue) -> KeyRow {
        let holders = queue.holders.iter().map(|holder| PlaceRow {
            lease_left: rough_time(holder.lease_left),
            fence: holder.fence.to_string(),
            ..PlaceRow::of(&holder.party, holder.marks())
        });
        let waiters = queue.waiters.iter().map(|waiter| {
            let shared = waiter.party.is_shared.then_some("shared");
            PlaceRow::of(&waiter.party, shared.into_iter())
        });
        KeyRow {
            holders: holders.collect(),
            waiters: waiters.collect(),
            key: queue.key,
            kind: queue.kind.word(),
            limit: queue.limit,
            taken: queue.taken,
            is_shared: queue.is_shared,
            holder_count: queue.holder_count,
            waiter_count: queue.waiter_count,
        }
    }
}

/// The address of a client, its tag, and how long it has held or waited.
pub(super) fn party(party: &Party) -> [String; 3] {
    let peer = party.peer.as_deref().map(unquoted);
    let peer = peer.unwrap_or_else(|| match party.connection {
        0 => "no connection".to_owned(),
        connection => format!("connection {connection}"),
    });
    let tag = or_dash(party.tag.as_deref().map(unquoted));
    [peer, tag, rough_time(party.age)]
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
    fn of(client: &Party, marks: impl Iterator<Item = &'static str>) -> PlaceRow {
        let [peer, tag, age] = party(client);
        let marks: Vec<&str> = marks.collect();
        PlaceRow {
            tag,
            age,
            slots: format!("{} {}", client.slots, marks.join(", "))
                .trim_end()
                .to_owned(),
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

/// A semaphore in plain `stats`.
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
    Readable(text).to_string()
}

/// Escapes text for a column of its own, where spaces need no quotes.
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let json = HOLDERS
            .replace(r#""fence":"11""#, r#""slots":3,"kept":true,"fence":"11""#)
            .replace(
                r#""age_s":1.500"#,
                r#""slots":1,"shared":true,"age_s":1.500"#,
            );
        let statistics = Statistics::parse(&json).expect("statistics");
        let pool = statistics.of("pool").lines();
        assert_eq!(
            words(&pool[2])[..3],
            ["holder", "unix pid 5 uid 0 x", "3 reserved"]
        );
        let deploy = statistics.of("deploy").lines();
        assert_eq!(
            words(&deploy[3])[..3],
            ["waiter 1", "connection 8", "1 shared"]
        );
    }

    #[test]
    fn rows_that_do_not_fit_are_counted() {
        let table = || Table {
            head: vec!["title".into()],
            header: vec!["KEY".into()],
            rows: (0..10).map(|row| vec![row.to_string()]).collect(),
            foot: vec!["foot".into()],
        };
        let wide = usize::MAX;
        assert_eq!(table().lines_within(13, None).len(), 13);
        let cut = table().lines_within(6, None);
        let expected = ["title", "KEY", "0", "1", "... and 8 more lines", "foot"];
        assert_eq!(cut, expected);
        assert_eq!(table().lines_within(1, None), ["title"]);
        // A table that needs less than its share leaves the rest to the others.
        let two = || vec![Table::line("short".into()), table()];
        assert_eq!(
            fit(two(), 7, wide),
            [&["short".to_owned()], &cut[..]].concat()
        );
        assert_eq!(fit(two(), 20, wide).len(), 14);
        assert_eq!(fit(two(), 1, wide), ["short"]);
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
