//! The statistics of a server as a table for a person.

use std::fmt::Write;

use serde_json::Value;

use crate::text::Escaped;

/// Makes a table of the JSON that a server answers to `stats`; `None` if it is not that.
pub(super) fn render(json: &str) -> Option<String> {
    let stats: Value = serde_json::from_str(json).ok()?;
    let mut rows = vec![["KEY", "HOLDER", "LEASE LEFT", "WAITERS"].map(str::to_owned)];
    for lock in stats.get("locks")?.as_array()? {
        rows.push([
            key_of(lock)?,
            format!("connection {}", lock.get("owner_conn_id")?.as_u64()?),
            format!("{:.0} s", lock.get("lease_expires_in_s")?.as_f64()?),
            lock.get("waiters")?.as_u64()?.to_string(),
        ]);
    }
    for semaphore in stats.get("semaphores")?.as_array()? {
        let holders = semaphore.get("holders")?.as_u64()?;
        let limit = semaphore.get("limit")?.as_u64()?;
        rows.push([
            key_of(semaphore)?,
            format!("{holders} of {limit}"),
            "-".to_owned(),
            semaphore.get("waiters")?.as_u64()?.to_string(),
        ]);
    }
    let mut table = String::new();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    for [key, holder, left, waiters] in &rows {
        let [of_key, of_holder, of_left] = widths;
        writeln!(
            table,
            "{key:of_key$}  {holder:of_holder$}  {left:>of_left$}  {waiters:>7}"
        )
        .ok()?;
    }
    let connections = stats.get("connections")?.as_u64()?;
    writeln!(table, "{} in use, {connections} connected", rows.len() - 1).ok()?;
    Some(table)
}

/// A key as it may be shown on a terminal.
fn key_of(entry: &Value) -> Option<String> {
    Some(Escaped(entry.get("key")?.as_str()?.as_bytes()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_key_and_nothing_that_moves_the_cursor() {
        let json = concat!(
            r#"{"connections":3,"locks":[{"key":"a\u001b[2J","owner_conn_id":7,"#,
            r#""lease_expires_in_s":18.500,"waiters":2}],"semaphores":[{"key":"pool","limit":5,"#,
            r#""holders":4,"waiters":0}],"idle_locks":[],"idle_semaphores":[]}"#
        );
        let expected = [
            "KEY        HOLDER        LEASE LEFT  WAITERS",
            "a\\x1b[2J   connection 7        18 s        2",
            "pool       4 of 5                 -        0",
            "2 in use, 3 connected",
            "",
        ];
        let table = render(json).expect("statistics");
        assert_eq!(table.lines().count(), 4);
        assert!(!table.contains('\u{1b}'));
        for (line, expected) in table.lines().zip(expected) {
            assert_eq!(
                line.split_whitespace().collect::<Vec<_>>(),
                expected.split_whitespace().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn what_is_no_statistics_is_no_table() {
        for json in [
            "",
            "{}",
            "[]",
            r#"{"connections":1,"locks":[{}],"semaphores":[]}"#,
        ] {
            assert_eq!(render(json), None, "{json}");
        }
    }
}
