//! The thread that keeps a lock: it renews the lease and watches the connection.

mod phase;
mod reconnecting;

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags};

use super::timing::{self, deadline_of, fits, last_renewal_of, renewal_interval};
use super::{OnSilence, Order, RenewalCallback, Shared};
use crate::client::attempts::Attempts;
use crate::client::connection::{Connection, Renewal};
use crate::client::error::{Error, Loss};
use crate::client::granted::Granted;
use crate::os::moment::{Alarm, Moment};
use phase::{ConnectionEvent, Phase};

/// The thread that keeps a lock. No other thread uses the lock's connection.
pub(super) struct Keeper {
    held: Granted,
    phase: Phase,
    /// How the next renewal is sent. From the first adoption on, every renewal adopts the lock,
    /// too: an adoption without an answer may have moved it to a connection that was then given up.
    renewal: Renewal,
    /// The attempts to connect during this outage; if there is none, during the last one.
    attempts: Attempts,
    /// The callbacks that the answer to the sent renewal is passed to.
    sent_callbacks: Vec<RenewalCallback>,
    shared: Arc<Shared>,
    alarm: Alarm,
}

impl Keeper {
    /// Makes the keeper of a lock that was just granted.
    pub(super) fn new(held: Granted, shared: Arc<Shared>) -> Result<Keeper, Error> {
        Ok(Keeper {
            held,
            phase: Phase::default(),
            renewal: Renewal::Renew,
            attempts: Attempts::none(),
            sent_callbacks: Vec::new(),
            shared,
            alarm: Alarm::new().map_err(Error::System)?,
        })
    }

    /// The whole life of the keeper's thread: keeps the lock until it is released or lost, and then
    /// tells the guard and its callbacks.
    pub(super) fn run(mut self) {
        // A callback that panics ends the keeper, and the connection with it. The panic's payload
        // is leaked, because dropping it may panic, too.
        let ended = panic::catch_unwind(AssertUnwindSafe(|| self.work()));
        let ended = ended.map_err(mem::forget).unwrap_or(Err(Loss::Closed));
        let Err(loss) = ended else {
            return;
        };
        let mut hold = self.shared.lock();
        hold.loss = Some(loss);
        let callback = hold.on_lost.take();
        let unsent_callbacks = mem::take(&mut hold.unsent_callbacks);
        drop(hold);
        // When the connection closes, the server releases the lock. So close it only now that the
        // guard shows the loss.
        self.held.connection.close();
        self.phase = Phase::default();
        // End the guard only after the close: its thread may then claim the same key at once, and
        // must find it free.
        self.shared
            .set_outcome(Err(Error::Lost(self.held.asked(), loss)));
        drop((unsent_callbacks, self.sent_callbacks));
        if let Some(callback) = callback {
            callback(loss);
        }
    }

    /// Renews the lease until the guard orders the end of the hold, and then carries out that
    /// order. Fails if the lock is lost.
    fn work(&mut self) -> Result<(), Loss> {
        loop {
            let [is_readable, silent_is_readable] = self.sleep();
            if is_readable {
                self.read_reply()?;
            }
            if silent_is_readable {
                self.read_late_reply()?;
            }
            // A sent renewal is answered before the order is carried out.
            let order = self.shared.lock().order;
            if let (None, Some(order)) = (self.phase.sent_at(), order) {
                let ended = self.carry_out(order);
                self.shared.set_outcome(ended);
                return Ok(());
            }
            let now = Moment::now();
            if now >= self.deadline() {
                return Err(if self.is_last_lease() {
                    Loss::MaxHold
                } else {
                    Loss::Deadline
                });
            }
            if now >= self.patience_ends_at() {
                self.try_other_server();
            }
            let is_asked = !self.shared.lock().unsent_callbacks.is_empty();
            let is_due = is_asked || self.phase.is_provisional() || now >= self.renew_at();
            match self.phase {
                Phase::Away(_) if now >= self.attempts.next_at => self.reconnect_and_adopt()?,
                Phase::Resting { .. } if is_due => self.send_renewal(now)?,
                _ => {}
            }
            if self.silent_at().is_some_and(|silent_at| now >= silent_at) {
                let silence = self.shared.lock().on_silence.take();
                if let Some(OnSilence { callback, .. }) = silence {
                    callback();
                }
            }
        }
    }

    /// Sleeps until there is something to do. The result tells whether the lock's connection is
    /// readable, and whether the connection to the silent server is.
    fn sleep(&self) -> [bool; 2] {
        let connections = [Some(&self.held.connection), self.phase.silent()];
        let sockets = connections.map(|connection| connection.and_then(Connection::socket));
        let wake_at = match self.phase {
            Phase::Away(_) => self.attempts.next_at,
            Phase::Resting { .. } => self.renew_at(),
            Phase::Renewing(_) | Phase::Adopting(..) => self.patience_ends_at(),
        };
        let wake_at = wake_at.min(self.next_end());
        self.alarm.set(wake_at);
        let watch = |socket| PollFd::from_borrowed_fd(socket, PollFlags::IN | PollFlags::RDHUP);
        let mut watched: Vec<PollFd<'_>> = sockets.into_iter().flatten().map(watch).collect();
        watched.push(PollFd::new(&self.shared.bell, PollFlags::IN));
        watched.push(PollFd::new(&self.alarm, PollFlags::IN));
        // An interrupted or failed poll is an early wake-up, which does no harm.
        let _ = poll(&mut watched, None);
        let mut polled = watched.iter().map(|polled| !polled.revents().is_empty());
        let mut next = || polled.next().unwrap_or_default();
        let are_readable = sockets.map(|socket| socket.is_some() && next());
        // Clear the bell before reading the orders, so that a later order wakes the keeper again.
        self.shared.bell.take();
        are_readable
    }

