//! The end of the command: by the loss of its lock, and what it leaves behind in its group.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::fixture::{as_nobody, has_ended, Lock, Stray, Wrapper, LONG, SHORT, WAIT};
use crate::support::amount::amount;
use crate::support::group::is_empty;
use crate::support::latch::is_gone;
use crate::support::needs::needs;
use crate::support::{eventually, PATIENCE};
use crate::wrapper::{GONE, LOST};
use rustix::process::Signal;

crate::tests![
    a_loss_ends_a_stopped_command,
    a_loss_ends_a_command_that_stops_itself_then,
    a_loss_kills_a_command_that_ignores_sigterm,
    the_longest_time_before_sigkill_works,
    a_daemon_has_time_to_leave_the_group,
    what_leaves_the_group_frees_the_lock_soon,
    leftovers_end_after_a_second_and_are_counted,
    leftovers_that_ignore_sigterm_are_killed,
    a_loss_ends_leftovers_at_once,
    wait_holds_the_lock_until_the_group_is_empty,
    wait_passes_signals_on_to_the_leftovers,
    leave_lets_the_rest_go_on_after_a_second_and_says_so,
    leave_holds_the_lock_until_the_group_is_empty,
    leave_ends_the_rest_of_a_command_ended_by_a_signal,
    leave_ends_the_rest_if_an_ending_signal_was_passed_on,
    a_process_of_another_user_in_the_group_keeps_the_lock,
    an_unreaped_zombie_does_not_hold_the_lock,
    an_inherited_lock_is_held_by_what_is_left,
    of_many_runs_none_leaves_a_process_in_the_group,
];

fn a_loss_ends_a_stopped_command() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    wrapper.wait_for_the_stop_of_the_command();
    wrapper.lose();
    assert_eq!(wrapper.status(), i32::from(LOST));
}

fn a_loss_ends_a_command_that_stops_itself_then() {
    for signal in ["STOP", "TSTP"] {
        let script =
            format!("trap 'kill -{signal} $$; exit 3' TERM; $READY; while :; do sleep 0.02; done");
        let mut wrapper = Wrapper::script("end", LONG, &script);
        wrapper.lose();
        assert_eq!(wrapper.status(), i32::from(LOST));
    }
}

fn a_loss_kills_a_command_that_ignores_sigterm() {
    for kill_after in ["0", SHORT] {
        let script = "trap '' TERM; $READY; while :; do sleep 0.1; done";
        let mut wrapper = Wrapper::script("end", kill_after, script);
        wrapper.lose();
        assert_eq!(wrapper.status(), i32::from(LOST));
        assert!(is_empty(wrapper.command()));
    }
}

fn the_longest_time_before_sigkill_works() {
    let mut wrapper = Wrapper::script("end", "inf", "$READY; exec sleep 60");
    wrapper.lose();
    assert_eq!(wrapper.status(), i32::from(LOST));
}

fn a_daemon_has_time_to_leave_the_group() {
    let daemon =
        "sleep 0.05; exec setsid sh -c 'echo $$ >$DIR/new; mv $DIR/new $DIR/daemon; exec sleep 60'";
    let mut wrapper = Wrapper::script("end", LONG, &format!("$READY; ({daemon}) & exit 3"));
    assert_eq!(wrapper.status(), 3);
    let daemon = Stray(wrapper.number("daemon"));
    assert!(!has_ended(daemon.0));
    assert_eq!(wrapper.said(), "");
}

fn what_leaves_the_group_frees_the_lock_soon() {
    let daemon = format!(
        "{WAIT}; exec setsid sh -c 'echo $$ >$DIR/new; mv $DIR/new $DIR/daemon; exec sleep 60'"
    );
    let mut wrapper = Wrapper::script("wait", LONG, &format!("$READY; ({daemon}) & exit 3"));
    wrapper.wait_for_the_end_of_the_command();
    assert!(wrapper.is_locked());
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 3);
    let daemon = Stray(wrapper.number("daemon"));
    assert!(!has_ended(daemon.0));
}

fn leftovers_end_after_a_second_and_are_counted() {
    let began = Instant::now();
    let mut wrapper = Wrapper::script("end", LONG, "$READY; sleep 60 & sleep 60 & exit 3");
    assert_eq!(wrapper.status(), 3);
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(is_empty(wrapper.command()));
    let expected =
        "latch: the command left 2 processes in its group: ending them; see --leftovers\n";
    assert_eq!(wrapper.said(), expected);
}

fn leftovers_that_ignore_sigterm_are_killed() {
    let script = "(trap '' TERM; echo $$ >$DIR/left; exec sleep 60) & until [ -s $DIR/left ]; do sleep 0.02; done; $READY; exit 3";
    let mut wrapper = Wrapper::script("end", SHORT, script);
    assert_eq!(wrapper.status(), 3);
    assert!(is_empty(wrapper.command()));
}

fn a_loss_ends_leftovers_at_once() {
    for leftovers in ["wait", "leave"] {
        let mut wrapper = Wrapper::script(leftovers, LONG, "$READY; sleep 60 & exit 3");
        wrapper.wait_for_the_end_of_the_command();
        wrapper.lose();
        assert_eq!(wrapper.status(), i32::from(LOST), "{leftovers}");
        assert!(is_empty(wrapper.command()), "{leftovers}");
    }
}

