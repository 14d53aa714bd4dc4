//! What a conversation does not say: times, many runs at a time, and other users.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::fixture::{as_nobody, Lock, Wrapper};
use crate::support::amount::amount;
use crate::support::group::is_empty;
use crate::support::latch::is_gone;
use crate::support::needs::needs;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, PATIENCE};
use crate::wrapper::{GONE, LOST};

crate::tests![
    a_stop_that_is_sent_twice_reaches_the_command_once,
    a_process_of_another_user_in_the_group_keeps_the_lock,
    of_many_runs_none_leaves_a_process_in_the_group,
];

/// By timeout(1), which signals its child and its group, for instance.
fn a_stop_that_is_sent_twice_reaches_the_command_once() {
    let stops = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    thread::scope(|scope| {
        for sent in stops {
            scope.spawn(move || fair_test(|| send_twice(sent)));
        }
    });
}

fn send_twice(sent: Signal) {
    let number = sent.as_raw();
    let script = format!("trap 'echo got >>$DIR/log' {number}; $READY; $WAIT; exit 5");
    let mut wrapper = Wrapper::script(Lock::new().into(), "end", &script);
    wrapper.signal(sent);
    // Signals that arrive together are one to the system.
    thread::sleep(Duration::from_millis(5));
    wrapper.signal(sent);
    thread::sleep(Duration::from_millis(100));
    in_time!(wrapper.lines("log").len() == 1, "{sent:?}");
    wrapper.signal(sent);
    eventually(PATIENCE, "a later one is passed on", || {
        wrapper.lines("log").len() == 2
    });
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 5, "{sent:?}");
}

fn a_process_of_another_user_in_the_group_keeps_the_lock() {
    needs!(root);
    let script = format!(
        "LEFTOVERS=end KILL_AFTER=0.1 exec {} $DIR/bin/under sh -c '$READY; $WAIT; exit 1'",
        as_nobody()
    );
    let mut wrapper = Wrapper::shell(Lock::for_all().into(), &script);
    let mut sleep = Command::new("sleep");
    let group = wrapper.command().as_raw_nonzero().get();
    let other = sleep.arg("60").process_group(group).spawn();
    let mut other = other.expect("sleep");
    wrapper.touch("go");
    // It may not send that process a signal.
    eventually(PATIENCE, "it tells the leftovers to end", || {
        wrapper.said().contains("see --leftovers")
    });
    let was_kept = wrapper.is_locked();
    let _ = other.kill();
    let _ = other.wait();
    assert!(was_kept, "the lock was released before its end");
    assert_eq!(wrapper.status(), 1);
}

fn of_many_runs_none_leaves_a_process_in_the_group() {
    let next = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    number if number < amount(20, 1000) => leave_nothing(number),
                    _ => break,
                }
            });
        }
    });
}

/// The command starts a process that ignores SIGTERM. Of ten commands, one loses its lock, one
/// while the wrapper is stopped, and one has its wrapper killed; the others end by themselves.
fn leave_nothing(number: u32) {
    let left = "(trap '' TERM; echo $$ >$DIR/left; exec sleep 60) &";
    let (end, expected) = match number % 10 {
        0 | 1 => ("exec sleep 60", i32::from(LOST)),
        2 => ("exec sleep 60", 137),
        _ => ("exit 3", 3),
    };
    let script = format!("{left} until [ -s $DIR/left ]; do sleep 0.02; done; $READY; {end}");
    let mut wrapper = Wrapper::script(Lock::new().into(), "end/0.3", &script);
    match number % 10 {
        0 => wrapper.lose(),
        1 => {
            wrapper.signal(Signal::STOP);
            wrapper.touch(GONE);
            wrapper.signal(Signal::CONT);
        }
        2 => {
            wrapper.guard();
            wrapper.signal(Signal::KILL);
        }
        _ => {}
    }
    assert_eq!(wrapper.status(), expected, "run {number}");
    if expected == 137 {
        eventually(PATIENCE, "the group is empty", || {
            is_empty(wrapper.command())
        });
    } else {
        assert!(is_gone(wrapper.command()), "run {number}");
        assert!(is_gone(wrapper.number("left")), "run {number}");
    }
}
