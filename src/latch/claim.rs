//! Waiting for a grant that is kept: what `latch run` and `latch hold` have in common.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::cli::failure::Failure;
use crate::cli::waiting::{age, wait_on_thread, Interrupts, Verbosity, WaitingLine};
use crate::client::{Error, Granted, Guard, Queue};
use crate::supervise::{Event, SignalWatch};
use crate::sys::random;
use crate::text::Plain;

use super::servers::{wait_of, Target};
use super::{shown, PROGRAM, UNAVAILABLE};

/// The first pause before the server is tried again, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A connection that lasted so long after the first answer ends an outage of its server.
const STEADY: Duration = Duration::from_secs(1);

/// Waits for the grant. `None` if another client held the key all that time. A signal ends the
/// wait, and so does the end of the standard input, when `abandoned` is set. Then the end of this
/// process ends the connection, and so gives up its place in the queue.
pub(super) fn wait(
    asking: Asking,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<Option<Guard>, Failure> {
    let asking = Arc::new(asking);
    let waiter = Arc::clone(&asking);
    let (place, talk) = (asking.target.place(), asking.talk);
    let ending = Interrupts {
        signals,
        abandoned,
        busy_status: asking.busy_status,
        cancel: None,
    };
    let line = WaitingLine::start(PROGRAM, talk, move || asking.describe());
    wait_on_thread(place, line, ending, move || waiter.ask())?
}

/// What is waited for, how, and under which name the server knows the waiter.
pub(super) struct Asking {
    pub(super) target: Target,
    /// In whole seconds; `None` for no limit.
    pub(super) timeout: Option<Duration>,
    /// How long a server may be away; zero if it is not tried again.
    pub(super) retry: Duration,
    pub(super) talk: Verbosity,
    /// The exit status if the lock is not granted in time.
    pub(super) busy_status: u8,
    /// The latest connection, as the server shows it.
    pub(super) name: Mutex<Option<String>>,
}

impl Asking {
    /// Asks for the key; again after a failure that may pass, if the user wants that. `None` if
    /// another client held the key all that time.
    fn ask(&self) -> Result<Option<Guard>, Failure> {
        let mut outage = ServerOutage::new();
        let began = Instant::now();
        let ends_at = self.timeout.and_then(|timeout| began.checked_add(timeout));
        loop {
            let asked_at = Instant::now();
            let mut answered_at = None;
            let wait = wait_of(self.timeout).after(began.elapsed());
            let asked = self.target.lock().claim(wait, |connection| {
                answered_at = Some(Instant::now());
                *self.name.lock() = connection.name_at_server();
            });
            let error = match asked.and_then(|granted| granted.map(Granted::keep).transpose()) {
                Ok(guard) => return Ok(guard),
                Err(Error::MaxWaiters(_)) if self.target.slot.max_waiters.is_some() => {
                    return Ok(None);
                }
                Err(error) => error,
            };
            // A server that was silent all that time was away, too.
            let was_silent = matches!(error, Error::NoReply { .. });
            // A server that closes connections over tags did that at once. If the connection before
            // lasted as long as this one, they ended for want of a server.
            let steady = |at: Instant| at.elapsed() >= STEADY + at.duration_since(asked_at);
            if answered_at.is_some_and(steady) && !was_silent {
                outage = ServerOutage::new();
            }
            let pause = error
                .is_transient()
                .then(|| outage.pause(self.retry, ends_at));
            match pause.flatten() {
                Some(pause) => thread::sleep(pause),
                None => return Err(self.target.failure(&error)),
            }
        }
    }

    /// What is waited for, how many are ahead, and who holds it, as far as the server tells.
    fn describe(&self) -> String {
        let target = &self.target;
        let about = format!("waiting for {}", shown(&target.key));
        let asked = target.connect().and_then(|mut connection| {
            match connection.queues(Some(&target.key)) {
                // An older server.
                Err(Error::Unsupported(_)) => Ok(Vec::new()),
                queues => queues.map_err(|error| target.failure(&error)),
            }
        });
        let name = self.name.lock();
        let details = match asked {
            Ok(queues) => queues
                .first()
                .map(|queue| describe_queue(queue, name.as_deref())),
            Err(failure) if failure.status == UNAVAILABLE => failure.message,
            // It is short of connections.
            Err(_) => None,
        };
        match details {
            Some(details) => format!("{about}: {details}"),
            None => about,
        }
    }
}

/// A time in which the server cannot be asked.
struct ServerOutage {
    began: Instant,
    next_pause: Duration,
}

impl ServerOutage {
    fn new() -> ServerOutage {
        ServerOutage {
            began: Instant::now(),
            next_pause: FIRST_PAUSE,
        }
    }

    /// How long to wait before the next try; `None` if there is to be none. Each pause is twice as
    /// long as the one before, up to a limit, and up to half of it is left out at random, so that
    /// waiters do not come together when their server is back.
    fn pause(&mut self, longest: Duration, ends_at: Option<Instant>) -> Option<Duration> {
        let gives_up_at = self.began.checked_add(longest);
        let until = [gives_up_at, ends_at].into_iter().flatten().min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return None;
        }
        let kept = 1024 - random::number().unwrap_or(0) as u32 % 512;
        let pause = self.next_pause * kept / 1024;
        self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
        Some(left.map_or(pause, |left| pause.min(left)))
    }
}

