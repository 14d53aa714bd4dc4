//! `latch stats`: the holders and waiters of the servers, as a table or as JSON.

use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Instant, SystemTime};

use rustix::termios::tcgetwinsize;
use serde_json::Value;

use crate::client::{Address, Claim, Client, Connection, Error};
use crate::os::output;
use crate::os::text::{without_hidden, Utc};
use crate::shared::cli::failure::{CommandResult, Failure};

use super::options::StatsForm;
use super::stats_table::Statistics;
use super::text_table::{fit, Table};
use super::{failure, options, report, shown, usage};

/// The size assumed for a window that does not report it, in lines and columns.
const USUAL_SIZE: (usize, usize) = (24, 80);

type Answers<'a> = Vec<(&'a Address, Result<Table, Error>)>;

pub(super) fn show(options: &options::Stats) -> CommandResult {
    let form = options.form().map_err(usage)?;
    let (client, key) = (options.server.client(None)?, options.key.as_deref());
    let servers = match key {
        Some(key) => {
            let checked = client.lock_for(key, Claim::LOCK).check();
            checked.map_err(|error| failure(shown(key), &error))?;
            vec![client.server_of(key)]
        }
        None => client.servers().iter().collect(),
    };
    let on_terminal = io::stdout().is_terminal();
    let is_watch = options.watch.0.is_some();
    let mut is_watching = false;
    let mut rates: Vec<GrantRate> = servers.iter().map(|_| GrantRate::default()).collect();
    loop {
        let asked = servers.iter().copied().zip(&mut rates);
        let answers: Answers<'_> = asked
            .map(|(server, rate)| {
                let rate = is_watch.then_some(rate);
                (server, ask(&client, server, key, form, rate))
            })
            .collect();
        // Once a watch has begun, it continues while a server restarts.
        is_watching |= is_watch && answers.iter().any(|(_, answer)| answer.is_ok());
        let (text, failures) = if is_watching && on_terminal && form == StatsForm::Table {
            (screen(answers), Vec::new())
        } else {
            page(answers, form, is_watch)
        };
        let printed = output::print(&text);
        let status = report(failures);
        match printed {
            // The reader of the output has closed the pipe.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(status),
            Err(error) => return Err(Failure::unprintable(error)),
            Ok(()) if is_watching => thread::sleep(options.watch.0.unwrap_or_default()),
            Ok(()) => return Ok(status),
        }
    }
}

/// Measures the grants per second of a server, from the time and the counter of the previous look.
#[derive(Default)]
struct GrantRate(Option<(Instant, u64)>);

impl GrantRate {
    /// Asks for the counter, and returns the rate since the previous look. Returns `None` at the
    /// first look, after a restart, and if the server has no counters.
    fn look(&mut self, connection: &mut Connection) -> Option<f64> {
        let json = connection.counters().ok();
        let counters = json.and_then(|json| serde_json::from_str::<Value>(&json).ok());
        let grants = counters.and_then(|json| json["counters"]["grants"].as_u64());
        let now = grants.map(|grants| (Instant::now(), grants));
        let before = std::mem::replace(&mut self.0, now)?;
        let (at, grants) = now?;
        let more = grants.checked_sub(before.1)?;
        Some(more as f64 / at.duration_since(before.0).as_secs_f64())
    }
}

/// Asks a server for its holders, or for plain `stats` if it does not know that request.
fn ask(
    client: &Client,
    server: &Address,
    key: Option<&str>,
    form: StatsForm,
    mut rate: Option<&mut GrantRate>,
) -> Result<Table, Error> {
    let (json, rate) = client.ask(server, None, |connection| {
        let json = match connection.holders(key) {
            Err(Error::Refused(_)) => connection.stats(),
            answer => answer,
        }?;
        let is_shown = key.is_none() && form == StatsForm::Table;
        let rate = rate.as_mut().filter(|_| is_shown);
        Ok((json, rate.and_then(|rate| rate.look(connection))))
    })?;
    if form == StatsForm::Json {
        return Ok(Table::line(if io::stdout().is_terminal() {
            without_hidden(&json)
        } else {
            json
        }));
    }
    let statistics = Statistics::parse(&json);
    // The answer is not quoted, because it may repeat a secret.
    let statistics = statistics.ok_or_else(|| Error::bad_reply(server, b"no statistics"))?;
    Ok(match key {
        Some(key) => statistics.of(key),
        None => statistics.all(rate),
    })
}

/// The text of all answers, one after the other, and the failures of the servers that gave none.
fn page(answers: Answers<'_>, form: StatsForm, watch: bool) -> (String, Vec<Failure>) {
    let (mut text, mut failures) = (String::new(), Vec::new());
    let mut line = |line: &str| text.extend([line, "\n"]);
    let is_table = form == StatsForm::Table;
    let is_one_of_many = answers.len() > 1;
    if watch && is_table {
        line(&title(&answers));
    }
    for (server, answer) in answers {
        if is_one_of_many && is_table {
            line(&server.to_string());
        }
        let answer =
            answer.map_err(|error| failures.push(failure(shown(&server.to_string()), &error)));
        match answer {
            Ok(table) => table.lines().iter().for_each(|it| line(it)),
            // Every server gets a line, so that the lines can be matched to the servers.
            Err(()) if !is_table => line("null"),
            Err(()) if is_one_of_many => line("no statistics"),
            Err(()) => {}
        }
    }
    (text, failures)
}

/// The text for a terminal. It has as many lines as fit, and overwrites the previous text.
fn screen(answers: Answers<'_>) -> String {
    let (height, width) = match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => USUAL_SIZE,
    };
    let mut lines = vec![title(&answers)];
    let is_one_of_many = answers.len() > 1;
    let tables = answers.into_iter().map(|(server, answer)| {
        let reason = |error: Error| Table::line(format!("no statistics: {}", error.reason()));
        let table = answer.unwrap_or_else(reason);
        if is_one_of_many {
            table.under(server.to_string())
        } else {
            table
        }
    });
    // One line is for the title, and the last one for the cursor.
    let room = height.saturating_sub(2);
    lines.extend(fit(tables.collect(), room, width));
    let mut text = "\u{1b}[H".to_owned();
    for line in lines {
        // Erase the line before writing it. With the cursor at the last column, erasing would
        // remove a character.
        text += "\u{1b}[2K";
        text.extend(line.chars().take(width));
        text.push('\n');
    }
    text + "\u{1b}[J"
}

fn title(answers: &Answers<'_>) -> String {
    let time = Utc(SystemTime::now());
    match answers[..] {
        [(server, _)] => format!("{time}  {server}"),
        _ => format!("{time}  {} servers", answers.len()),
    }
}
