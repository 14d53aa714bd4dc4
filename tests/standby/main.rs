//! What a server promises alone, through another one that passes connections on to it.

#[path = "../support/mod.rs"]
mod support;

/// What the transcripts' connections speak.
const SCHEME: support::Scheme = support::Scheme::Plain;

#[path = "../latch/client.rs"]
mod client;
#[path = "../latch/run.rs"]
mod run;
#[path = "../latchd/wire.rs"]
mod wire;
