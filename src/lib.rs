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

#![forbid(unsafe_code)]
// What nobody uses is found in the build with all features: each other build uses only parts of
// many modules.
#![cfg_attr(
    not(all(feature = "programs", feature = "tls", feature = "cluster")),
    allow(dead_code, unused_imports)
)]

pub mod client;
#[cfg(all(feature = "programs", any(test, fuzzing)))]
#[doc(hidden)]
#[path = "tests/fuzzing/mod.rs"]
pub mod fuzzing;
#[cfg(feature = "programs")]
mod latch;
#[cfg(feature = "programs")]
mod latchd;
#[cfg(feature = "programs")]
mod lfpd;
pub mod lockfile;
mod os;
#[cfg(feature = "programs")]
mod sema;
#[cfg(feature = "programs")]
#[doc(hidden)] // for the tests of a command under a lock
pub mod shared;
mod wire;

/// What the programs take on their command lines, for the tests of manuals and completions.
#[cfg(feature = "programs")]
#[doc(hidden)]
pub mod command_lines {
    pub use crate::shared::cli::rows::{CommandRow, Feature, Form, Program, Row, Times};
    pub use crate::shared::cli::rows::{CLUSTER, OF_ALL, TLS};
    pub use crate::shared::cli::words::foreign;
    pub use crate::{latch::SELF as LATCH, latchd::SELF as LATCHD};
    pub use crate::{lfpd::SELF as LFPD, sema::SELF as SEMA};
}

#[cfg(feature = "programs")]
#[doc(hidden)]
pub use crate::{
    latch::main as latch_main, latchd::main as latchd_main, lfpd::main as lfpd_main,
    sema::main as sema_main,
};

#[cfg(feature = "programs")]
#[doc(hidden)]
pub use shared::supervise;
