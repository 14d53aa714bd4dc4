//! What a server promises alone, through another one that passes connections on to it.
//!
//! A Unix socket is that of the active server, so that an operator may break a grant over it. The
//! clients of these tests come to the active server directly, because they have another meaning
//! through a standby:
//!
//! - `handover::without_auto_release_a_grant_passes_a_dead_waiter_by`: a grant may be on its way to
//!   the standby while the hang-up is on its way from there.
//! - `limits::exactly_max_connections_of_racing_clients_are_served`: the standby has places of its
//!   own, and the last round may have left those of the active server only.
//! - `limits::one_address_gets_no_more_than_its_connections`: all come from the standby's address.
//! - `terminal::a_line_on_the_terminal_says_what_it_waits_for`: `latch` knows its place in the
//!   queue by its own address.
//!
//! Sections of transcripts that need a server `alone` are not played here for the same reasons.
//!
//! Where the end of the server is to be the loss of the lock, the server is no member at all: a
//! client of a cluster waits for the next one until its lease could end.

#[path = "../support/mod.rs"]
mod support;

/// What the transcripts' connections speak.
const SCHEME: support::Scheme = support::Scheme::Plain;

#[path = "../latchd/auth.rs"]
mod auth;
#[path = "../latch/client.rs"]
mod client;
#[path = "../latch/commands.rs"]
mod commands;
#[path = "../latch/conversations.rs"]
mod conversations;
#[path = "../latchd/handover.rs"]
mod handover;
#[path = "../latch/hold.rs"]
mod hold;
#[path = "../latchd/hostile.rs"]
mod hostile;
#[path = "../latchd/limits.rs"]
mod limits;
#[path = "../latch/operators.rs"]
mod operators;
#[path = "../latch/reconnecting.rs"]
mod reconnecting;
#[path = "../latch/run.rs"]
mod run;
#[path = "../latch/terminal.rs"]
mod terminal;
#[path = "../latch/waiting.rs"]
mod waiting;
#[path = "../latchd/wire.rs"]
mod wire;
