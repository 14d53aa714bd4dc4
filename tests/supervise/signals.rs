//! Signals and stops: of the wrapper while it waits, and of the command.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use rustix::process::{kill_process, Signal};
use rustix_libc_wrappers::process::SignalExt;

use crate::fixture::{at_once, has_stopped, Lock, Wrapper, LONG, WAIT};
use crate::support::latch::{init_of, is_gone, process_1, shell_status, wait_as_shell, Latch};
use crate::support::needs::needs;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{children_of, eventually, PATIENCE};
use crate::wrapper::{ASKED, GONE, LOST, SILENT};

crate::tests![
    every_signal_reaches_each_process_of_the_group_once,
    a_stop_that_is_sent_twice_reaches_the_command_once,
    a_queued_signal_reaches_the_command_once,
    every_signal_is_passed_on_after_the_lock_is_lost,
    a_command_that_has_left_its_group_gets_the_signals,
    the_wrapper_dies_of_the_signal_that_ended_its_command,
    the_wrapper_dies_of_a_signal_while_it_waits,
    a_wait_outlives_a_signal_that_ends_nothing_and_a_stop,
    a_signal_that_is_ignored_at_the_start_stays_ignored,
    signals_that_were_blocked_at_the_start_are_handled,
    without_job_control_the_command_is_not_stopped,
    a_stop_of_the_command_stops_the_wrapper_until_it_is_held,
    a_stopped_command_does_not_stop_the_wrapper,
    sigcont_to_the_wrapper_continues_its_command,
    a_stop_of_the_wrapper_takes_effect_beside_a_stopped_command,
    a_signal_ends_a_command_whose_lock_is_not_confirmed,
    a_command_continued_alone_goes_on,
    a_command_continued_alone_stops_with_the_wrapper_again,
    a_stop_that_was_not_typed_spares_the_rest_of_the_job,
    as_process_1_it_reaps_while_it_waits_for_the_lock,
    as_process_1_it_passes_the_status_on_and_reaps_orphans,
    as_process_1_it_handles_signals_and_does_not_stop,
];

/// The usual signals that end a wait and are passed on.
const USUAL: [Signal; 7] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
];

/// All kinds of them: a rare one and a real-time one, too.
fn ending() -> Vec<Signal> {
    let real_time = Signal::rt(2).expect("a real-time signal");
    [&USUAL[..], &[Signal::POWER, real_time]].concat()
}

/// The status of a wrapper that has died of a usual signal, or has ended as if it had.
fn status_of(sent: Signal, ended: ExitStatus) -> Option<i32> {
    assert_eq!(ended.signal().is_some(), USUAL.contains(&sent), "{sent:?}");
    shell_status(ended)
}

fn every_signal_reaches_each_process_of_the_group_once() {
    let signals = [&ending()[..], &[Signal::WINCH]].concat();
    at_once(&signals, |sent| {
        let number = sent.as_raw();
        let inner = format!(
            "trap \"echo inner >>$DIR/log; exit 0\" {number}; $READY; while :; do sleep 0.02; done"
        );
        // What comes twice comes during the pause.
        let script =
            format!("trap 'echo outer >>$DIR/log' {number}; sh -c '{inner}'; sleep 0.1; exit 5");
        let mut wrapper = Wrapper::script("end", LONG, &script);
        wrapper.signal(sent);
        assert_eq!(wrapper.status(), 5, "{sent:?}");
        let mut lines = wrapper.lines("log");
        lines.sort();
        assert_eq!(lines, ["inner", "outer"], "{sent:?}");
    });
}

/// By timeout(1), which signals its child and its group, for instance.
fn a_stop_that_is_sent_twice_reaches_the_command_once() {
    let stops = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    at_once(&stops, |sent| fair_test(|| send_twice(sent)));
}

