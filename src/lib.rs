//! Locks, semaphores and leases in strict order of arrival, for small hosts.
//!
//! The package has four programs, `latchd`, `latch`, `lfpd` and `sema`, each with a manual page,
//! and two libraries for other programs. The calls of both libraries block; neither library needs
//! an async runtime.
//!
//! # Locks of a server
//!
//! [`client`] acquires locks and semaphores of a `latchd` server, for processes on one host or on
//! many. The server grants them in order of arrival, and takes them back when their holder dies. A
//! guard renews its lease in the background and notices the loss of the lock in time. It also has a
//! fence, by which the resource under the lock can refuse an earlier holder.
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
//! `programs` (default) builds the four programs. A program that needs only the libraries leaves
//! this feature out, and compiles only a handful of crates:
//!
//! ```toml
//! latchd = { path = "../latchd", default-features = false }
//! ```
//!
//! `tls` lets `latchd` speak TLS on its TCP port, and lets `latch` and [`client`] connect to such a
//! server. It is off by default, because it more than doubles the size of the programs.
//! `cluster` lets several `latchd` servers act as one service, by way of etcd: see
//! latchd-cluster(7). It adds no crate.
//!
//! # For contributors
//!
//! The rest of this page is about the source of the package.
//!
//! # Map
//!
//! ```text
//!   bins        bin/latchd        bin/lfpd        bin/latch         bin/sema
//!   programs    latchd/           lfpd/           latch/            sema/
//!   shared      server/  cli/                     supervise/  cli/
//!   services    arbiter/ fence/  cluster/         client/           lockfile/
//!   codecs      protocol/                         protocol/
//!   core        table/   terms   token
//!   ground      net/   sys/   log/   text   base64
//! ```
//!
//! No module uses a module of a higher row, and no two files use each other in a circle.
//! `tests/house/layering.rs` checks both, and lists the modules of its own row and of lower rows
//! that each module may use. `bin/latch-all` is the four programs in one (feature `multicall`).
//! `fuzzing/` has the functions that the fuzzers of `fuzz/` and the tests
//! call with their input.
//!
//! Each folder of `tests/` tests one program or one subject; `tests/house` checks the rules that
//! hold for all files. `cargo test -- --ignored` runs the long tests. With
//! `LATCHD_TEST_PROGRAMS=FOLDER`, `cargo test` tests the programs in that folder, which must have
//! the same features, instead of those that cargo has built. `packaging/try-static` does so.
//!
//! # Words
//!
//! - *claim*: what a client asks for, until it is granted or has failed.
//! - *place*: the record of a claim in the table, in its key's queue or among its holders.
//! - *ticket*: the right of a session to the result of a claim that waits.
//! - *grant*: a claim that has been granted. It has one token, one lease and any number of slots.
//!   The client that has it is its holder.
//! - *slot*: the unit of weight. A semaphore has as many as its limit; a lock is taken whole.
//! - *owed*: of a waiter whose turn it is, but for which there is no fence or no room yet.
//! - *lease*: how long a grant lasts unless it is renewed.
//! - *fence*: the number of a grant, which rises with every grant. With a secret salt, it is the
//!   token.
//! - *seat*: the access of one connection to the table.
//! - *orphan*: a grant without a connection.
//! - *kept*: of an orphan whose client asked for that.
//! - *adopt*: move a grant to another connection.
//! - *provisional*: of an adoption whose connection has not renewed the grant yet.
//! - *settle*: grant nothing after a crash, until the leases of unknown clients have ended.
//! - *proof*: a token and what was granted, by which a client brings its grant back after a crash.
//! - *record*: a holder as text, in a file or in etcd.
//! - *round*: a transaction that writes changes of holders to etcd, or asks whether this server is
//!   still active.
//! - *promise*: what a reply says of a holder.
//! - *certainty*: what must be known before a reply with a promise may be sent.
//! - *drain*: refuse new claims, and wait for the holders before the server ends.
//!
//! # Where to change what
//!
//! - A command of the wire protocol: `Request`, `parse`, `Request::write` and `HELP` in
//!   `protocol/request`, and its replies in `protocol/reply`. `carry_out` in `latchd/requests`
//!   carries the command out, and says what its reply promises. `serve_frame` in `latchd/session`
//!   answers commands that only show something. `client/connection` sends commands, and
//!   latch-protocol(7) describes them. For lfpd: `lfpd/command`, `lfpd/reply` and `lfpd/session`.
//! - What may come before the first request of a connection: `latchd/opening`. In a cluster, a
//!   server reads the first bytes in `cluster/first_bytes`, and passes them on or to
//!   `latchd/opening`.
//! - An option, and its text in `--help`: one row in `latchd/options`, `latch/options`,
//!   `lfpd/options` or `sema/options`, and the manual page; for latchd, what options mean together:
//!   `latchd/settings`. For a command of `latch` or `sema`, also `dispatch` in `latch/mod` or
//!   `main` in `sema/mod`. The completions are made from the rows with
//!   `LATCHD_BLESS=1 cargo test --test house completions`.
//! - What a row can say: `cli/rows`. How a command line is read by the rows: `cli/arguments`.
//! - The rest of `--help`: `cli/help` for latch, latchd and lfpd, and `help` in `sema/options`.
//! - A path of the HTTP server: `ROUTES` in `latchd/http/routes`. `show_with_permit` in
//!   `latchd/http/mod` answers what only shows something, and `serve` in `latchd/http/grants` the
//!   rest: `latchd/http/body` makes a request of the latch protocol of it, `carry_out` in
//!   `latchd/requests` carries it out, and `latchd/http/reply` says the reply in HTTP.
//!   latchd-operations(7), HTTP, describes the paths.
//! - A metric: `protocol/counters` and `protocol/metrics`.
//! - When a lease begins and ends, and whether it may be renewed, and for how long: `table/leases`;
//!   when a client renews it: `client/guard/timing`.
//! - A cap on locks, grants, waiters or connections: `Caps` in `table/types` for those of the
//!   table. `latchd/mod` fills it in from the options, and `latchd/machine` has the defaults that
//!   depend on the memory. The number of connections: `latchd/capacity`.
//! - What a server restores from its state file after a crash, and for how long it then grants
//!   nothing: `latchd/state_file/start`. What is written to the file before a reply:
//!   `table/lasting` and `latchd/state_file/unwritten`. How a client brings its grant back:
//!   `table/proofs`, and `client/guard/keeper/reconnecting`.
//! - What a server warns of at its start: `latchd/exposure`, `latchd/variables`, and
//!   `warn_of_clock` in `latchd/fences`.
//! - What a server does at SIGTERM: `run` in `latchd/shutdown`. lfpd: the end of `serve_all` in
//!   `lfpd/mod`.
//! - How a holder is written in a file or in etcd: `protocol/record`; what the table puts into the
//!   record: `record` in `table/changes`.
//! - Which claim is next, for a lock and for a semaphore: `next_in_line` and `must_wait` in
//!   `table/queue`, and `serve_waiters` in `table/mod`. Lock files have no queue: `until_any` in
//!   `lockfile/wait` tries the slots of `sema --slots`.
//! - What a session asks of the table: `arbiter/seat`.
//! - What must be certain before a reply is sent: `carry_out` in `latchd/requests` decides, and
//!   `wait_until_certain` in `latchd/connection/outbox` waits, through `cluster/journal`.
//! - Which server has a key: `server_of` in `client/mod`, and `shard_of` in `client/address`. Which
//!   server of a cluster is asked next: `first_answer` in `client/mod`, and `Alternatives` in
//!   `client/address`.
//! - What a guard does without a connection: `client/guard/keeper/phase` has its phases, and
//!   `reconnecting` beside it what is done in them. When it tries again: `client/attempts`.
//! - `--at-least`: `latch/run` sets it for the claim, and `test_keep` in `client/guard` asks the
//!   server at the grant whether it would keep it. When the command has ended, `latch/releasing`
//!   calls `keep_for` in `client/guard`, which asks the server to keep the grant. There, `keep` in
//!   `table/orphans` does.
//! - The variables of a command under a lock: `latch/variables`.
//! - What `latch stats` shows: `latch/stats_table`; how that fits a window: `latch/text_table`.
//! - What a standby does with a connection: `relay_or_serve` in `cluster/relay`.
//! - Which names mean the same serial port: `lfpd/uucp/device`; the names of their lock files:
//!   `lfpd/uucp/names`. Which of them a lock has: `make` in `lfpd/uucp/lock_file`; which an unlock
//!   removes: `removable` in `lfpd/uucp/files`.
//! - The form of every line in the log: `LineStart` in `log/mod`. The rest of a line is in the code
//!   that logs the event: search for the first word of the line, such as `granted`.
//! - TLS: `VERSIONS` in `net/tls/mod` has the lowest version. `net/tls/certificate` has the
//!   certificate of a server, and `net/tls/trust` what a client accepts.
//! - A field of the lock file: `Record`, its `parse` and its `print`, in `lockfile/record`;
//!   `stamped` in `lockfile/host` fills it in, and sema-lockfile(5) describes it.
//! - When a lock file is stale: `judge` in `lockfile/staleness`. When the lock file of a serial
//!   device is stale: `lfpd/uucp/staleness`.
//! - Which signals `latch run` and `sema run` forward to their command: `NOT_PASSED_ON`
//!   in `supervise/signals` lists the others. Signals to a server: `watch_signals` in `server/mod`.
//! - An exit status, such as `BUSY` for a lock that is held: the constants at the top of
//!   `latch/mod`, of `sema/mod`, and of `server/mod` for latchd and lfpd. `cli/failure` has the
//!   ones that latch and sema share, and `supervise/shim` those for a command that cannot be run.
//!
//! # The route of an `l`
//!
//! `net/listener` accepts the connection, `net/workers` lends it a thread, and `latchd/session`
//! reads three lines through `net/lines`. `protocol/request` makes a request of these lines.
//! `latchd/requests` asks the connection's seat at the `arbiter`. The arbiter locks its mutex,
//! reads the clock and lets the `table` decide whether the claim is granted, queued or refused. If
//! the claim is queued, the session's thread sleeps on its seat's condvar.
//!
//! A slot becomes free by a release, a disconnect, an operator's break, or a visit that finds an
//! expired lease (mostly a visit of the reaper). The thread that frees the slot has the table
//! promote the first in line, sends that client its grant, whole or not at all, and wakes its seat.
//! The session itself writes all other replies, as lines of `protocol/reply`.
//!
//! With a journal, the arbiter passes the table's changes to `cluster/journal` before it releases
//! its mutex. In that case, the session itself also writes the grant that ends a wait, as soon as
//! the journal has it.
//!
//! # The route of a lost lock
//!
//! `client/guard/keeper` renews the lease. If the server no longer has the grant, or is silent
//! until the lease is over by the client's own clock, the keeper ends the guard. This sets off its
//! event. `latch/run` waits for this event beside the signals and its command, and tells
//! `supervise/group`. The group gets SIGTERM, and SIGKILL after a while. The exit status says that
//! the lock was lost.
//!
//! # Invariants
//!
//! - Only the table says who holds what. A wake-up is a hint: a thread that wakes up looks at the
//!   table again.
//! - A lock is a claim of all slots of its key.
//! - The first in line is granted as soon as the slots that it asks for are free, unless there is
//!   no fence for its grant. No client overtakes another.
//! - An expired lease is over, whether or not the reaper has noticed.
//! - The order of fences is the order of grants.
//! - With a journal, no client is told of a change that the journal does not have.

#![forbid(unsafe_code)]

#[cfg(feature = "programs")]
mod arbiter;
#[cfg(feature = "programs")]
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
#[doc(hidden)] // for its own tests
pub mod supervise;
mod sys;
#[cfg(feature = "programs")]
mod table;
mod terms;
mod text;
mod token;

/// What the programs take on their command lines, for the tests of manuals and completions.
#[cfg(feature = "programs")]
#[doc(hidden)]
pub mod command_lines {
    pub use crate::cli::rows::{CommandRow, Feature, Form, Program, Row, Times};
    pub use crate::cli::rows::{CLUSTER, OF_ALL, TLS};
    pub use crate::{latch::SELF as LATCH, latchd::SELF as LATCHD};
    pub use crate::{lfpd::SELF as LFPD, sema::SELF as SEMA};
}

#[cfg(feature = "programs")]
#[doc(hidden)]
pub use crate::{
    latch::main as latch_main, latchd::main as latchd_main, lfpd::main as lfpd_main,
    sema::main as sema_main,
};
