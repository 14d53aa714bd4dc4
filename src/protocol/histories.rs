//! The JSON of `stats` for the past holders of keys: see latch-protocol(7), STATISTICS.

use super::stats::{put, write_string, Seconds};
use crate::table::{Fate, GrantEnd, JobState, KeyHistory, PastHolder};

/// Appends the past holders of a key to the object about that key, and whether work under it is
/// overdue.
pub fn append_history(history: &KeyHistory, out: &mut Vec<u8>) {
    let brace = out.pop();
    debug_assert_eq!(brace, Some(b'}'));
    out.push(b',');
    write_members(history, out);
    out.push(b'}');
}

/// Appends one key with its past holders.
pub fn write_history(history: &KeyHistory, out: &mut Vec<u8>) {
    out.extend(b"{\"key\":");
    write_string(history.key.as_str(), out);
    out.push(b',');
    write_members(history, out);
    out.push(b'}');
}

fn write_members(history: &KeyHistory, out: &mut Vec<u8>) {
    out.extend(b"\"history\":[");
    for (index, holder) in history.past.iter().rev().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_holder(history, holder, out);
    }
    out.push(b']');
    if let Some(expected) = history.expected {
        put!(
            out,
            ",\"expected\":{{\"every_s\":{},\"success_age_s\":{},\"succeeded\":{},\"overdue\":{},\
             \"state\":\"{}\"}}",
            expected.within.as_secs(),
            Seconds(expected.age(history.at)),
            expected.has_succeeded,
            expected.is_overdue(history.at),
            state_word(history.job_state(&expected))
        );
    }
}

fn write_holder(history: &KeyHistory, holder: &PastHolder, out: &mut Vec<u8>) {
    // A string, because JSON readers may round a number as large as a fence.
    put!(out, "{{\"fence\":\"{}\",\"tag\":", holder.fence.0);
    match &holder.tag {
        Some(tag) => write_string(tag, out),
        None => out.extend(b"null"),
    }
    put!(
        out,
        ",\"ended_ago_s\":{},\"waited_s\":{},\"held_s\":{},\"end\":\"{}\",\"status\":",
        Seconds(history.age(holder)),
        Seconds(holder.waited),
        Seconds(holder.held),
        word(holder.fate)
    );
    match holder.status() {
        Some(status) => put!(out, "{status}}}"),
        None => out.extend(b"null}"),
    }
}

/// How work that is expected is doing. `latch history` and the page show the word with spaces in
/// place of the hyphens.
fn state_word(state: JobState) -> &'static str {
    match state {
        JobState::Running => "running",
        JobState::OnTime => "on-time",
        JobState::DidNotSucceed => "did-not-succeed",
        JobState::DidNotRun => "did-not-run",
    }
}

/// How a hold ended, as the log says it, too.
fn word(fate: Fate) -> &'static str {
    match fate {
        Fate::Granted => "granted",
        Fate::GaveUp => "gave-up",
        Fate::Kept(_) => "kept",
        Fate::Ended(GrantEnd::Released(_)) => "released",
        Fate::Ended(GrantEnd::Expired) => "expired",
        Fate::Ended(GrantEnd::Broken(_)) => "broken",
        Fate::Ended(GrantEnd::Abandoned) => "abandoned",
    }
}