fn send_twice(sent: Signal) {
    let number = sent.as_raw();
    let script = format!("trap 'echo got >>$DIR/log' {number}; $READY; {WAIT}; exit 5");
    let mut wrapper = Wrapper::script("end", LONG, &script);
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

/// The system counts a real-time signal as often as it was sent.
fn a_queued_signal_reaches_the_command_once() {
    needs!("python3");
    let [counted, last] = [2, 3].map(|nth| Signal::rt(nth).expect("a real-time signal").as_raw());
    let count = format!(
        "import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [{counted}, {last}])
os.system(os.environ[\\\"READY\\\"])
signal.sigwaitinfo([{last}])
count = 0
while signal.sigtimedwait([{counted}], 0): count += 1
os._exit(count)"
    );
    let mut wrapper = Wrapper::shell(Lock::new(), &format!("exec under python3 -c \"{count}\""));
    wrapper.number("ready");
    for sent in [counted, last] {
        wrapper.signal(Signal::from_raw(sent).expect("a signal"));
    }
    assert_eq!(wrapper.status(), 1);
}

fn every_signal_is_passed_on_after_the_lock_is_lost() {
    at_once(&ending(), |sent| {
        let number = sent.as_raw();
        // The first SIGTERM is for the loss of the lock, the second may be the test's.
        let script = format!(
            "trap 'echo {number} >>$DIR/log; exit 0' {number}
             trap 'echo 15 >>$DIR/log; n=x$n; [ $n = xx ] && exit 0' TERM
             $READY; while :; do sleep 0.02; done"
        );
        let mut wrapper = Wrapper::script("end", LONG, &script);
        wrapper.lose();
        eventually(PATIENCE, "the command was told to end", || {
            wrapper.lines("log") == ["15"]
        });
        wrapper.signal(sent);
        assert_eq!(wrapper.status(), i32::from(LOST), "{sent:?}");
        assert_eq!(wrapper.lines("log"), ["15", &number.to_string()]);
        assert!(is_gone(wrapper.command()));
    });
}

fn a_command_that_has_left_its_group_gets_the_signals() {
    needs!("python3");
    let leave = "import os, time
os.setpgid(0, os.getpgid(os.getppid()))
os.system(os.environ[\\\"READY\\\"])
time.sleep(60)";
    let mut wrapper = Wrapper::shell(Lock::new(), &format!("exec under python3 -c \"{leave}\""));
    wrapper.number("ready");
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 143);
}

fn the_wrapper_dies_of_the_signal_that_ended_its_command() {
    at_once(&ending(), |sent| {
        let script = "ulimit -c unlimited; exec under sh -c 'ulimit -c 0; $READY; exec sleep 60'";
        let mut wrapper = Wrapper::shell(Lock::new(), script);
        assert!(wrapper.is_locked());
        wrapper.signal(sent);
        let status = wrapper.end();
        assert_eq!(status_of(sent, status), Some(128 + sent.as_raw()));
        assert!(!status.core_dumped(), "{sent:?}");
        assert!(is_gone(wrapper.command()) && !wrapper.is_locked());
    });
}

fn the_wrapper_dies_of_a_signal_while_it_waits() {
    at_once(&ending(), |sent| {
        let script = "ulimit -c 0; exec under touch $DIR/ran";
        let mut wrapper = Wrapper::shell_that_waits(script);
        wrapper.signal(sent);
        assert_eq!(status_of(sent, wrapper.end()), Some(128 + sent.as_raw()));
        assert!(!wrapper.file("ran").exists(), "{sent:?}");
    });
}

fn a_wait_outlives_a_signal_that_ends_nothing_and_a_stop() {
    let mut wrapper = Wrapper::shell_that_waits("exec under sh -c 'exit 4'");
    wrapper.signal(Signal::WINCH);
    wrapper.signal(Signal::TSTP);
    eventually(PATIENCE, "the wrapper has stopped", || {
        has_stopped(wrapper.pid())
    });
    wrapper.signal(Signal::CONT);
    eventually(PATIENCE, "the wrapper goes on", || {
        !has_stopped(wrapper.pid())
    });
    let _granted = wrapper.grant();
    assert_eq!(wrapper.status(), 4);
}

fn a_signal_that_is_ignored_at_the_start_stays_ignored() {
    let script = "trap '' HUP INT TSTP; exec under sh -c '$READY; exec sleep 60'";
    let mut wrapper = Wrapper::shell_that_waits(script);
    // It would stop, and take no grant.
    wrapper.signal(Signal::TSTP);
    let _granted = wrapper.grant();
    let command = wrapper.number("ready");
    // The signals with the lower numbers would take effect first.
    for sent in [Signal::HUP, Signal::INT] {
        kill_process(command, sent).expect("it runs");
        wrapper.signal(sent);
    }
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 143);
}

fn signals_that_were_blocked_at_the_start_are_handled() {
    // The end of a command is a signal, too.
    let mut ends = Wrapper::shell(Lock::new(), "exec env --block-signal under true");
    assert_eq!(ends.status(), 0);
    let script = "exec env --block-signal under sh -c '$READY; exec sleep 60'";
    let mut told_to_end = Wrapper::shell(Lock::new(), script);
    told_to_end.signal(Signal::TERM);
    assert_eq!(told_to_end.status(), 143);
}

fn without_job_control_the_command_is_not_stopped() {
    let status = |script: &str| shell_status(Lock::new().output(script).status);
    let stopped = "setsid -w under sh -c 'kill -TSTP $$; exit 3'";
    assert_eq!(status(stopped), Some(3));
    // It never gets the terminal that it needs.
    let needy = "setsid -w under sh -c 'kill -TTIN $$; exit 3'";
    assert_eq!(status(needy), Some(129));
}

fn a_stop_of_the_command_stops_the_wrapper_until_it_is_held() {
    for (is_held, status, said) in [(true, 0, "on"), (false, i32::from(LOST), "TERM")] {
        let script = "trap 'echo TERM >>$DIR/log; exit 0' TERM; $READY; kill -TSTP $$
                      echo on >>$DIR/log; sleep 0.1";
        let mut wrapper = Wrapper::script("end", LONG, script);
        eventually(PATIENCE, "the wrapper has stopped", || {
            has_stopped(wrapper.pid())
        });
        assert!(has_stopped(wrapper.command()));
        if !is_held {
            wrapper.touch(GONE);
        }
        wrapper.signal(Signal::CONT);
        assert_eq!(wrapper.status(), status);
        assert_eq!(wrapper.lines("log"), [said]);
        assert!(is_gone(wrapper.command()));
    }
}

fn a_stopped_command_does_not_stop_the_wrapper() {
    let mut wrapper = Wrapper::script("end", LONG, &format!("$READY; {WAIT}"));
    kill_process(wrapper.command(), Signal::STOP).expect("it runs");
    wrapper.wait_for_the_stop_of_the_command();
    // The wrapper passes the signal on, and continues the command for it.
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 143);
    assert!(!wrapper.is_locked());
}

fn sigcont_to_the_wrapper_continues_its_command() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    wrapper.wait_for_the_stop_of_the_command();
    assert!(wrapper.is_locked());
    wrapper.signal(Signal::CONT);
    assert_eq!(wrapper.status(), 6);
}

fn a_stop_of_the_wrapper_takes_effect_beside_a_stopped_command() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    wrapper.wait_for_the_stop_of_the_command();
    wrapper.signal(Signal::TSTP);
    eventually(PATIENCE, "the wrapper has stopped", || {
        has_stopped(wrapper.pid())
    });
    wrapper.signal(Signal::CONT);
    assert_eq!(wrapper.status(), 6);
}

