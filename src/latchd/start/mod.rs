//! What the server does before it serves: its options, what they mean together, and what this host
//! allows.

pub mod capacity;
pub mod fences;
pub mod host_memory;
pub mod listen_host;
pub mod options;
pub mod serve;
pub mod settings;
pub mod startup_warnings;
#[cfg_attr(not(feature = "tls"), path = "tls/absent.rs")]
pub mod tls;
