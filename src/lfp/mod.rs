//! The Lock File Protocol: lfp-protocol(7).
//!
//! `command` and `reply` are pure functions between lines and values; `session` is the conversation over
//! one connection, `wire` its two descriptors, `peer` who is at the other end, `places` how many of
//! them there may be, and `locks` what is done about the requests. The locks are files, which outlive the connection.

mod command;
mod holders;
mod locks;
mod peer;
mod places;
mod reply;
mod session;
mod socket_user;
mod wire;

pub use holders::{Holders, MAX_HOLDERS};
pub use locks::{LockRules, Locks};
pub use peer::{NotLocal, Peer, PeerRule};
pub use places::Places;
pub use reply::TURNED_AWAY;
pub use session::{serve, SessionRules};
pub use wire::Wire;