/// How many are ahead of the client with this name, and who holds the key.
fn describe_queue(queue: &Queue, name: Option<&str>) -> String {
    let is_ours = |peer: &str| name.is_some_and(|name| is_same_client(peer, name));
    let mut peers = queue
        .waiters
        .iter()
        .map(|waiter| waiter.party.peer.as_deref());
    let mut text = match peers.position(|peer| peer.is_some_and(is_ours)) {
        Some(ahead) => format!("{ahead} ahead"),
        // The way to the server changes addresses, or the queue is longer than the answer.
        None => format!("{} waiting", queue.waiter_count),
    };
    if let Some(holder) = queue.holders.first() {
        let who = [&holder.party.tag, &holder.party.peer]
            .into_iter()
            .flatten();
        let mut who = who.map(|text| Plain(text.as_bytes()).to_string());
        let who = who.find(|text| !text.is_empty());
        let who = who.unwrap_or_else(|| "a client that has disconnected".to_owned());
        let held_for = age(holder.party.age.as_secs());
        text += &format!(", held by {who} for {held_for}");
        match queue.holder_count {
            0 | 1 => {}
            count => text += &format!(" and by {} more", count - 1),
        }
    }
    text
}

/// Whether the server calls this client `peer`. A server that listens for IPv6 shows an IPv4
/// address in its other form, and the name of the program comes last.
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

    fn described(holders: &str, waiters: &str, name: Option<&str>) -> String {
        let json = format!(
            r#"{{"keys":[{{"key":"k","kind":"lock","limit":1,"holder_count":1,"waiter_count":3,
            "holders":[{holders}],"waiters":[{waiters}]}}]}}"#
        );
        let queues = crate::client::statistics::parse(&json).expect("queues");
        describe_queue(&queues[0], name)
    }

    #[test]
    fn the_line_names_the_holder_and_those_ahead() {
        let waiters = [1, 2, 3].map(|port| {
            format!(r#"{{"conn_id":{port},"peer":"127.0.0.1:{port}","tag":null,"age_s":1}}"#)
        });
        let waiters = waiters.join(",");
        let rest = r#""conn_id":9,"fence":"7","lease_expires_in_s":20"#;
        let tagged = format!(
            r#"{{"peer":"127.0.0.1:9","tag":"backup.sh@host pid 4711","age_s":185.2,{rest}}}"#
        );
        let text = described(&tagged, &waiters, Some("127.0.0.1:3"));
        let expected = "2 ahead, held by backup.sh@host pid 4711 for 3 m";
        assert_eq!(text, expected);

        let bare =
            format!(r#"{{"peer":"unix pid 7 uid 0 a\u001bb","tag":null,"age_s":59.9,{rest}}}"#);
        let text = described(&bare, &waiters, Some("127.0.0.1:4"));
        let expected = "3 waiting, held by unix pid 7 uid 0 a\\x1bb for 59 s";
        assert_eq!(text, expected);
        assert_eq!(described("", "", None), "3 waiting");
    }

    #[test]
    fn a_client_is_known_by_its_address_or_its_process() {
        assert!(is_same_client("[::ffff:127.0.0.1]:7", "127.0.0.1:7"));
        assert!(is_same_client("unix pid 7 uid 0 latch", "unix pid 7 uid 0"));
        assert!(!is_same_client("unix pid 71 uid 0", "unix pid 7 uid 0"));
        assert!(!is_same_client("127.0.0.1:71", "127.0.0.1:7"));
    }

    #[test]
    fn pauses_grow_with_jitter_and_end_with_the_outage() {
        let mut outage = ServerOutage::new();
        let mut longest = FIRST_PAUSE;
        for _ in 0..10 {
            let pause = outage.pause(Duration::MAX, None).expect("no end");
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
            longest = (longest * 2).min(LONGEST_PAUSE);
        }
        assert_eq!(outage.pause(Duration::ZERO, None), None);
        assert_eq!(outage.pause(Duration::MAX, Some(outage.began)), None);
    }
}
