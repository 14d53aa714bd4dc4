//! The promises of latchd, proved over real sockets: clients write down what they asked and heard,
//! and a checker decides whether one correct lock table could have answered so.
//!
//! `LATCHD_TEST_FULL` makes many of these tests as large as they are to be before a release:
//!
//! ```text
//! LATCHD_TEST_FULL=1 cargo test --release --test promises -- --test-threads=1 --nocapture
//! ```

#[path = "../support/mod.rs"]
mod support;

mod chaos;
mod clients;
mod crashes;
mod crowds;
mod cuts;
mod ends;
mod http_session;
mod journal;
mod leases;
mod network;
mod noise;
mod place;
mod service;
mod soak;
mod toy;
mod witness;
