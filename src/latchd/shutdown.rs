//! The end of a server: an idle exit, or a drain and a farewell (latchd(8), SIGNALS).

use std::io;
use std::net::Shutdown;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, select, Receiver, RecvTimeoutError};
use log::{error, info};

use crate::latchd::arbiter::{Arbiter, DrainUntil};
use crate::latchd::cluster::ClusterNode;
use crate::os::event::time_left;
use crate::os::notify::notify;
use crate::os::text::reason;
use crate::os::thread::spawn;
use crate::shared::net::connections::Connections;
use crate::shared::net::listener::Listener;

use super::claim_log::{log_cut_off, log_drain};
use super::context::ServerContext;
use super::start::options::Options;
use super::state_file::{Handover, StateFile, RETRY_AFTER};

/// How long the farewell waits for the next connection to close. The limit is for each connection,
/// because the sessions of thousands of drained waiters need more time in total.
const FAREWELL: Duration = Duration::from_millis(600);

/// A time limit that is effectively unlimited.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long sessions have to send the last replies before a hand-over: to waiters that the drain
/// has refused, and to clients whose grants had to be written first.
const LAST_REPLIES: Duration = Duration::from_millis(100);

/// How long a server that hands over its leadership continues to grant while there are holders
/// whose clients cannot adopt their locks. Without a limit, the hand-over might never happen: if
/// such clients kept asking for locks, one of them would always hold a lock.
const GRANTS_GO_ON: Duration = Duration::from_secs(10);

/// The reason in the log if a server stops while it waits for holders.
const TIMED_OUT: &str = "shutdown-timeout";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Drained {
    Yes,
    TimedOut,
}

/// How a server with a state file has ended.
enum Ended {
    HandedOver,
    /// The file could not be written.
    Drained(Drained),
}

/// The parts of a server that its shutdown needs.
pub(super) struct ServerEnd<'a> {
    pub(super) signals: &'a Receiver<()>,
    pub(super) arbiter: &'a Arbiter,
    pub(super) options: &'a Options,
    pub(super) listeners: &'a [Listener],
    pub(super) context: &'a ServerContext,
}