    /// The deadline, or the moment to call `on_silence` if that is earlier.
    fn next_end(&self) -> Moment {
        let silent_at = self.silent_at().unwrap_or(Moment::NEVER);
        self.deadline().min(silent_at)
    }

    fn deadline(&self) -> Moment {
        deadline_of(self.held.asked_at, self.held.lease)
    }

    fn renew_at(&self) -> Moment {
        let (token, lease) = (self.held.known.token, self.held.lease);
        if !self.is_last_lease() {
            let lead = self.lead().unwrap_or_default();
            return self.held.asked_at + renewal_interval(token, lease, lead);
        }
        // Renewals are sooner only to avoid the callback for a silent server. At the end of the
        // last lease, the callback is called even if the server answers, so sooner renewals gain
        // nothing.
        let renew_at = self.held.asked_at + renewal_interval(token, lease, Duration::ZERO);
        if renew_at <= last_renewal_of(self.held.asked_at, lease) {
            renew_at
        } else {
            Moment::NEVER
        }
    }

    /// Whether the server has granted less than was asked for. Then it allows no later end than
    /// that of this lease. The true end can be up to a second later than the one it has told,
    /// because it rounds replies down to whole seconds.
    fn is_last_lease(&self) -> bool {
        self.held.lease < self.held.wanted_lease()
    }

    /// When to call `on_silence`: before the end of the last lease, and before the deadline if the
    /// server does not answer. `None` if there is no such callback, and while neither is the case.
    fn silent_at(&self) -> Option<Moment> {
        let (lead, lease) = (self.lead()?, self.held.lease);
        if self.is_last_lease() {
            return Some(self.deadline() - lead);
        }
        let began = self.phase.unanswered_since()?;
        Some(timing::silent_at(began, self.held.asked_at, lease, lead))
    }

    /// How long before the deadline to call `on_silence`; `None` if there is no such callback, or
    /// if the lease is too short for it.
    fn lead(&self) -> Option<Duration> {
        let hold = self.shared.lock();
        let lead = hold.on_silence.as_ref().map(|silence| silence.lead);
        lead.filter(|lead| fits(*lead, self.held.wanted_lease()))
    }

    fn send_renewal(&mut self, now: Moment) -> Result<(), Loss> {
        let left = self.deadline().saturating_since(now);
        self.sent_callbacks
            .append(&mut self.shared.lock().unsent_callbacks);
        if self.phase.outage().is_some() {
            self.renewal = Renewal::Adopt;
        }
        self.note(ConnectionEvent::Sent(now));
        let Granted {
            connection, known, ..
        } = &mut self.held;
        let sent = connection.write_renewal(self.renewal, known, left);
        sent.or_else(|error| self.handle_error(&error))
    }

    fn read_reply(&mut self) -> Result<(), Loss> {
        let Some(sent_at) = self.phase.sent_at() else {
            // No reply is due, so this is the end of the stream, or an error, or a TLS record
            // without data.
            if !self.held.connection.is_open_and_quiet() {
                self.cut();
            }
            return Ok(());
        };
        match self.held.connection.renewal_reply() {
            Ok(Some(lease)) => self.note_renewal(lease, sent_at, ConnectionEvent::Answered),
            Ok(None) => {}
            Err(error) => return self.handle_error(&error),
        }
        Ok(())
    }

    /// Notes a lease that was asked for at `sent_at`.
    fn note_lease(&mut self, lease: Duration, sent_at: Moment) {
        let was_last = self.is_last_lease();
        let last_end = self.held.asked_at + self.held.lease;
        self.held.asked_at = sent_at;
        self.held.lease = lease;
        let left = last_end.saturating_since(sent_at);
        // Replies round down to whole seconds. If more is missing, the end has changed: the server
        // has restarted, and allows less.
        let is_same_end = left < lease + Duration::from_secs(1);
        if was_last && is_same_end {
            self.held.lease = lease.max(left);
        }
    }

    /// Notes the answer to a renewal that was sent at `sent_at`.
    fn note_renewal(&mut self, lease: Duration, sent_at: Moment, answered: ConnectionEvent) {
        self.note_lease(lease, sent_at);
        let deadline = self.deadline();
        let mut hold = self.shared.lock();
        (hold.deadline, hold.lease_ends_at) = (deadline, sent_at + self.held.lease);
        hold.is_last_lease = self.is_last_lease();
        drop(hold);
        self.note(answered);
        for answer in self.sent_callbacks.drain(..) {
            answer(Moment::now() < deadline);
        }
    }

