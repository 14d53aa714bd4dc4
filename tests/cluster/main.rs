//! Several servers as one service, on a real etcd.

#[path = "../support/mod.rs"]
mod support;

use support::cluster as house;

/// What the transcripts' connections speak.
const SCHEME: support::Scheme = support::Scheme::Plain;

mod cut;
mod example;
mod faults;
mod history;
mod proxy;
mod relay;
mod stopping;
mod takeover;
#[cfg(feature = "tls")]
mod tls;

// What a server promises alone, with its journal in etcd.
#[path = "../latchd/auth.rs"]
mod auth;
#[path = "../latchd/handover.rs"]
mod handover;
#[path = "../latchd/hostile.rs"]
mod hostile;
#[path = "../latchd/limits.rs"]
mod limits;
#[path = "../latchd/wire.rs"]
mod wire;
