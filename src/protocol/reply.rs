//! One value in, one line out: latch-protocol(7), REPLIES.

use std::io::Write;
use std::time::Duration;

use crate::table::{Grant, Refusal};

/// What a client is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Ok,
    /// `ok` with token and lease.
    Granted(Grant),
    /// `acquired` with token and lease.
    Acquired(Grant),
    /// `ok` with the lease from now on.
    Renewed(Duration),
    Queued,
    Timeout,
    Error,
    AuthFailed,
    AlreadyEnqueued,
    NotEnqueued,
    Refused(Refusal),
}

impl Reply {
    /// Appends the reply's line to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Reply::Ok => put(out, format_args!("ok")),
            Reply::Granted(grant) => put_grant(out, "ok", grant),
            Reply::Acquired(grant) => put_grant(out, "acquired", grant),
            Reply::Renewed(lease) => put(out, format_args!("ok {}", lease.as_secs())),
            Reply::Queued => put(out, format_args!("queued")),
            Reply::Timeout => put(out, format_args!("timeout")),
            Reply::Error => put(out, format_args!("error")),
            Reply::AuthFailed => put(out, format_args!("error_auth")),
            Reply::AlreadyEnqueued => put(out, format_args!("error_already_enqueued")),
            Reply::NotEnqueued => put(out, format_args!("error_not_enqueued")),
            Reply::Refused(refusal) => put(out, format_args!("{}", status(*refusal))),
        }
    }
}

fn status(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::LimitMismatch => "error_limit_mismatch",
        Refusal::MaxLocks => "error_max_locks",
        Refusal::MaxWaiters => "error_max_waiters",
        Refusal::LeaseExpired => "error_lease_expired",
        Refusal::Draining => "error_draining",
        Refusal::NotHeld | Refusal::NoToken => "error",
    }
}

fn put_grant(out: &mut Vec<u8>, word: &str, grant: &Grant) {
    put(
        out,
        format_args!("{word} {} {}", grant.token, grant.lease.as_secs()),
    );
}

fn put(out: &mut Vec<u8>, line: std::fmt::Arguments<'_>) {
    writeln!(out, "{line}").expect("writing to memory");
}
