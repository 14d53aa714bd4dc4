//! Shuttle's mutex, condvar and counter, with the interface of those that the arbiter uses. Every
//! call is a point at which another thread may run.

use std::cell;
use std::ops::{Deref, DerefMut};

use shuttle::sync;
pub use shuttle::sync::atomic::AtomicUsize;

/// A bug that a test plants, to see that it is found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    Nothing,
    /// One wake-up in ten is forgotten.
    ForgottenWakeUp,
    /// A thread decides to sleep, releases the mutex, and only then begins to sleep.
    SleepOutsideMutex,
}

thread_local! {
    /// Shuttle runs all threads of a schedule in one real thread.
    static PLANTED: cell::Cell<Planted> = const { cell::Cell::new(Planted::Nothing) };
}

pub fn plant(bug: Planted) {
    PLANTED.set(bug);
}

fn is_planted(bug: Planted) -> bool {
    PLANTED.get() == bug
}

/// What one connection alone uses, in a test from several threads.
#[derive(Default)]
pub struct Cell<T>(std::sync::Mutex<T>);

impl<T: Default> Cell<T> {
    pub fn set(&self, value: T) {
        *self.0.lock().expect("no panic") = value;
    }

    pub fn take(&self) -> T {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }
}

pub struct Mutex<T>(sync::Mutex<T>);

pub struct MutexGuard<'a, T> {
    mutex: &'a sync::Mutex<T>,
    /// `None` only while the mutex is released.
    guard: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            mutex: &self.0,
            guard: Some(self.0.lock().expect("no panic")),
        }
    }
}

impl<T> MutexGuard<'_, T> {
    pub fn unlocked<R>(guard: &mut Self, act: impl FnOnce() -> R) -> R {
        guard.guard = None;
        let result = act();
        guard.guard = Some(guard.mutex.lock().expect("no panic"));
        result
    }

    pub fn unlocked_fair<R>(guard: &mut Self, act: impl FnOnce() -> R) -> R {
        Self::unlocked(guard, || {
            shuttle::thread::yield_now();
            act()
        })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("the mutex is locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("the mutex is locked")
    }
}

#[derive(Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if is_planted(Planted::SleepOutsideMutex) {
            MutexGuard::unlocked_fair(guard, || ());
        }
        let locked = guard.guard.take().expect("the mutex is locked");
        guard.guard = Some(self.0.wait(locked).expect("no panic"));
    }

    pub fn notify_one(&self) {
        use shuttle::rand::Rng;
        let is_forgotten = is_planted(Planted::ForgottenWakeUp);
        if !(is_forgotten && shuttle::rand::thread_rng().gen_bool(0.1)) {
            self.0.notify_one();
        }
    }
}
