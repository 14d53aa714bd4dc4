//! Limits the rate of log lines that peers can cause.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use log::{log, Level};
use parking_lot::Mutex;

/// The minimum time between two lines of one source.
const THROTTLE: Duration = Duration::from_secs(1);

/// The maximum number of sources that have a line of their own.
const MAX_SOURCES: usize = 64;

/// Lets at most one line per second through for each source, and counts the others, so that a peer
/// cannot flood the log, and the lines of one source do not suppress those of another. When
/// [`MAX_SOURCES`] sources are active, any further sources share their line.
#[derive(Debug, Default)]
pub struct Throttle(Mutex<Sources>);

#[derive(Debug, Default)]
struct Sources {
    known: HashMap<String, Throttled>,
    others: Throttled,
}

#[derive(Debug, Default)]
struct Throttled {
    last: Option<Instant>,
    held_back: u64,
}

impl Throttle {
    /// If a line is allowed now, logs it as a warning, with the number of lines held back since the
    /// previous one.
    pub fn warn(&self, line: fmt::Arguments<'_>) {
        self.log(Level::Warn, line, &());
    }

    /// Logs an error in the same way as [`Throttle::warn`] logs a warning.
    pub fn error(&self, line: fmt::Arguments<'_>) {
        self.log(Level::Error, line, &());
    }

    /// Like [`Throttle::warn`], for a line about `source`.
    pub fn warn_of(&self, line: fmt::Arguments<'_>, source: &dyn fmt::Debug) {
        self.log(Level::Warn, line, source);
    }

    fn log(&self, level: Level, line: fmt::Arguments<'_>, source: &dyn fmt::Debug) {
        if let Some(held_back) = self.admit(source, Instant::now()) {
            log!(level, "{line} held_back={held_back}");
        }
    }

    fn admit(&self, source: &dyn fmt::Debug, now: Instant) -> Option<u64> {
        let (source, mut sources) = (format!("{source:?}"), self.0.lock());
        let Sources { known, others } = &mut *sources;
        if known.len() >= MAX_SOURCES && !known.contains_key(&source) {
            known.retain(|_, throttled| {
                let stays = throttled.is_held_back(now);
                others.held_back += if stays { 0 } else { throttled.held_back };
                stays
            });
            if known.len() >= MAX_SOURCES {
                return others.admit(now);
            }
        }
        known.entry(source).or_default().admit(now)
    }
}

impl Throttled {
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.is_held_back(now) {
            self.held_back += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }

    fn is_held_back(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now - last < THROTTLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_a_second_and_a_count() {
        let mut throttled = Throttled::default();
        let start = Instant::now();
        assert_eq!(throttled.admit(start), Some(0));
        for millis in 1..1000 {
            assert_eq!(throttled.admit(start + Duration::from_millis(millis)), None);
        }
        assert_eq!(throttled.admit(start + THROTTLE), Some(999));
        assert_eq!(throttled.admit(start + 5 * THROTTLE), Some(0));
    }

    #[test]
    fn no_source_hides_another_and_their_number_is_bounded() {
        let throttle = Throttle::default();
        let start = Instant::now();
        let count = MAX_SOURCES as u64;
        for source in 0..count {
            assert_eq!(throttle.admit(&source, start), Some(0), "{source}");
            assert_eq!(throttle.admit(&source, start), None, "{source}");
        }
        assert_eq!(throttle.admit(&count, start), Some(0));
        assert_eq!(throttle.admit(&(count + 1), start), None);
        assert_eq!(throttle.0.lock().known.len(), MAX_SOURCES);
        let later = start + THROTTLE;
        assert_eq!(throttle.admit(&0, later), Some(1));
        assert_eq!(throttle.admit(&1000, later), Some(0));
        let sources = throttle.0.lock();
        assert_eq!(sources.known.len(), 2);
        // One of source `count + 1`, and those of the sources that were forgotten.
        assert_eq!(sources.others.held_back, count);
    }
}
