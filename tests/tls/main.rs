//! What the feature `tls` adds: the protocol over TLS, to the byte, and what TLS itself may do
//! wrong.

#[path = "../support/mod.rs"]
mod support;

mod certificates;
mod clients;
mod handshakes;
mod tunnels;
#[path = "../latchd/wire.rs"]
mod wire;

/// What the transcripts' connections speak.
const SCHEME: support::Scheme = support::Scheme::Tls;
