//! Locks, semaphores and leases in strict order of arrival, for hosts where everything is small.
//!
//! # Map
//!
//! ```text
//!   bins        bin/latchd, bin/lfpd, bin/latch, bin/sema
//!   programs    latchd/, lfpd/, latch/, sema/ options, wiring, signals, exit codes
//!               daemon                 what both servers say before they serve
//!               run                    a command under a lock
//!   sessions    dflock/session         the blocking conversation over one connection
//!               lfp/session            the same for the Lock File Protocol, over lock files
//!   services    manager                one mutex, wake-ups, the reaper
//!               client                 public library: locks of a server from other programs
//!               lockfile               public library: locks that are files, and no server
//!   codecs      dflock/{request,reply} text <-> values, pure
//!               lfp/{command,reply}, lockfile/uucp
//!   core        table/                 who holds and who waits, pure
//!   aside       net/                   sockets; knows no protocol and no table
//!               mint, fence_file       where tokens come from
//!               directory              the steps on a directory's names
//!               arguments, logging, escape
//! ```
//!
//! Arrows point down only; `tests/layering.rs` keeps it so.
//!
//! # The route of an `l`
//!
//! `net::listener` accepts, `net::workers` lends a thread, and `dflock::session` reads three lines
//! through `net::lines`. `dflock::request` makes a request of them. The session asks the `manager`,
//! which locks its mutex, reads the clock and lets the `table` decide: granted, queued, or refused.
//! If queued, the session sleeps on its connection's condvar; whoever frees the slot, be it a
//! release, a disconnect or the reaper at the lease's end, has the table promote the first in line
//! and wakes that connection. `dflock::reply` makes a line of the answer, written in one go.
//!
//! # Invariants
//!
//! - Truth is in the table, wake-ups are hints: whoever wakes looks again.
//! - A lock is a semaphore of one; `l` is `e` followed by `w`.
//! - No slot is free while somebody waits; nobody overtakes.
//! - Expired means dead, whether or not the reaper has been by.
//! - The order of fences is the order of grants.

#![forbid(unsafe_code)]

mod arguments;
pub mod client;
mod daemon;
mod dflock;
mod directory;
mod escape;
mod fence_file;
mod latch;
mod latchd;
mod lfp;
mod lfpd;
pub mod lockfile;
mod logging;
mod manager;
mod mint;
mod net;
mod run;
mod sema;
mod table;

pub use latch::main as latch_main;
pub use latchd::main as latchd_main;
pub use lfpd::main as lfpd_main;
pub use sema::main as sema_main;
