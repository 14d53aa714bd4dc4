//! The server `lfpd`, alone and beside the programs that it shares devices with.

#[path = "../support/mod.rs"]
mod support;

mod conversations;
mod lfp;
mod programs;
mod protocol;
