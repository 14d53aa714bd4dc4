//! `latch history`: who held a key lately and who was refused, and which keys need a look.

use std::time::Duration;

use serde_json::{json, Value};

use crate::client::statistics::{parse, seconds};
use crate::client::ENDED;
use crate::os::text::{exact_time, rough_time, without_hidden};
use crate::shared::cli::failure::CommandResult;

use super::servers::Target;
use super::stats_table::{or_dash, unquoted};
use super::text_table::{header, Table};
use super::{failure, options, print, report, shown};

pub(super) fn show(options: &options::History) -> CommandResult {
    let client = options.server.client(None)?;
    let (mut jobs, mut failures) = (Vec::new(), Vec::new());
    if let Some(key) = &options.key {
        let target = Target::new(client, key, None, None);
        let asked = target.ask(|connection| connection.history(Some(key)));
        let (said, mut job) = asked.map_err(|error| target.failure(&error))?;
        match (options.check, options.json) {
            (true, _) => job["key"] = key.as_str().into(),
            (false, true) => return print_all(&[without_hidden(&said)]),
            (false, false) => return print_all(&timeline(key, &said, &job).lines()),
        }
        jobs.push(job);
    } else {
        for server in client.servers() {
            match client.ask(server, None, |connection| connection.history(None)) {
                Ok((_, said)) => jobs.extend(list(&said, "keys").cloned()),
                Err(error) => failures.push(failure(shown(&server.to_string()), &error)),
            }
        }
    }
    jobs.sort_by_cached_key(|job| (state(job).0, text(&job["key"])));
    jobs.retain(|job| !options.check || state(job).0 <= FAILED);
    let found = options.check && !jobs.is_empty();
    if options.json {
        print_all(&[without_hidden(&json!({ "keys": jobs }).to_string())])?;
    } else if found || !options.check {
        let table = Table {
            header: header("KEY,STATE,SUCCEEDED,REFUSED,END,TAG"),
            rows: jobs.iter().map(row_of_key).collect(),
            ..Table::default()
        };
        print_all(&table.lines())?;
    }
    Ok(report(failures).max(u8::from(found)))
}

fn print_all(lines: &[String]) -> CommandResult {
    print(&(lines.join("\n") + "\n"))
}

/// How urgently a person should look at a key, the lowest number first. With [`FAILED`] and below,
/// the work has failed or is overdue.
const OVERDUE: u8 = 0;
const FAILED: u8 = 1;

/// How the work under a key is doing: how urgent that is, and the same in words.
fn state(job: &Value) -> (u8, String) {
    let (latest, expected) = (&job["history"][0], &job["expected"]);
    // A client that never tells how its work has ended may end without a release.
    let tells = expected.is_object() || list(job, "history").any(|it| it["status"].is_u64());
    let has_failed = match latest["status"].as_u64() {
        Some(status) => status != 0,
        None => tells && latest["end"].is_string() && latest["end"] != "released",
    };
    let refused = seconds(&job["refused"][0]["ended_ago_s"]);
    let is_newer = |refused| success_age(job).is_none_or(|success| refused < success);
    match () {
        () if expected["overdue"] == true => (OVERDUE, words(expected)),
        () if has_failed => (FAILED, "failed".to_owned()),
        () if refused.is_some_and(is_newer) => (2, "refused".to_owned()),
        () => (3, words(expected)),
    }
}

/// How long ago the work under a key last succeeded.
fn success_age(job: &Value) -> Option<Duration> {
    let expected = &job["expected"];
    if expected["succeeded"] == true {
        return seconds(&expected["success_age_s"]);
    }
    let success = list(job, "history").find(|it| it["status"] == 0);
    seconds(&success?["ended_ago_s"])
}

fn row_of_key(job: &Value) -> Vec<String> {
    let (key, refused) = (text(&job["key"]), &job["refused"][0]);
    let (why, who) = (text(&refused["end"]), who(refused));
    let succeeded = ago(success_age(job));
    [key, state(job).1, succeeded, ended(refused), why, who].into()
}

/// The past holders and the refused claims of a key, the latest first. The server has `said` it.
fn timeline(key: &str, said: &str, job: &Value) -> Table {
    let mut title = format!("{}: {}", shown(key), summary(job));
    let queue = parse(said).and_then(|queues| queues.into_iter().next());
    let holder = queue.as_ref().and_then(|queue| queue.holders.first());
    if let (OVERDUE, Some(holder)) = (state(job).0, holder) {
        title += &format!("; held by {holder}");
    }
    let mut claims: Vec<&Value> = list(job, "history").chain(list(job, "refused")).collect();
    if claims.is_empty() {
        return Table::line(title);
    }
    claims.sort_by_key(|claim| seconds(&claim["ended_ago_s"]));
    let time = |value: &Value| or_dash(seconds(value).map(rough_time));
    let row = |claim: &Value| {
        vec![
            ended(claim),
            time(&claim["waited_s"]),
            time(&claim["held_s"]),
            text(&claim["end"]),
            or_dash(claim["status"].as_u64().map(|status| status.to_string())),
            text(&claim["fence"]),
            who(claim),
        ]
    };
    Table {
        header: header("ENDED,WAITED,HELD,END,STATUS,FENCE,TAG"),
        rows: claims.into_iter().map(row).collect(),
        ..Table::line(title)
    }
}

/// The client and, for a claim that was refused, who held the key at that time.
fn who(claim: &Value) -> String {
    // That its work has ended is true of every holder here.
    let tag = claim["tag"].as_str();
    let tag = tag.map(|tag| unquoted(tag.strip_suffix(ENDED).unwrap_or(tag).trim_end()));
    let tag = or_dash(tag);
    match claim["holder"].as_str() {
        Some(holder) => format!("{tag}; held by {}", unquoted(holder)),
        None => tag,
    }
}

/// Says in words when the key was last held, or how the work that is expected is doing.
fn summary(job: &Value) -> String {
    let expected = &job["expected"];
    let [latest, refused] = ["history", "refused"].map(|list| &job[list][0]);
    match () {
        () if expected.is_object() => standing(expected),
        () if latest.is_object() => format!("last held {}", ended(latest)),
        () if refused.is_object() => format!("last refused {}", ended(refused)),
        () => {
            "no history: latch run has ended no command under it, and no claim was refused".into()
        }
    }
}

fn standing(expected: &Value) -> String {
    let age = ago(seconds(&expected["success_age_s"]));
    let last = if expected["succeeded"] == true {
        format!("last success {age}")
    } else {
        format!("no success since {age}, when the server started")
    };
    let every = or_dash(seconds(&expected["every_s"]).map(exact_time));
    format!("{}: {last}, expected every {every}", words(expected))
}

/// How the expected work is doing, in words.
fn words(expected: &Value) -> String {
    or_dash(
        expected["state"]
            .as_str()
            .map(|it| unquoted(&it.replace('-', " "))),
    )
}

fn list<'a>(said: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    said[name].as_array().into_iter().flatten()
}

/// How long ago a holder ended, or a claim was refused.
fn ended(claim: &Value) -> String {
    ago(seconds(&claim["ended_ago_s"]))
}

fn ago(age: Option<Duration>) -> String {
    or_dash(age.map(|age| format!("{} ago", rough_time(age))))
}

fn text(value: &Value) -> String {
    or_dash(value.as_str().map(unquoted))
}
