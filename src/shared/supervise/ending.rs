//! The end by a signal of a program that runs no command.

use std::io;
use std::process;
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use rustix::process::getpid;
use signal_hook::iterator::Signals;

use crate::os::event::Event;
use crate::os::process::{ignored_signals, is_in};

use super::signals::{Killed, ENDING};
use super::terminal::Foreground;

/// How to undo what the caller does not know about yet. It must not block for long.
pub type Undo = Box<dyn FnOnce() + Send>;

/// Ends this process by a signal that asks it to end. The kernel does that by default, but not for
/// process 1 of a container, and it leaves behind a lock that the caller does not know about yet.
#[derive(Default)]
pub struct EndBySignal {
    /// Set when a signal has arrived; `None` if the kernel handles the signals.
    arrived: Option<Event>,
    /// What to do before the end. The thread that ends this process keeps the mutex locked.
    undo: Arc<Mutex<Option<Undo>>>,
}

impl EndBySignal {
    /// Catches the signals if this is process 1, or if this program `leaves_a_lock` that its caller
    /// must know about. Signals that were ignored at the start stay ignored.
    pub fn watch(leaves_a_lock: bool) -> io::Result<EndBySignal> {
        let mut ending = EndBySignal::default();
        if leaves_a_lock || getpid().is_init() {
            let arrived = Event::new()?;
            let ignored = ignored_signals();
            let caught = ENDING.iter().filter(|signal| !is_in(ignored, **signal));
            let signals = Signals::new(caught)?;
            let (setter, undo) = (arrived.clone(), Arc::clone(&ending.undo));
            thread::Builder::new()
                .name("signals".into())
                .spawn(move || end_at_signal(signals, &setter, &undo))?;
            ending.arrived = Some(arrived);
        }
        Ok(ending)
    }

    /// Set when a signal has arrived; `None` if the kernel handles the signals.
    pub fn arrived(&self) -> Option<&Event> {
        self.arrived.as_ref()
    }

    /// Sets what to do before the end by a signal.
    pub fn undo_by(&self, undo: impl FnOnce() + Send + 'static) {
        *self.undo.lock() = Some(Box::new(undo));
    }

    /// Runs `work`, which may take a lock, and returns soon after a signal has arrived. If it
    /// returns how to undo what it did, that is done before the end by the signal.
    pub fn guard<T>(&self, work: impl FnOnce() -> (T, Option<Undo>)) -> T {
        let mut undo = self.undo.lock();
        let (result, how) = work();
        *undo = how;
        drop(undo);
        while self.arrived.as_ref().is_some_and(Event::is_set) {
            // The other thread is about to end this process.
            thread::park();
        }
        result
    }

    /// Undoes nothing from now on, because the caller knows what was done.
    pub fn caller_knows(&self) {
        self.undo.lock().take();
    }
}

fn end_at_signal(mut signals: Signals, arrived: &Event, undo: &Mutex<Option<Undo>>) {
    let Some(signal) = signals.forever().next() else {
        return;
    };
    arrived.set();
    let mut undo = undo.lock();
    if let Some(undo) = undo.take() {
        undo();
    }
    let foreground = Foreground::Ours;
    process::exit(Killed { signal, foreground }.follow().into())
}
