//! `latch status`: whether a key is held, and by whom, without taking it.

use serde_json::Value;

use crate::cli::failure::CommandResult;
use crate::client::{Kind, Queue};
use crate::text::{rough_time, rounded_seconds, without_hidden, Plain};

use super::servers::Target;
use super::{options, print, HELD};

/// Prints what the server knows of the key. The exit status says whether it is free.
pub(super) fn run(options: &options::Status) -> CommandResult {
    let target = Target::new(options.client(None)?, &options.key, None, None);
    let queue = target.queue().map_err(|error| target.failure(&error))?;
    let (key, queue) = (options.key.as_str(), queue.as_ref());
    print(&if options.json {
        json(key, queue)
    } else {
        lines(key, queue)
    })?;
    Ok(if is_held(queue) { HELD } else { 0 })
}

/// Whether a claim would have to wait. A lock with waiters counts as held.
fn is_held(queue: Option<&Queue>) -> bool {
    queue.is_some_and(|queue| {
        let is_full = match queue.kind {
            Kind::Lock => queue.holder_count > 0,
            Kind::Semaphore => queue.taken >= queue.limit,
        };
        is_full || queue.waiter_count > 0
    })
}

/// The answer as lines of `key: value`.
fn lines(key: &str, queue: Option<&Queue>) -> String {
    let shown = |text: &str| Plain(text.as_bytes()).to_string();
    let mut text = format!("key: {}\nheld: {}\n", shown(key), is_held(queue));
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
        let peer = party.peer.as_deref().unwrap_or("none");
        text += &format!("holder: {}\n", shown(peer));
        if let Some(tag) = &party.tag {
            text += &format!("tag: {}\n", shown(tag));
        }
        let slots = holder.slots_in_words();
        let [age, left] = [party.age, holder.lease_left].map(rough_time);
        text += &format!("slots: {slots}\nage: {age}\nlease: {left}\n");
        text += &format!("fence: {}\n", holder.fence);
    }
    text
}

/// The answer as one JSON object, in one line.
fn json(key: &str, queue: Option<&Queue>) -> String {
    let quoted = |text: Option<&str>| without_hidden(&Value::from(text).to_string());
    let key = quoted(Some(key));
    let held = is_held(queue);
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
