//! Instants of a clock that does not stop while this process is stopped or the host is suspended.
//! The server's leases do not stop then, either.

use std::io;
use std::ops::{Add, Sub};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::time::{
    clock_gettime, timerfd_create, timerfd_settime, ClockId, Itimerspec, TimerfdClockId,
    TimerfdFlags, TimerfdTimerFlags,
};

/// The start of 2026, as the time since 1970. A clock that shows an earlier time has never been
/// set.
pub const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// The maximum difference between correct clocks. A time that is further in the future is from a
/// wrong clock.
pub const TOLERANCE: Duration = Duration::from_secs(60);

/// The maximum time to set a timer for. It is short enough that no system's clock overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A point in time by CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// Later than any other moment.
    pub const NEVER: Moment = Moment(Duration::MAX);

    pub fn now() -> Moment {
        let now = clock_gettime(ClockId::Boottime);
        Moment(Duration::try_from(now).expect("no time is before the boot"))
    }

    /// The time from the boot to this moment, including suspends.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// The time since this moment; zero if the moment is in the future.
    pub fn elapsed(self) -> Duration {
        Moment::now().saturating_since(self)
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    pub fn saturating_since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0.saturating_add(time))
    }
}

impl Sub<Duration> for Moment {
    type Output = Moment;

    fn sub(self, time: Duration) -> Moment {
        Moment(self.0.saturating_sub(time))
    }
}

/// A timer whose descriptor can be polled.
///
/// A timeout of poll would not do, because it stops while the process is stopped or the host is
/// suspended.
#[derive(Debug)]
pub struct Alarm(OwnedFd);

impl Alarm {
    pub fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Alarm(timerfd_create(TimerfdClockId::Boottime, flags)?))
    }

    /// Makes the descriptor readable at `moment`, or in a year if that is earlier. Replaces the
    /// previous moment.
    pub fn set(&self, moment: Moment) {
        let Moment(since_boot) = moment.min(Moment::now() + LONGEST);
        let time = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(since_boot).unwrap_or_default(),
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &time)
            .expect("the time is one that the clock knows");
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{poll, PollFd, PollFlags};

    #[test]
    fn an_alarm_is_readable_from_its_moment_until_it_is_set_anew() {
        let alarm = Alarm::new().expect("a descriptor");
        let wait = |timeout: Option<&Timespec>| {
            poll(&mut [PollFd::new(&alarm, PollFlags::IN)], timeout).expect("no signal")
        };
        let rings_at = Moment::now() + Duration::from_millis(20);
        alarm.set(rings_at);
        assert_eq!(wait(None), 1);
        assert!(Moment::now() >= rings_at);
        alarm.set(Moment::NEVER);
        assert_eq!(wait(Some(&Timespec::default())), 0);
    }
}
