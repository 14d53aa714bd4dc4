//! Where threads meet, also if one of them fails on its way.

use std::sync::{Condvar, Mutex};

use super::PATIENCE;

/// As that of the standard library, but nobody waits for ever: a test of which one thread has
/// panicked, or could not start, ends with that message.
pub struct Barrier {
    thread_count: usize,
    state: Mutex<State>,
    all_came: Condvar,
}

#[derive(Default)]
struct State {
    came_count: usize,
    meeting: u64,
}

impl Barrier {
    pub fn new(thread_count: usize) -> Barrier {
        Barrier {
            thread_count,
            state: Mutex::default(),
            all_came: Condvar::new(),
        }
    }

    /// Waits until all threads have come. Gives `true` to the last of them. Panics if another one
    /// does not come.
    pub fn wait(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        state.came_count += 1;
        if state.came_count == self.thread_count {
            state.came_count = 0;
            state.meeting += 1;
            self.all_came.notify_all();
            return true;
        }
        let meeting = state.meeting;
        let is_on = |state: &mut State| state.meeting == meeting;
        let waited = self.all_came.wait_timeout_while(state, PATIENCE, is_on);
        // The mutex is free again before this one panics.
        let timed_out = waited.unwrap().1.timed_out();
        assert!(!timed_out, "another thread did not come to the barrier");
        false
    }
}
