//! Several servers as one service, on a real etcd.

#[path = "../support/mod.rs"]
mod support;

mod house;
mod takeover;
