//! The time in front of a log line.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS_OF_DAY: u64 = 86_400;

/// The days of four centuries, of one, and of four years, as the Gregorian calendar has them.
const DAYS_OF_400_YEARS: u64 = 146_097;
const DAYS_OF_100_YEARS: u64 = 36_524;
const DAYS_OF_4_YEARS: u64 = 1461;

/// From 1 March of the year 0, with which four centuries begin, to 1 January 1970. A year that
/// begins in March has its leap day at its end.
const EPOCH: u64 = 719_468;

/// A time as ISO 8601 has it, in UTC and whole seconds. A time before 1970 is shown as 1970.
pub(super) struct Utc(pub(super) SystemTime);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since_epoch = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (days, seconds) = (
            since_epoch.as_secs() / SECONDS_OF_DAY,
            since_epoch.as_secs() % SECONDS_OF_DAY,
        );
        let (year, month, day) = date(days);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"
        )
    }
}

/// The year, month and day that begin so many days after 1 January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + EPOCH;
    let (periods, days) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    // The last century, and the last year, of a period are a day longer than the others.
    let centuries = (days / DAYS_OF_100_YEARS).min(3);
    let days = days - centuries * DAYS_OF_100_YEARS;
    let (fours, days) = (days / DAYS_OF_4_YEARS, days % DAYS_OF_4_YEARS);
    let years = (days / 365).min(3);
    let day_of_year = days - years * 365;
    // Five months from March, and five from August, have 153 days each.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let year = 400 * periods + 100 * centuries + 4 * fours + years;
    match month_from_march {
        0..=9 => (year, month_from_march + 3, day),
        _ => (year + 1, month_from_march - 9, day),
    }
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
