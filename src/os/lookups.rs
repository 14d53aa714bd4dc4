//! Lookups with a deadline. The system's resolver blocks while its name servers do not answer, and
//! the kernel blocks while a file server does not answer. So each lookup runs on a thread that the
//! caller abandons at the deadline.

use std::io;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::event::time_left;

/// The maximum number of lookups of one kind that run at once, each on its own thread. Further
/// callers wait.
const MAX_LOOKUPS: usize = 16;

/// How long an answer that came after the deadline is stored for the caller's next attempt.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// The stack of a lookup thread, in bytes.
const STACK_LEN: usize = 128 * 1024;

/// The pending lookups of one kind. Callers that ask for the same name share a lookup.
pub struct Lookups<Name, Found> {
    find: fn(&Name) -> io::Result<Found>,
    by_name: Mutex<Vec<(Name, Arc<Lookup<Found>>)>>,
    /// Notified whenever a lookup gets its answer.
    answered: Condvar,
}

/// A lookup's answer, with the time at which it arrived.
type Lookup<Found> = OnceLock<(Instant, io::Result<Found>)>;

impl<Name, Found> Lookups<Name, Found>
where
    Name: Clone + Eq + Send,
    Found: Clone + Send + Sync,
{
    /// Creates lookups that call `find`, which may block.
    pub const fn new(find: fn(&Name) -> io::Result<Found>) -> Self {
        Lookups {
            find,
            by_name: Mutex::new(Vec::new()),
            answered: Condvar::new(),
        }
    }

    /// Looks up `name`. Fails with [`io::ErrorKind::TimedOut`] at the deadline.
    pub fn look_up(&'static self, name: &Name, deadline: Instant) -> io::Result<Found> {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ours: Option<Arc<Lookup<Found>>> = None;
        loop {
            if ours.is_none() {
                ours = self.join_or_start(&mut by_name, name)?;
            }
            if let Some((lookup, (_, answer))) = ours.as_ref().and_then(|it| Some((it, it.get()?)))
            {
                // The next caller starts a new lookup. Callers that already wait for this lookup
                // can still read its answer.
                by_name.retain(|(_, it)| !Arc::ptr_eq(it, lookup));
                return match answer {
                    Ok(found) => Ok(found.clone()),
                    Err(error) => Err(match error.raw_os_error() {
                        Some(code) => io::Error::from_raw_os_error(code),
                        None => io::Error::new(error.kind(), error.to_string()),
                    }),
                };
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let waited = self.answered.wait_timeout(by_name, left);
            (by_name, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the lookup of `name`, and starts it if there is none; `None` if too many are
    /// pending.
    fn join_or_start(
        &'static self,
        by_name: &mut Vec<(Name, Arc<Lookup<Found>>)>,
        name: &Name,
    ) -> io::Result<Option<Arc<Lookup<Found>>>> {
        by_name.retain(|(_, lookup)| lookup.get().is_none_or(|(at, _)| at.elapsed() < KEPT_FOR));
        if let Some((_, lookup)) = by_name.iter().find(|(it, _)| it == name) {
            return Ok(Some(Arc::clone(lookup)));
        }
        let under_way = by_name.iter().filter(|(_, lookup)| lookup.get().is_none());
        if under_way.count() >= MAX_LOOKUPS {
            return Ok(None);
        }
        let (lookup, name) = (Arc::new(OnceLock::new()), name.clone());
        let (answer, wanted) = (Arc::clone(&lookup), name.clone());
        thread::Builder::new()
            .name("lookup".into())
            .stack_size(STACK_LEN)
            .spawn(move || {
                let found = (self.find)(&wanted);
                // The mutex is locked while the answer is set. So a caller that has found no answer
                // is already asleep, and gets the notification.
                let _by_name = self.by_name.lock();
                let _ = answer.set((Instant::now(), found));
                self.answered.notify_all();
            })?;
        by_name.push((name, Arc::clone(&lookup)));
        Ok(Some(lookup))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const MOMENT: Duration = Duration::from_millis(10);
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_slow_lookup_is_left_behind_and_its_answer_found_later() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static GO_ON: Mutex<()> = Mutex::new(());
        static SLOW: Lookups<&str, u16> = Lookups::new(|_| {
            COUNT.fetch_add(1, Ordering::SeqCst);
            drop(GO_ON.lock());
            Ok(7)
        });
        let held = GO_ON.lock();
        for _ in 0..3 {
            let error = SLOW.look_up(&"slow", Instant::now() + MOMENT);
            let error = error.expect_err("no answer yet");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        drop(held);
        let found = SLOW.look_up(&"slow", Instant::now() + PATIENCE);
        assert_eq!(found.expect("an answer"), 7);
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        // An answer that has been given is not given again.
        let found = SLOW.look_up(&"slow", Instant::now() + PATIENCE);
        assert_eq!(found.expect("an answer"), 7);
        assert_eq!(COUNT.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn silent_name_servers_cost_a_bounded_number_of_threads() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static GO_ON: Mutex<()> = Mutex::new(());
        static SLOW: Lookups<usize, ()> = Lookups::new(|_| {
            COUNT.fetch_add(1, Ordering::SeqCst);
            drop(GO_ON.lock());
            Ok(())
        });
        let held = GO_ON.lock();
        for number in 0..3 * MAX_LOOKUPS {
            assert!(SLOW.look_up(&number, Instant::now()).is_err());
        }
        drop(held);
        let last = SLOW.look_up(&usize::MAX, Instant::now() + PATIENCE);
        assert!(last.is_ok(), "{last:?}");
        assert!(COUNT.load(Ordering::SeqCst) <= MAX_LOOKUPS + 1);
    }
}
