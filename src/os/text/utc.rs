//! A point in time, as the programs write it.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS_OF_DAY: u64 = 86_400;

/// A time in ISO 8601 format, in UTC and whole seconds. A time before 1970 is shown as 1970.
pub struct Utc(pub SystemTime);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since_epoch = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since_epoch.as_secs();
        let (year, month, day) = date(seconds / SECONDS_OF_DAY);
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"
        )
    }
}

/// Converts days since 1 January 1970 to a year, month and day.
fn date(mut days: u64) -> (u64, u64, u64) {
    let mut year = 1970;
    while days >= 365 + leap_days(year) {
        days -= 365 + leap_days(year);
        year += 1;
    }
    // December needs no entry: days that are left after November are in December.
    let lengths = [31, 28 + leap_days(year), 31, 30, 31, 30, 31, 31, 30, 31, 30];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

fn leap_days(year: u64) -> u64 {
    u64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_time_is_shown_as_date_does() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(Utc(time).to_string(), text);
        }
        let before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(Utc(before).to_string(), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn each_day_is_the_day_after_the_one_before() {
        let mut last = date(0);
        for days in 1..200_000 {
            let (year, month, day) = date(days);
            let is_next = match day {
                1 if month == 1 => (year, 12, 31) == (last.0 + 1, last.1, last.2),
                1 => last.0 == year && last.1 + 1 == month && (28..=31).contains(&last.2),
                _ => last == (year, month, day - 1),
            };
            assert!(is_next, "{last:?} before {:?}", (year, month, day));
            last = (year, month, day);
        }
    }
}
