//! A table in lines of text, which can be made to fit a window.

use crate::os::text::{beginning, columns};

/// A table for the terminal, which can be made to fit a window. Its cells hide no characters.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) head: Vec<String>,
    /// The names of the columns; empty if there are no columns.
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
    pub(super) foot: Vec<String>,
}

/// The columns of numbers, which are aligned to the right.
const NUMBERS: [&str; 7] = [
    "AGE",
    "LEASE LEFT",
    "WAITERS",
    "FENCE",
    "WAITED",
    "HELD",
    "STATUS",
];

/// The column that is always shown.
const KEY: &str = "KEY";

/// The columns that are shortened to make a table fit, and their minimum width.
const SHORTENED: [&str; 2] = [KEY, "TAG"];
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
    let longest = window.map_or(WIDEST, |_| LONGEST);
    let all_columns = header.iter().enumerate().map(|(at, name)| {
        let widest = all().map(|row| columns(&row[at])).max();
        let width = widest.unwrap_or_default().min(longest);
        Column { at, name, width }
    });
    let says_nothing = |at: usize| {
        let is_usual = |cell: &str| cell == "-" || (header[at] == "SLOTS" && cell == "1");
        !rows.is_empty() && rows.iter().all(|row| is_usual(&row[at]))
    };
    let shown = fitted(
        all_columns.collect(),
        says_nothing,
        window.unwrap_or(usize::MAX),
    );
    let line = |row: &[String]| {
        let cells = shown.iter().map(|column| {
            let cell = match window {
                Some(_) => &shortened(&row[column.at], column.width),
                None => &row[column.at],
            };
            let pad = " ".repeat(column.width.saturating_sub(columns(cell)));
            if NUMBERS.contains(&column.name) {
                pad + cell
            } else {
                cell.clone() + &pad
            }
        });
        cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    };
    all().map(line).collect()
}

#[derive(Clone, Copy)]
struct Column<'a> {
    /// The index of its cells in their rows.
    at: usize,
    name: &'a str,
    width: usize,
}

/// The columns that fit into a line of this width, with their widths.
fn fitted<'a>(
    mut columns: Vec<Column<'a>>,
    says_nothing: impl Fn(usize) -> bool,
    width: usize,
) -> Vec<Column<'a>> {
    let total = |columns: &[Column<'_>]| -> usize {
        let gaps = GAP.len() * columns.len().saturating_sub(1);
        columns.iter().map(|column| column.width).sum::<usize>() + gaps
    };
    if total(&columns) <= width {
        return columns;
    }
    columns.retain(|column| column.name == KEY || !says_nothing(column.at));
    for column in &mut columns {
        if ADDRESSES.contains(&column.name) {
            column.width = column.width.min(ADDRESS_WIDTH);
        }
    }
    let mut dropped = DROPPED.iter();
    loop {
        let mut fitted = columns.clone();
        while total(&fitted) > width {
            let is_long = |column: &&mut Column<'_>| {
                SHORTENED.contains(&column.name) && column.width > SHORTEST
            };
            match fitted.iter_mut().filter(is_long).max_by_key(|it| it.width) {
                Some(widest) => widest.width -= 1,
                None => break,
            }
        }
        match dropped.next() {
            Some(name) if total(&fitted) > width => columns.retain(|column| column.name != *name),
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

pub(super) fn header(names: &str) -> Vec<String> {
    names.split(',').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