    /// Enters the phase after `event`.
    fn note(&mut self, event: ConnectionEvent) {
        self.phase = mem::take(&mut self.phase).after(event);
        self.shared.lock().is_cut = self.phase.is_cut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Address;
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;

    const WANTED: Duration = Duration::from_secs(10);

    fn alone() -> Address {
        "alone".parse().expect("an address")
    }

    /// The keeper of a lock whose server has granted `lease` to a request at `asked_at`.
    fn keeper(server: &Address, asked_at: Moment, lease: Duration) -> Keeper {
        let held = Granted::unconnected(server, asked_at, lease, WANTED);
        let shared = Shared::new(asked_at, lease).expect("a descriptor");
        Keeper::new(held, Arc::new(shared)).expect("a descriptor")
    }

    /// Times in milliseconds from the grant: its end, when the renewal was sent, what the server
    /// answered, and when the lease then ends.
    #[test]
    fn a_guard_knows_the_end_of_its_lease_after_each_answer() {
        let cases = [
            // The first answer that falls short counts from its request.
            (10_000, 4_000, 10_000, 14_000),
            (10_000, 4_500, 5_000, 9_500),
            // The end of the last lease stays the same, although the server rounds down.
            (6_000, 2_500, 3_000, 6_000),
            // A whole second is missing, or more: the server allows less than before.
            (6_000, 2_000, 3_000, 5_000),
            (6_000, 2_500, 2_000, 4_500),
            // The server allows more again.
            (6_000, 2_500, 4_000, 6_500),
            (6_000, 2_500, 10_000, 12_500),
        ];
        for case in cases {
            let granted_at = Moment::now();
            let [end, sent, answered, expected_end] =
                <[u64; 4]>::from(case).map(Duration::from_millis);
            let mut keeper = keeper(&alone(), granted_at, end);
            keeper.note_renewal(answered, granted_at + sent, ConnectionEvent::Answered);
            let hold = keeper.shared.lock();
            assert_eq!(hold.lease_ends_at, granted_at + expected_end, "{case:?}");
            let deadline = deadline_of(granted_at + sent, expected_end - sent);
            assert_eq!(hold.deadline, deadline, "{case:?}");
            assert_eq!(hold.is_last_lease, expected_end - sent < WANTED, "{case:?}");
        }
    }

    #[test]
    fn an_answer_after_the_renewed_lease_tells_that_it_is_not_held() {
        for (age, is_held) in [(Duration::ZERO, true), (WANTED, false)] {
            let sent_at = Moment::now() - age;
            let mut keeper = keeper(&alone(), sent_at, WANTED);
            let (answer, told) = channel();
            let callback = move |is_held| answer.send(is_held).expect("a listener");
            keeper.sent_callbacks.push(Box::new(callback));
            keeper.note_renewal(WANTED, sent_at, ConnectionEvent::Answered);
            assert_eq!(told.try_recv(), Ok(is_held));
        }
    }

    #[test]
    fn only_the_end_of_the_last_lease_is_blamed_on_the_longest_hold() {
        let cases = [
            (6_000, 5_500, Loss::MaxHold),
            (6_000, 0, Loss::Refused),
            (10_000, 9_500, Loss::Refused),
        ];
        for (lease, age, loss) in cases {
            let [lease, age] = [lease, age].map(Duration::from_millis);
            let mut keeper = keeper(&alone(), Moment::now() - age, lease);
            let refused = Error::Refused(keeper.held.asked());
            assert_eq!(
                keeper.handle_error(&refused),
                Err(loss),
                "{lease:?} {age:?}"
            );
        }
    }

    #[test]
    fn a_server_counts_as_gone_if_it_has_refused_since_it_accepted() {
        let directory = crate::os::short_directory();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        let now = Moment::now();
        let mut keeper = keeper(&Address::Unix(path.clone()), now, WANTED);
        let long_ago = Some(now - Duration::from_secs(60));
        keeper.note(ConnectionEvent::Ended(now));
        keeper.attempts.refused_since = long_ago;
        assert_eq!(keeper.reconnect_and_adopt(), Ok(()));
        keeper.note(ConnectionEvent::Ended(now));
        fs::remove_file(&path).expect("it is there");
        drop(listener);
        // The next attempt comes after a pause.
        let before = Moment::now();
        assert_eq!(keeper.reconnect_and_adopt(), Ok(()));
        assert!(keeper.attempts.next_at > before);
        keeper.attempts.refused_since = long_ago;
        assert_eq!(keeper.reconnect_and_adopt(), Err(Loss::Closed));
    }

    #[test]
    fn a_release_that_no_server_answers_is_no_loss() {
        let directory = tempfile::tempdir().expect("a directory");
        let server = Address::Unix(directory.path().join("no-socket"));
        let lease = Duration::from_secs(3);
        let began = Moment::now();
        let ended = keeper(&server, began, lease).carry_out(Order::Release);
        assert!(matches!(ended, Err(Error::Unreachable { .. })), "{ended:?}");
        // Longer than a server counts as absent in a renewal.
        assert!(began.elapsed() > lease - Duration::from_secs(1));
    }
}
