//! The server `latchd`: its protocol to the byte, its life as a process, and what hard use does to
//! it.

#[path = "../support/mod.rs"]
mod support;

mod auth;
mod browser;
mod calls;
mod conversations;
mod endings;
mod faults;
mod fences;
mod handover;
mod hostile;
mod http;
mod http_grants;
mod lasting;
mod limits;
mod log;
mod machine;
mod memory;
mod operators;
mod options;
mod past_holders;
mod planted;
mod proofs;
mod real_tools;
mod restart;
mod settling;
mod supervision;
mod wire;

/// What the transcripts' connections speak.
const SCHEME: support::Scheme = support::Scheme::Plain;
