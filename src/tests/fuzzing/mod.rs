//! The fuzz targets. Each function takes any bytes, and panics if the code breaks a promise.
//!
//! `fuzz/` has a cargo-fuzz target for each function:
//!
//!     cd fuzz && RUSTC_BOOTSTRAP=1 cargo fuzz run -s none request
//!
//! Every test run calls the functions with random inputs. This command uses more inputs:
//!
//!     LATCHD_TEST_INPUTS=10000000 CARGO_PROFILE_TEST_OPT_LEVEL=3 \
//!         cargo test --target-dir target/fuzzing --lib fuzzing -- --nocapture

mod files;
#[cfg(test)]
mod inputs;
#[cfg(test)]
mod tests;
mod wire;

pub use crate::latchd::http::pieces::{http_body, http_request};
pub use crate::latchd::line::connection::pieces::opening;
pub use crate::latchd::table::tests::histories::play_choices as table;
pub use files::{fence_file, lock_file_record, state_file, uucp_record};
pub use wire::{lfp_command, lines, reply, request};
