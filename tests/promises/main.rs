//! The promises of latchd, proved over real sockets: clients write down what they asked and heard,
//! and a checker decides whether one correct lock table could have answered so.

#[path = "../support/mod.rs"]
mod support;

mod chaos;
mod clients;
mod crowds;
mod ends;
mod history;
mod journal;
mod leases;
mod network;
mod noise;
mod place;
mod random;
mod service;
mod soak;
mod toy;