fn a_signal_ends_a_command_whose_lock_is_not_confirmed() {
    let script = "trap '' INT; $READY; kill -STOP $$; exec sleep 60";
    let mut wrapper = Wrapper::script("end", LONG, script);
    wrapper.wait_for_the_stop_of_the_command();
    wrapper.touch(SILENT);
    wrapper.signal(Signal::CONT);
    eventually(PATIENCE, "the lock is checked", || {
        wrapper.file(ASKED).exists()
    });
    assert!(has_stopped(wrapper.command()));
    // The command ignores this one, so SIGTERM follows.
    wrapper.signal(Signal::INT);
    assert_eq!(wrapper.status(), 143);
}

fn a_command_continued_alone_goes_on() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    wrapper.wait_for_the_stop_of_the_command();
    assert!(!has_stopped(wrapper.pid()));
    kill_process(wrapper.command(), Signal::CONT).expect("it is there");
    assert_eq!(wrapper.status(), 6);
}

/// It must not run on while the wrapper is stopped and nothing renews its lock.
fn a_command_continued_alone_stops_with_the_wrapper_again() {
    // It starts no process after that: a shell that has just made one by vfork(2) does not stop
    // if that process does.
    let script = "$READY; kill -STOP $$; exec sleep 60";
    let mut wrapper = Wrapper::script("end", LONG, script);
    wrapper.wait_for_the_stop_of_the_command();
    kill_process(wrapper.command(), Signal::CONT).expect("it is there");
    wrapper.signal(Signal::TSTP);
    eventually(PATIENCE, "the wrapper has stopped", || {
        has_stopped(wrapper.pid())
    });
    assert!(has_stopped(wrapper.command()));
    wrapper.signal(Signal::CONT);
    eventually(PATIENCE, "the command goes on", || {
        !has_stopped(wrapper.command())
    });
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 143);
}

