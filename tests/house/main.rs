//! The house itself: layers, manual pages, README, completions and examples.

#[path = "../support/mod.rs"]
mod support;

mod clients;
mod completions;
mod examples;
mod install;
mod layering;
mod library;
mod manual;
mod monitoring;
mod ports;
mod promises;
mod prose;
mod readme;
mod references;
mod skips;
mod supply;
mod tidy;
mod tunnels;
mod words;
