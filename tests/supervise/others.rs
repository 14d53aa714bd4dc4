//! What a conversation does not say: many runs at a time, other users, and process 1.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{kill_process, Signal};

use crate::conversations::signal;
use crate::fixture::{as_nobody, script_of, Lock, Wrapper};
use crate::support::amount::amount;
use crate::support::group::is_empty;
use crate::support::latch::{init_of, is_gone, process_1, wait_as_shell, Latch};
use crate::support::needs::needs;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{children_of, eventually, PATIENCE};
use crate::wrapper::{GONE, LOST, WAITING};

crate::tests![
    a_stop_that_is_sent_twice_reaches_the_command_once,
    as_process_1_it_reaps_while_it_waits_for_the_lock,
    as_process_1_it_passes_the_status_on_and_reaps_orphans,
    as_process_1_it_handles_signals_and_does_not_stop,
    a_process_of_another_user_in_the_group_keeps_the_lock,
    of_many_runs_none_leaves_a_process_in_the_group,
    the_guard_has_nothing_of_the_job,
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

/// `unshare`, which runs a script as process 1 of a namespace; `None` if the system allows none.
fn as_process_1(lock: &Lock, script: &str) -> Option<Command> {
    let mut command = process_1(&[])?;
    command.envs(lock.variables()).args(["sh", "-c", script]);
    Some(command)
}

fn as_process_1_it_reaps_while_it_waits_for_the_lock() {
    let lock = Lock::new();
    lock.hold();
    // The shell starts a child, and then becomes the wrapper.
    let script = script_of("$WAIT & exec under sh -c 'exit 7'");
    let Some(mut command) = as_process_1(&lock, &script) else {
        return;
    };
    let mut unshare = Latch::start(&mut command);
    eventually(PATIENCE, "the wrapper waits", || {
        lock.file(WAITING).exists()
    });
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
    for sent in "TERM INT HUP QUIT USR1 USR2 ALRM PWR 37"
        .split(' ')
        .map(signal)
    {
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

fn the_guard_has_nothing_of_the_job() {
    let wrapper = Wrapper::script(Lock::new().into(), "end", "$READY; sleep 60");
    let guard = wrapper.guard().as_raw_nonzero();
    let read = |name: &str| {
        let mut text = Vec::new();
        let file = File::open(format!("/proc/{guard}/{name}"));
        file.expect("it runs").read_to_end(&mut text).expect("text");
        String::from_utf8_lossy(&text).into_owned()
    };
    assert_eq!(read("environ"), "");
    assert!(
        read("cmdline").starts_with("latch-guard\0"),
        "{}",
        read("cmdline")
    );
    let at = |name: &str| fs::read_link(format!("/proc/{guard}/{name}")).expect("a link");
    assert_eq!(at("cwd"), Path::new("/"));
    for fd in fs::read_dir(format!("/proc/{guard}/fd")).expect("it runs") {
        let fd = fd.expect("an entry").file_name();
        let to = at(&format!("fd/{}", fd.to_str().expect("a number")));
        let to = to.to_str().expect("text");
        assert!(
            to.starts_with("pipe:") || to.starts_with("anon_inode:[pidfd"),
            "{to}"
        );
    }
    let status = read("status");
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let blocked = line("SigBlk:").expect("a mask").trim();
    // All but SIGKILL and SIGSTOP, and the two signals that the C library keeps to itself.
    let blocked = u64::from_str_radix(blocked, 16).expect("hexadecimal");
    assert_eq!(blocked & 0x7ffb_feff, 0x7ffb_feff, "{blocked:x}");
    assert_eq!(line("NSsid:").map(str::trim), Some(&*guard.to_string()));
}