impl ServerEnd<'_> {
    /// Blocks until the server is to stop, drains it, and returns the exit status. `over_http` are
    /// the connections over HTTP, if clients can get locks there.
    pub(super) fn run(&self, over_http: Option<Arc<Connections>>) -> ExitCode {
        // The supervisor may not listen after READY, so errors of `notify` do not matter here.
        let state = self.context.state.as_deref();
        if self.becomes_idle() {
            let _ = notify("STOPPING=1\nSTATUS=Idle");
            info!("stopping reason=idle");
            if state.is_none_or(|file| self.hand_over(file).is_ok()) {
                return ExitCode::SUCCESS;
            }
        }
        let deadline = Instant::now() + self.options.shutdown_timeout.unwrap_or(LONGEST);
        if let Some(node) = self.context.node.as_deref() {
            node.leave();
            return if node.is_active() {
                self.hand_over_leadership(node, deadline)
            } else {
                self.leave_cluster(node, deadline)
            };
        }
        let drained = self.arbiter.begin_drain(match state {
            Some(_) => DrainUntil::AllCanAdopt,
            None => DrainUntil::NoClient,
        });
        // From here on, new claims are refused. An operator who sees the next log line can rely on
        // that.
        log_drain(self.arbiter);
        let _ = notify("STOPPING=1\nSTATUS=Draining");
        let Some(mut reason) = self.wait_for(&drained, deadline) else {
            return ExitCode::from(1);
        };
        if let Some(file) = state {
            // A client that does not hear of its grant cannot come back for it.
            file.catch_up();
            std::thread::sleep(LAST_REPLIES);
            reason = match self.hand_over_or_drain(file, deadline) {
                Some(Ended::HandedOver) => {
                    info!("stopping reason=handed-over");
                    return ExitCode::SUCCESS;
                }
                Some(Ended::Drained(reason)) => reason,
                None => return ExitCode::from(1),
            };
        }
        match reason {
            Drained::Yes => info!("stopping reason=drained"),
            Drained::TimedOut => log_cut_off(self.arbiter, TIMED_OUT),
        }
        let grace_left = time_left(deadline);
        let connections = [Some(Arc::clone(&self.context.connections)), over_http];
        let connections = connections.into_iter().flatten().collect();
        let_sessions_finish(self.signals, connections, grace_left)
    }

    /// Hands the holders of the previous server on to the next one, because this server cannot
    /// start.
    pub(super) fn give_back(&self) {
        if let Some(Err(error)) = self
            .context
            .state
            .as_deref()
            .map(|file| self.hand_over(file))
        {
            error!("cannot-hand-over error=\"{}\"", reason(&error));
        }
    }

    /// Hands the holders over. While the file cannot be written, tries again every second, until no
    /// holder is left or the grace period is over. `None` at a second signal.
    fn hand_over_or_drain(&self, file: &StateFile, deadline: Instant) -> Option<Ended> {
        let Err(error) = self.hand_over(file) else {
            return Some(Ended::HandedOver);
        };
        error!("cannot-hand-over error=\"{}\"", reason(&error));
        let drained = self.arbiter.begin_drain(DrainUntil::NoHolder);
        loop {
            let next_try = deadline.min(Instant::now() + RETRY_AFTER);
            let reason = self.wait_for(&drained, next_try)?;
            if self.hand_over(file).is_ok() {
                return Some(Ended::HandedOver);
            }
            if reason == Drained::Yes || Instant::now() >= deadline {
                return Some(Ended::Drained(reason));
            }
        }
    }

    /// Blocks until the drain or the grace period is over; `None` at a second signal.
    fn wait_for(&self, drained: &Receiver<()>, deadline: Instant) -> Option<Drained> {
        select! {
            recv(self.signals) -> _ => {
                log_cut_off(self.arbiter, "second-signal");
                None
            }
            recv(drained) -> _ => Some(Drained::Yes),
            default(time_left(deadline)) => Some(Drained::TimedOut),
        }
    }

    /// Hands the holders over to the next server. After a success, no request is carried out and no
    /// reply is sent until the process ends: the next server would not know what happens after the
    /// snapshot. Fails if the file cannot be written.
    fn hand_over(&self, file: &StateFile) -> io::Result<()> {
        let replies = self.context.replies.write();
        let mut frozen = self.arbiter.freeze();
        let (next_fence, holders) = frozen.hand_over();
        file.close(Handover {
            next_fence,
            settling_left: frozen.settling_left(),
            holders,
            histories: frozen.histories(),
        })?;
        std::mem::forget((replies, frozen));
        Ok(())
    }

    /// Hands the holders over to the next active server, as soon as all of their clients can come
    /// back to that server. Until then this server serves its clients, and for a while it also
    /// grants. Afterwards it confirms no change to any client. The connections end with the
    /// process: an orderly farewell would tell the journal that the holders have ended.
    fn hand_over_leadership(&self, node: &ClusterNode, deadline: Instant) -> ExitCode {
        info!("handing-over");
        let _ = notify("STOPPING=1\nSTATUS=Handing over");
        let mut ended = self.wait_for(&node.probe_journal(), deadline);
        if ended == Some(Drained::Yes) {
            let closed = self.arbiter.close_record_once_all_can_adopt();
            let drains_at = Instant::now() + GRANTS_GO_ON.min(time_left(deadline) / 2);
            ended = self.wait_for(&closed, drains_at);
            if ended == Some(Drained::TimedOut) {
                self.arbiter.refuse_claims();
                log_drain(self.arbiter);
                ended = self.wait_for(&closed, deadline);
            }
        }
        match ended {
            Some(Drained::Yes) => info!("stopping reason=handed-over"),
            Some(Drained::TimedOut) => {
                log_cut_off(self.arbiter, TIMED_OUT);
                self.arbiter.close_record();
            }
            None => return ExitCode::from(1),
        }
        ExitCode::SUCCESS
    }

    /// Ends a standby. It accepts no more clients, cuts off the clients that can come back through
    /// another server, and lets the others finish. The end of the process resets those that are
    /// left.
    fn leave_cluster(&self, node: &ClusterNode, deadline: Instant) -> ExitCode {
        let connections = &self.context.connections;
        connections.close();
        self.listeners.iter().for_each(Listener::refuse);
        node.cut_adopters();
        info!("draining");
        let _ = notify("STOPPING=1\nSTATUS=Draining");
        let gone = none_left(vec![Arc::clone(connections)], LONGEST, LONGEST);
        match self.wait_for(&gone, deadline) {
            Some(Drained::Yes) => info!("stopping reason=drained"),
            Some(Drained::TimedOut) => log_cut_off(self.arbiter, TIMED_OUT),
            None => return ExitCode::from(1),
        }
        ExitCode::SUCCESS
    }

    /// Blocks until the server is idle: for the time of an idle exit, no client was connected and
    /// no slot was held. The server then accepts no more clients, and this function returns `true`.
    /// Returns `false` at a signal.
    fn becomes_idle(&self) -> bool {
        let (arbiter, connections) = (self.arbiter, &self.context.connections);
        let idle_exit = self.options.idle_exit;
        let started = Instant::now();
        let mut look_again = idle_exit.unwrap_or(LONGEST);
        while self.signals.recv_timeout(look_again) == Err(RecvTimeoutError::Timeout) {
            let Some(idle_exit) = idle_exit else { continue };
            let now = Instant::now();
            // If there is a state file, slots that are held without a connection do not count:
            // they are handed over.
            let last_held = || match self.context.state {
                Some(_) => None,
                None => arbiter.last_held(),
            };
            let last_held_at = last_held();
            // A session over HTTP and a request that waits there have a seat without a connection.
            let has_seats = arbiter.seat_count() > 0;
            let empty_since = connections.empty_since().filter(|_| !has_seats);
            let empty_since = empty_since.unwrap_or(now);
            let quiet_since = empty_since.max(last_held_at.unwrap_or(started));
            let idle_for = now.saturating_duration_since(quiet_since);
            let is_quiet = || last_held() == last_held_at && arbiter.seat_count() == 0;
            if idle_for >= idle_exit && connections.close_if_empty(is_quiet) {
                return true;
            }
            // A client that is here now keeps the server running for at least this time.
            let left = idle_exit.saturating_sub(idle_for);
            look_again = left.max(Duration::from_millis(1));
        }
        false
    }
}

