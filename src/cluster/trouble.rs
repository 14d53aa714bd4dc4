//! Logs what goes wrong with etcd.

use std::time::{Duration, Instant};

use log::{error, info, warn};

use super::etcd::{
    EtcdFailure, INVALID_ARGUMENT, PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAUTHENTICATED,
};
use crate::text::Escaped;

/// The minimum time between two reports.
const INTERVAL: Duration = Duration::from_secs(10);

/// Keeps repeated failures of etcd from flooding the log.
#[derive(Default)]
pub(super) struct Trouble {
    reported: Option<Instant>,
    /// A refusal was reported, and etcd has accepted no batch after it.
    is_refused: bool,
}

impl Trouble {
    /// Logs a failure, unless the previous report is too recent. `waiting` is the number of
    /// sessions that wait for etcd.
    pub(super) fn report(&mut self, failure: &EtcdFailure, waiting: usize) {
        if self.reported.is_some_and(|at| at.elapsed() < INTERVAL) {
            return;
        }
        self.reported = Some(Instant::now());
        match failure {
            EtcdFailure::NoAnswer { member, reason } => {
                let reason = Escaped(reason.as_bytes());
                warn!("etcd-unavailable member={member} error={reason} held_back={waiting}");
            }
            EtcdFailure::Refused { code, message } => {
                self.is_refused = true;
                let shown = Escaped(message.as_bytes());
                match *code {
                    PERMISSION_DENIED | UNAUTHENTICATED => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    // This is etcd's answer to a wrong user name or password.
                    INVALID_ARGUMENT if message.contains("auth") => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    RESOURCE_EXHAUSTED if message.contains("space exceeded") => {
                        let hint = "compact, defragment and disarm; see latchd-cluster(7)";
                        error!(
                            "etcd-refuses code={code} error={shown} held_back={waiting} \
                             hint=\"{hint}\""
                        );
                    }
                    _ => warn!("etcd-refuses code={code} error={shown} held_back={waiting}"),
                }
            }
        }
    }

    /// Logs that etcd has accepted a batch, if a refusal was reported before.
    pub(super) fn end_of_refusals(&mut self) {
        if std::mem::take(&mut self.is_refused) {
            info!("etcd-takes-writes");
            self.reported = None;
        }
    }
}
