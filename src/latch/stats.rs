//! `latch stats`: the statistics of the servers, as a table or as JSON.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::client::{Client, Error};
use crate::text::{escaped_json, Escaped};

use super::servers::client;
use super::{failure, options, report, shown, unprintable};

/// How often `stats --watch` asks the servers.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// The form in which statistics are printed.
#[derive(Clone, Copy)]
enum Form {
    /// The JSON of the server, unchanged.
    Json,
    /// The JSON, escaped for a terminal.
    EscapedJson,
    Table,
}

pub(super) fn show(options: &options::Stats) -> CommandResult {
    let (as_json, watch) = (options.json, options.watch);
    let client = client(options.reach())?;
    let on_terminal = io::stdout().is_terminal();
    let form = match (as_json, on_terminal) {
        (false, _) => Form::Table,
        (true, false) => Form::Json,
        (true, true) => Form::EscapedJson,
    };
    loop {
        let (mut text, failures) = statistics(&client, form);
        if watch && !as_json && on_terminal {
            text.insert_str(0, "\u{1b}[H\u{1b}[2J");
        }
        let printed = output::print(&text);
        let is_over = !watch || failures.len() == client.servers().len();
        let status = report(failures);
        match printed {
            // The reader of a watch has gone.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(status),
            Err(error) => return Err(unprintable(&error)),
            Ok(()) if is_over => return Ok(status),
            Ok(()) => thread::sleep(WATCH_INTERVAL),
        }
    }
}

/// The statistics of all servers as text, and the failures of the servers that gave none.
fn statistics(client: &Client, form: Form) -> (String, Vec<Failure>) {
    let (mut text, mut failures) = (String::new(), Vec::new());
    let has_names = client.servers().len() > 1;
    for server in client.servers() {
        let shown_as = |json: String| match form {
            Form::Json => Ok(json + "\n"),
            Form::EscapedJson => Ok(escaped_json(&json) + "\n"),
            Form::Table => render(&json).ok_or_else(|| Error::bad_reply(server, &json)),
        };
        let answer = client
            .connect(server)
            .and_then(|mut connection| connection.stats())
            .and_then(shown_as);
        if matches!(form, Form::Table) && has_names {
            text += &format!("{server}\n");
        }
        match answer {
            Ok(answer) => text += &answer,
            Err(error) => {
                failures.push(failure(shown(&server.to_string()), &error));
                match form {
                    Form::Table if has_names => text += "no statistics\n",
                    Form::Table => {}
                    // Each server has a line, so that the lines can be matched to the servers.
                    Form::Json | Form::EscapedJson => text += "null\n",
                }
            }
        }
    }
    (text, failures)
}

/// Makes a table of a server's answer to `stats`. `None` if the answer is something else.
fn render(json: &str) -> Option<String> {
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

/// The key of an entry, escaped for a terminal.
fn key_of(entry: &Value) -> Option<String> {
    Some(Escaped(entry.get("key")?.as_str()?.as_bytes()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_per_key_and_no_control_characters() {
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
    fn other_json_makes_no_table() {
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