/// Ends all input, and lets the sessions send the replies to earlier requests. Waits as long as
/// sessions end, but no longer than the rest of the grace period. If the socket is inherited, a
/// client that connects now waits in the backlog for the next server.
fn let_sessions_finish(
    signals: &Receiver<()>,
    connections: Vec<Arc<Connections>>,
    grace_left: Duration,
) -> ExitCode {
    for connections in &connections {
        connections.close();
        connections.shut_down_all(Shutdown::Read);
    }
    let farewell = none_left(connections, FAREWELL, grace_left.clamp(FAREWELL, LONGEST));
    select! {
        recv(signals) -> _ => ExitCode::from(1),
        recv(farewell) -> _ => ExitCode::SUCCESS,
    }
}

/// Returns a channel that closes when no connection is open any more, when no connection has closed
/// for `patience`, or after `at_most`.
fn none_left(
    connections: Vec<Arc<Connections>>,
    patience: Duration,
    at_most: Duration,
) -> Receiver<()> {
    let (sender, none_left) = bounded(0);
    // If the thread cannot be started, the sender is dropped, and nothing is waited for.
    let _ = spawn("farewell", move || {
        for connections in connections {
            connections.wait_until_none(patience, at_most);
        }
        drop(sender);
    });
    none_left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_farewell_newcomers_are_left_to_the_next_server() {
        let (_sender, signals) = bounded(1);
        let connections = Arc::new(Connections::new(1, None, b""));
        let_sessions_finish(&signals, vec![Arc::clone(&connections)], Duration::ZERO);
        assert!(connections.close_if_empty(|| false), "it accepts");
    }
}