/// The terminal sends its SIGTSTP to all of a job, and anybody else to one process.
fn a_stop_that_was_not_typed_spares_the_rest_of_the_job() {
    let script = "trap 'echo told >>$DIR/log' TSTP
                  under sh -c '$READY; kill -TSTP $$; exit 6'
                  exit $?";
    let mut shell = Wrapper::shell(Lock::new(), script);
    let children = children_of(shell.pid().as_raw_nonzero().get().unsigned_abs());
    let [wrapper] = children[..] else {
        panic!("{children:?}");
    };
    eventually(PATIENCE, "the wrapper has stopped", || has_stopped(wrapper));
    kill_process(wrapper, Signal::CONT).expect("it is there");
    assert_eq!(shell.status(), 6);
    assert_eq!(shell.lines("log"), [""; 0]);
}

/// `unshare`, which runs a script as process 1 of a namespace; `None` if the system allows none.
fn as_process_1(lock: &Lock, script: &str) -> Option<Command> {
    let mut command = process_1(&[])?;
    command.envs(lock.variables()).args(["sh", "-c", script]);
    Some(command)
}

fn as_process_1_it_reaps_while_it_waits_for_the_lock() {
    let lock = Lock::new().held();
    // The shell starts a child, and then becomes the wrapper.
    let script = format!("{WAIT} & exec under sh -c 'exit 7'");
    let Some(mut command) = as_process_1(&lock, &script) else {
        return;
    };
    let mut unshare = Latch::start(&mut command);
    lock.wait_for_waiter();
    let init = init_of(&unshare).as_raw_nonzero().get().unsigned_abs();
    assert_eq!(children_of(init).len(), 1, "the orphan");
    lock.touch("go");
    eventually(PATIENCE, "the orphan is reaped", || {
        children_of(init).is_empty()
    });
    let _granted = lock.grant();
    assert_eq!(wait_as_shell(&mut unshare), Some(7));
}

fn as_process_1_it_passes_the_status_on_and_reaps_orphans() {
    let lock = Lock::new();
    // Each orphan waits until it has the wrapper as its parent, and ends.
    let orphan = "until [ $(cut -d \" \" -f 4 /proc/$$/stat) = 1 ]; do sleep 0.02; done";
    let script = format!(
        "for i in 1 2 3 4 5 6 7 8; do (setsid sh -c '{orphan}; : >$DIR/$0' $i &); done
         until [ -e $DIR/1 -a -e $DIR/2 -a -e $DIR/3 -a -e $DIR/4 -a -e $DIR/5 -a -e $DIR/6 \
                 -a -e $DIR/7 -a -e $DIR/8 ]; do sleep 0.02; done
         for try in $(seq 1000); do
             set -- /proc/[0-9]*
             test $# -le 3 && ! grep -q '^State:.Z' /proc/[0-9]*/status 2>/dev/null && exit 9
             sleep 0.02
         done
         exit 8"
    );
    fs::write(lock.file("script"), script).expect("a file");
    let Some(mut command) = as_process_1(&lock, "exec under sh $DIR/script") else {
        return;
    };
    assert_eq!(wait_as_shell(&mut Latch::start(&mut command)), Some(9));
}

fn as_process_1_it_handles_signals_and_does_not_stop() {
    let under = "exec under sh -c 'ulimit -c 0; eval \"$READY\"; exec sleep 60'";
    for sent in ending() {
        let lock = Lock::new();
        let Some(mut command) = as_process_1(&lock, under) else {
            return;
        };
        let mut unshare = Latch::start(&mut command);
        lock.number("ready");
        kill_process(init_of(&unshare), sent).expect("it runs");
        let status = wait_as_shell(&mut unshare);
        assert_eq!(status, Some(128 + sent.as_raw()));
    }
    let lock = Lock::new();
    let stopped = as_process_1(&lock, "exec under sh -c 'kill -TSTP $$; exit 6'");
    let mut stopped = Latch::start(&mut stopped.expect("possible just before"));
    assert_eq!(wait_as_shell(&mut stopped), Some(6));
}
