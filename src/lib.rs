//! Locks, semaphores and leases in strict order of arrival, for hosts where everything is small.
//!
//! The package has four programs, `latchd`, `latch`, `lfpd` and `sema`, each with a manual page,
//! and two libraries for other programs. Both block; neither needs a runtime.
//!
//! # Locks of a server
//!
//! [`client`] acquires locks and semaphores of a `latchd` server, for processes on one host or on
//! many. The server grants them in order of arrival, and takes them back when their holder dies. A
//! guard renews its lease in the background, notices the loss of the lock in time, and has a fence
//! for what the lock protects.
//!
//! ```
//! use latchd::client::{Address, Client};
//!
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server: Address = "127.0.0.1:6388".parse()?;
//! # let (_running, server) = Server::in_place_of(server);
//! let guard = Client::new([server]).lock("nightly-backup").acquire()?;
//! assert!(guard.is_held());
//! guard.release()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Locks without a server
//!
//! [`lockfile`] keeps a lock in a file, for processes that share a directory. It takes over the
//! lock of a holder that has died.
//!
//! ```
//! use latchd::lockfile::{Semaphore, SemaphoreConfig};
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("backup.lock");
//!
//! let semaphore = Semaphore::new(&path, SemaphoreConfig::default())?;
//! let guard = semaphore.try_acquire()?;
//! assert!(guard.is_held());
//! guard.release()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! `programs` (default) builds the four programs. A program that needs only the libraries leaves it
//! out, and compiles a handful of crates:
//!
//! ```toml
//! latchd = { path = "../latchd", default-features = false }
//! ```
//!
//! `tls` lets `latchd` speak TLS on its TCP port, and `latch` and [`client`] connect to such a
//! server. It is off by default: it more than doubles the programs.
//! `http` (default) lets `latchd` show its statistics to a browser and to Prometheus.
//! `cluster` makes several `latchd` one service, by way of etcd: see latchd-cluster(7). It adds
//! no crate.
//!
//! # For contributors
//!
//! The rest is about the source of the package.
//!
//! # Map
//!
//! ```text
//!   bins        bin/latchd        bin/lfpd        bin/latch         bin/sema
//!   programs    latchd/           lfpd/           latch/            sema/
//!   shared      server/  cli/                     supervise/  cli/
//!   services    arbiter/ fence/  cluster/         client/           lockfile/
//!   codecs      protocol/                         protocol/
//!   core        table/   token
//!   ground      net/   sys/   log/   text   base64
//! ```
//!
//! No module uses one of a higher row; which of its own row and of those below it may use is in
//! `tests/house/layering.rs`. `bin/latch-all` is the four programs in one (feature `multicall`),
//! and `fuzzing/` what the fuzzers of `fuzz/` and the tests feed. Each folder of `tests/` is one
//! program's, or the house's own rules; `cargo test -- --ignored` runs the long tests, and
//! `LATCHD_TEST_PROGRAMS=FOLDER cargo test` tries the programs in that folder, which have the same
//! features, instead of those that cargo has built: `packaging/try-static` does so.
//!
//! # Where to change what
//!
//! - A command of the wire protocol: `Request`, `parse`, `Request::write` and `HELP` in
//!   `protocol/request`, and its answers in `protocol/reply`. `carry_out` in `latchd/requests` does
//!   what it asks for, with `certainty_of` beside it; a command that only shows something is
//!   answered by `serve_frame` in `latchd/session`. `client/connection` sends it, and
//!   latch-protocol(7) describes it. For lfpd: `lfpd/command`, `lfpd/reply` and `lfpd/session`.
//! - What may come before the first request of a connection: `latchd/opening`.
//! - An option, and its text in `--help`: `latchd/options`, `latch/options`, `lfpd/options` or
//!   `sema/options`, and the manual page. A command of `latch` or `sema`: the same file, and
//!   `dispatch` in `latch/mod` or `main` in `sema/mod`. The completions are made from `--help`:
//!   `LATCHD_BLESS=1 cargo test --test house completions`.
//! - The rest of `--help`: `cli/help` for latch, latchd and lfpd, and `help` in `sema/options`.
//! - A path of the HTTP server: `RESOURCES` in `latchd/http/request`, and `answer` in
//!   `latchd/http/mod`; latchd(8), HTTP, describes it.
//! - A metric: `protocol/counters` and `protocol/metrics`.
//! - When a lease begins and ends: `table/leases`; whether it may be renewed, and for how long:
//!   `check_hold` in `table/mod`; when a client renews it: `client/guard/timing`.
//! - Who is next, for a lock and for a semaphore: `next_in_line` and `must_wait` in `table/queue`,
//!   and `serve_waiters` in `table/mod`. Lock files have no queue: `until_any` in `lockfile/wait`
//!   tries the slots of `sema --slots`.
//! - What a session asks of the table: `arbiter/seat`.
//! - The form of every line in the log: `LineStart` in `log/mod`. The words of a line are where the
//!   event happens: search for its first word, such as `granted`.
//! - TLS: the lowest version is in `VERSIONS` in `net/tls/mod`. `net/tls/certificate` has what a
//!   server shows, and `net/tls/trust` what a client accepts.
//! - A field of the lock file: `Record`, its `parse` and its `print`, in `lockfile/record`;
//!   `stamped` in `lockfile/host` fills it in, and sema-lockfile(5) describes it.
//! - When a lock file is stale: `judge` in `lockfile/staleness`; that of a serial device,
//!   `lfpd/uucp/staleness`.
//! - Which signals `latch run` and `sema run` forward to their command: `KEPT` in
//!   `supervise/signals` lists those that they do not. Signals to a server: `watch_signals` in
//!   `server/mod`.
//! - An exit status, such as `BUSY` for a lock that is held: the constants at the top of
//!   `latch/mod`, of `sema/mod`, and of `server/mod` for latchd and lfpd; `cli/failure` for what
//!   latch and sema share, `supervise/shim` for a command that cannot be run.
//!
//! # The route of an `l`
//!
//! `net/listener` accepts, `net/workers` lends a thread, and `latchd/session` reads three lines
//! through `net/lines`. `protocol/request` makes a request of them. `latchd/requests` asks the
//! connection's seat at the `arbiter`, which locks its mutex, reads the clock and lets the `table`
//! decide: granted, queued, or refused. If the claim is queued, the session's thread sleeps on its
//! seat's condvar. The thread that frees the slot (a release, a disconnect, an operator's break, or
//! a visit that finds a lease over, mostly the reaper's) has the table promote the first in line,
//! sends that client its grant, and wakes its seat. All other replies the session writes itself,
//! as lines of `protocol/reply`.
//!
//! With a journal, the arbiter hands the changes of the table to `cluster/journal` before it
//! releases its mutex. Then the session writes the grant to a wait, too, once the journal has it.
//!
//! # Invariants
//!
//! - Truth is in the table, wake-ups are hints: a thread that wakes looks again.
//! - A lock is a claim of all slots of its key.
//! - The first in line is granted as soon as the slots that it asks for are free, unless there is
//!   no fence for its grant; and no client overtakes another.
//! - Expired means dead, whether or not the reaper has come by.
//! - The order of fences is the order of grants.
//! - With a journal, no client is told what the journal does not have.

