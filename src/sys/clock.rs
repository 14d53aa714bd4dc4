//! What is known of clocks that may be wrong.

use std::time::Duration;

/// The start of 2026, as the time since 1970. A clock that shows an earlier time has never been
/// set.
pub const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// The maximum difference between correct clocks. A time that is further in the future is from a
/// wrong clock.
pub const TOLERANCE: Duration = Duration::from_secs(60);
