//! What goes wrong with etcd, in the log.

use std::time::{Duration, Instant};

use log::{error, warn};

use super::etcd::{
    EtcdFailure, INVALID_ARGUMENT, PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAUTHENTICATED,
};
use crate::text::Escaped;

/// The time between two lines about the same trouble.
const INTERVAL: Duration = Duration::from_secs(10);

/// Keeps trouble that lasts from flooding the log.
#[derive(Default)]
pub(super) struct Trouble {
    reported: Option<Instant>,
}

impl Trouble {
    /// Logs a failure, if the last line is long ago. `held_back` is how many sessions wait for
    /// etcd.
    pub(super) fn report(&mut self, failure: &EtcdFailure, held_back: usize) {
        if self.reported.is_some_and(|at| at.elapsed() < INTERVAL) {
            return;
        }
        self.reported = Some(Instant::now());
        match failure {
            EtcdFailure::NoAnswer { member, reason } => {
                let reason = Escaped(reason.as_bytes());
                warn!("etcd-unavailable member={member} error={reason} held_back={held_back}");
            }
            EtcdFailure::Refused { code, message } => {
                let shown = Escaped(message.as_bytes());
                match *code {
                    RESOURCE_EXHAUSTED if message.contains("space exceeded") => {
                        error!("etcd-full hint=\"compact and defragment; see latchd(8)\"");
                    }
                    PERMISSION_DENIED | UNAUTHENTICATED => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    // A wrong name or password.
                    INVALID_ARGUMENT if message.contains("auth") => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    _ => warn!("etcd-refused code={code} error={shown}"),
                }
            }
        }
    }
}
