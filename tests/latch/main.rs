//! The command `latch` and the client library.

#[path = "../support/mod.rs"]
mod support;

mod adoption;
mod callbacks;
mod client;
mod commands;
mod conversations;
mod cut_off;
mod history;
mod hold;
mod keeping;
mod longest_hold;
mod names;
mod numbers;
mod operators;
mod reconnecting;
mod restarts;
mod run;
mod settling;
mod terminal;
mod together;
mod waiting;
mod weights;
