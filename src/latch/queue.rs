//! Describes in words who holds a key and who is ahead.

use std::net::SocketAddr;
use std::time::Duration;

use crate::client::{Queue, Waiter};
use crate::os::text::rough_time_left;

/// Describes the queue to a client that waits in it. `name` is the client's name at the server.
pub(super) fn while_waiting(queue: &Queue, name: Option<&str>) -> String {
    let is_ours = |peer: &str| name.is_some_and(|name| is_same_client(peer, name));
    let mut peers = queue
        .waiters
        .iter()
        .map(|waiter| waiter.party.peer.as_deref());
    let mut text = match peers.position(|peer| peer.is_some_and(is_ours)) {
        Some(0) => "next in line".to_owned(),
        Some(ahead) => count_of(&queue.waiters[..ahead], "ahead"),
        // This client is not in the list: NAT has changed its address, or the list is cut.
        None => format!("{} waiting", queue.waiter_count),
    };
    if let Some(holders) = holders(queue) {
        text += &format!(", {holders}");
    }
    text
}

/// Describes the queue to a client that has waited for `waited`, got no grant and left the queue;
/// `None` if the key is free now.
pub(super) fn after_wait(queue: &Queue, waited: Duration) -> Option<String> {
    let waiters = queue.waiters.iter();
    // Clients that have waited for longer than this one were ahead of it. The waiters are in the
    // order of arrival.
    let ahead = waiters.filter(|waiter| waiter.party.age >= waited).count();
    let ahead = match ahead {
        0 => None,
        ahead if ahead == queue.waiters.len() && queue.waiter_count > ahead as u64 => {
            Some(format!("{} waiting", queue.waiter_count))
        }
        ahead => Some(count_of(&queue.waiters[..ahead], "ahead")),
    };
    let parts: Vec<String> = [holders(queue), ahead].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Says when the server begins to grant; `None` if it grants already.
pub(super) fn while_settling(left: Duration) -> Option<String> {
    let time = rough_time_left(left);
    let text = || format!("the server has just restarted, grants begin in {time}");
    (!left.is_zero()).then(text)
}

/// Names the first holder, how long it has held the key, and how many more holders there are.
fn holders(queue: &Queue) -> Option<String> {
    let first = queue.holders.first()?;
    let more = match queue.holder_count {
        0 | 1 => String::new(),
        count => format!(" and by {} more", count - 1),
    };
    Some(format!("held by {first}{more}"))
}

/// The number of these waiters, with their slots if some of them wait for several.
fn count_of(waiters: &[Waiter], word: &str) -> String {
    let slots: u64 = waiters.iter().map(|waiter| waiter.party.slots).sum();
    match waiters.len() {
        count if slots > count as u64 => format!("{count} {word} for {slots} slots"),
        count => format!("{count} {word}"),
    }
}

/// Whether `peer`, as the server shows it, is the client called `name`. A server that listens on
/// IPv6 shows an IPv4 address in its IPv6-mapped form. The server shows a client on a Unix socket
/// with the name of its program at the end.
fn is_same_client(peer: &str, name: &str) -> bool {
    let canonical = |text: &str| {
        let address: SocketAddr = text.parse().ok()?;
        Some((address.ip().to_canonical(), address.port()))
    };
    match canonical(name) {
        Some(ours) => canonical(peer) == Some(ours),
        None => peer == name || peer.starts_with(&format!("{name} ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(holders: &str, waiter_ages: &[u64]) -> Queue {
        let waiters = (1..).zip(waiter_ages).map(|(port, age)| {
            format!(r#"{{"conn_id":{port},"peer":"127.0.0.1:{port}","tag":null,"age_s":{age}}}"#)
        });
        let waiters: Vec<String> = waiters.collect();
        let json = format!(
            r#"{{"keys":[{{"key":"k","kind":"lock","limit":1,"holder_count":1,"waiter_count":3,
            "holders":[{holders}],"waiters":[{}]}}]}}"#,
            waiters.join(",")
        );
        let queues = crate::client::statistics::parse(&json).expect("queues");
        queues.into_iter().next().expect("a queue")
    }

    const REST: &str = r#""conn_id":9,"fence":"7","lease_expires_in_s":20"#;

    #[test]
    fn the_line_names_the_holder_and_those_ahead() {
        let tagged = format!(
            r#"{{"peer":"127.0.0.1:9","tag":"backup.sh@host pid 4711","age_s":185.2,{REST}}}"#
        );
        let text = while_waiting(&queue(&tagged, &[1, 1, 1]), Some("127.0.0.1:3"));
        let expected = "2 ahead, held by backup.sh@host pid 4711 for 3 m";
        assert_eq!(text, expected);

        let bare =
            format!(r#"{{"peer":"unix pid 7 uid 0 a\u001bb","tag":null,"age_s":59.9,{REST}}}"#);
        let text = while_waiting(&queue(&bare, &[1, 1, 1]), Some("127.0.0.1:4"));
        let expected = "3 waiting, held by unix pid 7 uid 0 a\\x1bb for 60 s";
        assert_eq!(text, expected);
        assert_eq!(while_waiting(&queue("", &[]), None), "3 waiting");
    }

    #[test]
    fn a_client_with_nobody_ahead_is_next_in_line() {
        let text = while_waiting(&queue("", &[1, 1, 1]), Some("127.0.0.1:1"));
        assert_eq!(text, "next in line");
    }

    #[test]
    fn the_line_says_how_many_slots_are_held_and_wanted() {
        let mut pool = queue(
            &format!(r#"{{"peer":"a","tag":"b","age_s":5,"slots":3,{REST}}}"#),
            &[9, 8, 7],
        );
        for waiter in &mut pool.waiters {
            waiter.party.slots = 4;
        }
        pool.holders[0].party.slots = 3;
        assert_eq!(
            while_waiting(&pool, Some("127.0.0.1:3")),
            "2 ahead for 8 slots, held by b (3 slots) for 5 s"
        );
        assert_eq!(
            after_wait(&pool, Duration::from_secs(8)).as_deref(),
            Some("held by b (3 slots) for 5 s, 2 ahead for 8 slots")
        );
    }

    #[test]
    fn after_a_wait_those_who_waited_longer_were_ahead() {
        let holder = format!(r#"{{"peer":"a","tag":"b","age_s":720,{REST}}}"#);
        let waited = |holders: &str, ages: &[u64]| {
            after_wait(&queue(holders, ages), Duration::from_secs(60)).unwrap_or_default()
        };
        assert_eq!(
            waited(&holder, &[90, 60, 59]),
            "held by b for 12 m, 2 ahead"
        );
        assert_eq!(waited(&holder, &[1, 0, 0]), "held by b for 12 m");
        // The server does not list all.
        assert_eq!(waited(&holder, &[90, 60]), "held by b for 12 m, 3 waiting");
        assert_eq!(waited("", &[61]), "3 waiting");
        assert_eq!(waited("", &[]), "");
    }

    #[test]
    fn a_server_that_settles_says_for_how_long() {
        assert_eq!(while_settling(Duration::ZERO), None);
        let text = while_settling(Duration::from_millis(11_200));
        let expected = "the server has just restarted, grants begin in 12 s";
        assert_eq!(text.as_deref(), Some(expected));
    }

    #[test]
    fn a_client_is_known_by_its_address_or_its_process() {
        assert!(is_same_client("[::ffff:127.0.0.1]:7", "127.0.0.1:7"));
        assert!(is_same_client("unix pid 7 uid 0 latch", "unix pid 7 uid 0"));
        assert!(!is_same_client("unix pid 71 uid 0", "unix pid 7 uid 0"));
        assert!(!is_same_client("127.0.0.1:71", "127.0.0.1:7"));
    }
}
