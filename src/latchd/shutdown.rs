//! The end of a server: an idle exit, or a drain and a farewell (latchd(8), SIGNALS).

use std::net::Shutdown;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, select, Receiver, RecvTimeoutError};
use log::{info, warn};

use crate::arbiter::Arbiter;
use crate::cluster::Office;
use crate::net::connections::Connections;
use crate::net::listener::Listener;
use crate::sys::notify::notify;
use crate::sys::thread::spawn;

use super::options::Options;

/// How long the farewell waits while no connection closes. After a drain of thousands of waiters,
/// their sessions take longer than this together.
const FAREWELL: Duration = Duration::from_millis(600);

/// A time that is as good as none.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// What the end of a server has to do with.
pub(super) struct End<'a> {
    pub(super) signals: &'a Receiver<()>,
    pub(super) arbiter: &'a Arbiter,
    pub(super) connections: &'a Arc<Connections>,
    pub(super) options: &'a Options,
    pub(super) listeners: &'a [Listener],
    pub(super) office: Option<&'a Office>,
}

impl End<'_> {
    /// Blocks until the server is to stop, drains it, and returns the exit status.
    pub(super) fn run(&self) -> ExitCode {
        // A supervisor that has heard READY may have stopped listening since: its errors do not
        // matter.
        if self.becomes_idle() {
            let _ = notify("STOPPING=1\nSTATUS=Idle");
            info!("stopping reason=idle");
            return ExitCode::SUCCESS;
        }
        let drained = self.begin_drain();
        // From here on new claims are refused: an operator who reads this can rely on it.
        info!("draining");
        let _ = notify("STOPPING=1\nSTATUS=Draining");
        let grace = self.options.shutdown_timeout.unwrap_or(LONGEST);
        let began = Instant::now();
        select! {
            recv(self.signals) -> _ => {
                warn!("stopping reason=second-signal");
                return ExitCode::from(1);
            }
            recv(drained) -> _ => info!("stopping reason=drained"),
            default(grace) => {
                warn!("stopping reason=shutdown-timeout");
                // Another server goes on with those who hold. Their connections end with the
                // process: a farewell before the office is given up would end them in the journal.
                if self.office.is_some_and(Office::is_active) {
                    return ExitCode::SUCCESS;
                }
            }
        }
        let grace_left = grace.saturating_sub(began.elapsed());
        say_farewell(self.signals, self.connections, grace_left)
    }

    /// Blocks until no client has been connected and no slot held for the time of an idle exit, and
    /// lets no client in then; or until a signal comes, with `false`.
    fn becomes_idle(&self) -> bool {
        let (arbiter, idle_exit) = (self.arbiter, self.options.idle_exit);
        let started = Instant::now();
        let mut look_again = idle_exit.unwrap_or(LONGEST);
        while self.signals.recv_timeout(look_again) == Err(RecvTimeoutError::Timeout) {
            let Some(idle_exit) = idle_exit else { continue };
            let now = Instant::now();
            let last_held = arbiter.last_held();
            let empty_since = self.connections.empty_since().unwrap_or(now);
            let quiet_since = empty_since.max(last_held.unwrap_or(started));
            let idle_for = now.saturating_duration_since(quiet_since);
            let is_quiet = || arbiter.last_held() == last_held;
            if idle_for >= idle_exit && self.connections.close_if_empty(is_quiet) {
                return true;
            }
            // A client that is here now keeps the server for at least that long.
            let left = idle_exit.saturating_sub(idle_for);
            look_again = left.max(Duration::from_millis(1));
        }
        false
    }

    /// Has the holders finish. The channel closes when they have.
    fn begin_drain(&self) -> Receiver<()> {
        if let Some(office) = self.office {
            office.leave();
            // No client is let in, and those finish whose connections are passed on.
            if !office.is_active() {
                self.connections.close();
                self.listeners.iter().for_each(Listener::refuse);
                return none_left(self.connections, LONGEST, LONGEST);
            }
        }
        self.arbiter.begin_drain()
    }
}

/// Ends all input, and lets the replies to earlier requests leave: while sessions end, for as long
/// as is left of the grace period. A client that connects now waits in the backlog for the next
/// server, if the socket is inherited.
fn say_farewell(
    signals: &Receiver<()>,
    connections: &Arc<Connections>,
    grace_left: Duration,
) -> ExitCode {
    connections.close();
    connections.shut_down_all(Shutdown::Read);
    let farewell = none_left(connections, FAREWELL, grace_left.clamp(FAREWELL, LONGEST));
    select! {
        recv(signals) -> _ => ExitCode::from(1),
        recv(farewell) -> _ => ExitCode::SUCCESS,
    }
}

/// A channel that closes when no connection is open any more, when none has closed for `patience`,
/// or after `at_most`.
fn none_left(
    connections: &Arc<Connections>,
    patience: Duration,
    at_most: Duration,
) -> Receiver<()> {
    let (sender, none_left) = bounded(0);
    let connections = Arc::clone(connections);
    // Without a thread, the sender is dropped: nothing is waited for.
    let _ = spawn("farewell", move || {
        connections.wait_until_none(patience, at_most);
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
        say_farewell(&signals, &connections, Duration::ZERO);
        assert!(connections.close_if_empty(|| false), "it accepts");
    }
}
