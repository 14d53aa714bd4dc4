//! Deadlines by the clock of [`Instant`].

use std::time::{Duration, Instant};

/// The time left until `deadline`; zero if it has passed.
pub fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