#![forbid(unsafe_code)]
// The modules that the library shares with the programs have parts that only the programs use.
#![cfg_attr(not(feature = "programs"), allow(dead_code, unused_imports))]

#[cfg(feature = "programs")]
mod arbiter;
#[cfg(any(feature = "cluster", feature = "http"))]
mod base64;
#[cfg(feature = "programs")]
mod cli;
pub mod client;
#[cfg(feature = "programs")]
#[cfg_attr(not(feature = "cluster"), path = "cluster/absent.rs")]
mod cluster;
#[cfg(feature = "programs")]
mod fence;
#[cfg(all(feature = "programs", any(test, fuzzing)))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "programs")]
mod latch;
#[cfg(feature = "programs")]
mod latchd;
#[cfg(feature = "programs")]
mod lfpd;
pub mod lockfile;
#[cfg(feature = "programs")]
mod log;
mod net;
mod protocol;
#[cfg(feature = "programs")]
mod sema;
#[cfg(feature = "programs")]
mod server;
#[cfg(feature = "programs")]
mod supervise;
mod sys;
mod table;
mod text;
mod token;

#[cfg(feature = "programs")]
#[doc(hidden)]
pub use crate::{
    latch::main as latch_main, latchd::main as latchd_main, lfpd::main as lfpd_main,
    sema::main as sema_main,
};
