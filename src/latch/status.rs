//! `latch status`: whether a key is held, and by whom, without taking it.

use serde_json::Value;

use std::time::Duration;

use crate::client::{Kind, Queue};
use crate::os::text::{rough_time, rough_time_left, rounded_seconds, without_hidden, Plain};
use crate::shared::cli::failure::CommandResult;

use super::servers::Target;
use super::{options, print, BUSY, HELD};

/// Prints what the server knows of the key. The exit status says whether it is free, or that the
/// server cannot know that yet.
pub(super) fn run(options: &options::Status) -> CommandResult {
    let target = Target::new(options.server.client(None)?, &options.key, None, None);
    let asked = target.ask(|connection| {
        let prospects = connection.prospects(&target.key)?;
        Ok((prospects, connection.member.to_string()))
    });
    let ((queue, settling), server) = asked.map_err(|error| target.failure(&error))?;
    let (key, queue) = (options.key.as_str(), queue.as_ref());
    let held = is_held(queue, settling);
    let form = if options.json { json } else { lines };
    print(&form(key, held, &server, queue))?;
    match held {
        Some(true) => Ok(HELD),
        Some(false) => Ok(0),
        None => {
            let time = rough_time_left(settling);
            let why = format!("not known for {time}: the server has just restarted");
            Err(target.fails(BUSY, &why))
        }
    }
}

/// Whether a claim would have to wait for others. A lock with waiters counts as held. `None` as
/// long as a holder may still come back to a server that has just restarted: claims wait for that.
fn is_held(queue: Option<&Queue>, settling: Duration) -> Option<bool> {
    let is_full = queue.is_some_and(|queue| match queue.kind {
        Kind::Lock => queue.holder_count > 0,
        Kind::Semaphore => queue.taken >= queue.limit,
    });
    let has_waiters = queue.is_some_and(|queue| queue.waiter_count > 0);
    (is_full || settling.is_zero()).then_some(is_full || has_waiters)
}

/// The answer as lines of `key: value`.
fn lines(key: &str, held: Option<bool>, server: &str, queue: Option<&Queue>) -> String {
    let shown = |text: &str| Plain(text.as_bytes()).to_string();
    let held = held.map_or("unknown".to_owned(), |held| held.to_string());
    let (key, server) = (shown(key), shown(server));
    let mut text = format!("key: {key}\nheld: {held}\nserver: {server}\n");
    let Some(queue) = queue else {
        return text;
    };
    text += &format!("kind: {}\n", queue.kind.word());
    // Only a semaphore has a limit to show: a shared lock has any number of holders.
    if queue.kind == Kind::Semaphore {
        text += &format!("limit: {}\ntaken: {}\n", queue.limit, queue.taken);
    }
    let (holders, waiters) = (queue.holder_count, queue.waiter_count);
    text += &format!("holders: {holders}\nwaiters: {waiters}\n");
    for holder in &queue.holders {
        let party = &holder.party;
        let peer = party.peer.as_deref().unwrap_or("no connection");
        text += &format!("holder: {}\n", shown(peer));
        if let Some(tag) = &party.tag {
            text += &format!("tag: {}\n", shown(tag));
        }
        let slots = holder.slots_in_words();
        let (age, left) = (rough_time(party.age), rough_time_left(holder.lease_left));
        text += &format!("slots: {slots}\nage: {age}\nlease: {left}\n");
        text += &format!("fence: {}\n", holder.fence);
    }
    text
}

/// The answer as one JSON object, in one line.
fn json(key: &str, held: Option<bool>, server: &str, queue: Option<&Queue>) -> String {
    let quoted = |text: Option<&str>| without_hidden(&Value::from(text).to_string());
    let (key, server) = (quoted(Some(key)), quoted(Some(server)));
    let held = format!("{},\"server\":{server}", Value::from(held));
    let Some(queue) = queue else {
        return format!("{{\"key\":{key},\"held\":{held},\"holders\":[]}}\n");
    };
    let holders = queue.holders.iter().map(|holder| {
        let party = &holder.party;
        // The fence is a string, because many JSON readers round a number as large as a fence.
        format!(
            "{{\"peer\":{},\"tag\":{},\"age_s\":{},\"lease_expires_in_s\":{},\"fence\":\"{}\",\
             \"slots\":{},\"shared\":{},\"kept\":{}}}",
            quoted(party.peer.as_deref()),
            quoted(party.tag.as_deref()),
            rounded_seconds(party.age),
            rounded_seconds(holder.lease_left),
            holder.fence,
            party.slots,
            party.is_shared,
            holder.is_kept
        )
    });
    let holders: Vec<String> = holders.collect();
    format!(
        "{{\"key\":{key},\"held\":{held},\"kind\":\"{}\",\"limit\":{},\"taken\":{},\
         \"holder_count\":{},\"waiter_count\":{},\"holders\":[{}]}}\n",
        queue.kind.word(),
        queue.limit,
        queue.taken,
        queue.holder_count,
        queue.waiter_count,
        holders.join(",")
    )
}