fn wait_holds_the_lock_until_the_group_is_empty() {
    let script = format!("$READY; ({WAIT}) & exit 3");
    let mut wrapper = Wrapper::script("wait", LONG, &script);
    wrapper.wait_for_the_end_of_the_command();
    // With `end`, the leftovers of a command that ended later are at an end by now.
    let mut ended = Wrapper::script("end", LONG, &script);
    assert_eq!(ended.status(), 3);
    assert!(is_empty(ended.command()));
    assert!(wrapper.is_locked());
    assert!(!is_empty(wrapper.command()));
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 3);
    assert_eq!(wrapper.said(), "");
}

fn wait_passes_signals_on_to_the_leftovers() {
    let mut wrapper = Wrapper::script("wait", LONG, "$READY; sleep 60 & exit 3");
    wrapper.wait_for_the_end_of_the_command();
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 3);
    assert!(is_empty(wrapper.command()));
}

fn leave_lets_the_rest_go_on_after_a_second_and_says_so() {
    let began = Instant::now();
    let mut wrapper = Wrapper::script("leave", LONG, "$READY; sleep 60 & exit 3");
    assert_eq!(wrapper.status(), 3);
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(!wrapper.is_locked());
    assert!(!is_empty(wrapper.command()), "it goes on");
    let expected = "latch: 1 process goes on without the lock; see --leftovers\n";
    assert_eq!(wrapper.said(), expected);
}

/// As at the end of `> >(tee log)`.
fn leave_holds_the_lock_until_the_group_is_empty() {
    let script = format!("$READY; ({WAIT}; : >$DIR/worked) & exit 3");
    let mut wrapper = Wrapper::script("leave", LONG, &script);
    wrapper.wait_for_the_end_of_the_command();
    assert!(wrapper.is_locked());
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 3);
    assert!(wrapper.file("worked").exists());
    assert_eq!(wrapper.said(), "");
}

fn leave_ends_the_rest_of_a_command_ended_by_a_signal() {
    let mut wrapper = Wrapper::script("leave", LONG, "$READY; sleep 60 & kill -KILL $$");
    assert_eq!(wrapper.status(), 137);
    assert!(is_empty(wrapper.command()));
    assert!(wrapper.said().contains("ending them"), "{}", wrapper.said());
}

fn leave_ends_the_rest_if_an_ending_signal_was_passed_on() {
    let left = "(trap '' TERM USR1; echo $$ >$DIR/left; exec sleep 60) &";
    for (sent, is_ended) in [(Signal::TERM, true), (Signal::USR1, false)] {
        let number = sent.as_raw();
        let script = format!(
            "trap 'exit 4' {number}; {left} until [ -s $DIR/left ]; do sleep 0.02; done
             $READY; while :; do sleep 0.02; done"
        );
        let mut wrapper = Wrapper::script("leave", SHORT, &script);
        wrapper.signal(sent);
        assert_eq!(wrapper.status(), 4, "{sent:?}");
        assert_eq!(is_empty(wrapper.command()), is_ended, "{sent:?}");
    }
}

fn a_process_of_another_user_in_the_group_keeps_the_lock() {
    needs!(root);
    let script = format!(
        "LEFTOVERS=end KILL_AFTER=0.1 exec {} $DIR/bin/under sh -c '$READY; {WAIT}; exit 1'",
        as_nobody()
    );
    let mut wrapper = Wrapper::shell(Lock::for_all(), &script);
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

fn an_unreaped_zombie_does_not_hold_the_lock() {
    needs!("python3");
    // The parent of the zombie leaves the group and never reaps it.
    let stray = "import os, time
dead = os.fork()
if dead == 0: os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
os.setsid()
with open('new', 'w') as file: file.write(str(os.getpid()))
os.rename('new', 'stray')
time.sleep(60)";
    let script = format!(
        "KILL_AFTER=1 exec under sh -c 'python3 -c \"{stray}\" & \
         until [ -e stray ]; do sleep 0.02; done; exit 4'",
        stray = stray.replace('\'', "\\\"")
    );
    let mut wrapper = Wrapper::shell(Lock::new(), &script);
    let stray = Stray(wrapper.number("stray"));
    assert_eq!(wrapper.status(), 4);
    assert!(!has_ended(stray.0));
}

/// The lock file of `sema run` stays locked after the end of sema.
fn an_inherited_lock_is_held_by_what_is_left() {
    let script = format!("INHERIT=1 exec under sh -c 'trap \"\" TERM; $READY; {WAIT}'");
    let mut wrapper = Wrapper::shell(Lock::new(), &script);
    wrapper.signal(Signal::KILL);
    assert_eq!(wrapper.status(), 137);
    assert!(wrapper.is_locked() && !has_ended(wrapper.command()));
    wrapper.touch("go");
    wrapper.wait_for_the_end_of_the_command();
    assert!(!wrapper.is_locked());
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
    let mut wrapper = Wrapper::script("end", SHORT, &script);
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
