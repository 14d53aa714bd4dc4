//! A command at a terminal: it reads it, Ctrl-C and Ctrl-Z reach it, `fg` and `bg` work, and the
//! shell has its terminal back afterwards.
//!
//! The tests are conversations with a shell, a step a line:
//!
//! - `> TEXT` types a line, and `: TEXT` types a line for the shell after a job has stopped;
//! - `< TEXT` waits until the terminal shows it, after what was shown before;
//! - `^C`, `^D`, `^Z` press these keys;
//! - `prompt` waits for the shell's prompt;
//! - `$ STATUS` waits for it, compares the last exit status, and waits until the
//!   lock is free;
//! - `stopped` waits for the prompt, and until all that the shell has started has stopped;
//! - `Stopped` asks the shell for its jobs until one has stopped;
//! - `terminal`, `no terminal`: whether the group of the process in `ready` has the terminal;
//! - `stops` waits until the process in `ready` has stopped;
//! - `? FILE` waits for a file, and `! FILE` writes to a named pipe that something reads;
//! - `held`, `grant`, `lose` and `touch FILE` do to the lock what their names say;
//! - `never TEXT`: since the last key, the terminal has not shown this.

use std::fs::{self, File};

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;

use crate::fixture::{has_stopped, Lock};
use crate::support::needs::needs;
use crate::support::terminal::{at_each_shell, Terminal, CTRL_C, CTRL_D, CTRL_Z, PROMPT, SAY};
use crate::support::{children_of, eventually, stat_of, PATIENCE};

/// A test: its name, the job that takes the place of `JOB` in each of its rounds, with the status
/// for `STATUS`, and the conversation.
type Conversation = (
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static str,
);

const CONVERSATIONS: &[Conversation] = &[
    (
        "ctrl_c_ends_a_loop_or_a_script_around_the_wrapper",
        &[
            ("for i in 1 2 3; do under $SAY; echo after:$((i * 7)); done", ""),
            ("bash -c 'for i in 1 2 3; do under $SAY; echo after:$((i * 7)); done; echo after:'", ""),
            ("dash -c 'for i in 1 2 3; do under $SAY; echo after:$((i * 7)); done; echo after:'", ""),
            ("bash -c 'for i in 1 2; do under $SAY; echo after:$((i * 7)); done; echo after:' | cat", ""),
        ],
        "> JOB
         > one
         < got:one
         ^D
         < after:7
         > two
         < got:two
         ^C
         $
         never after:",
    ),
    (
        "a_job_that_ignores_the_stop_for_the_terminal_ends",
        // As `x=$(sudo latch run ...)` in an interactive bash: nobody would continue it.
        &[("bash -c 'trap \"\" TTIN TTOU; under cat /dev/tty; echo >done' &", "")],
        "> cd $DIR
         prompt
         > JOB
         ? done",
    ),
    (
        "a_signal_that_was_not_typed_ends_no_script",
        &[("", "")],
        r#"> bash -c 'under sh -c "read x; kill -INT \$PPID; exec sleep 60"; echo after:$((6 * 7))'
         > go on
         < after:42
         $ 0"#,
    ),
    (
        "ctrl_c_after_fg_ends_a_job_whose_lock_is_not_confirmed",
        &[
            ("under $SAY", "130"),
            // Bash waits for its child to die of Ctrl-C, and so is there for a later signal, too.
            ("under bash -c '$SAY; true'", "130"),
            // SIGTERM follows.
            ("under sh -c 'trap \"\" INT; $SAY'", "143"),
        ],
        "> JOB
         > one
         < got:one
         ^Z
         stopped
         touch silent
         : fg
         ? asked
         ^C
         $ STATUS",
    ),
    (
        "a_pager_gets_the_terminal_after_the_command_has_read_it",
        &[
            ("-tostop; ASK='read x </dev/tty'", "0"),
            ("-tostop; ASK='stty -echo </dev/tty; read x </dev/tty; stty echo </dev/tty'", "0"),
            ("tostop; ASK='read x </dev/tty'", "0"),
        ],
        "> mkfifo $DIR/go; export ASK; stty JOB
         > under sh -c 'eval \"$ASK\"; echo $x; read y <$DIR/go; read z </dev/tty' | sh $DIR/pager
         > one
         < first:one
         > two
         < second:two
         > three
         $ STATUS",
    ),
    (
        "a_command_in_a_pipeline_gets_the_terminal_when_it_needs_it",
        &[("", "")],
        r#"> under sh -c 'mkfifo $DIR/go; eval "$READY"; read x <$DIR/go; read y </dev/tty; echo got:$y' | cat
         no terminal
         ! go
         > one
         < got:one
         $ 0"#,
    ),
    (
        "bg_continues_the_command_without_the_terminal",
        &[("", "")],
        "> under sh -c 'mkfifo $DIR/go; read x <$DIR/go; : >$DIR/done'
         ? go
         ^Z
         stopped
         > bg
         prompt
         > echo $((6 * 7)) is here
         < 42 is here
         prompt
         ! go
         ? done
         > wait; true
         $ 0
         > under $SAY
         > mine again
         < got:mine again
         ^D
         $ 0",
    ),
    (
        "fg_gives_the_terminal_to_a_command_in_any_case",
        &[("", "")],
        "> under sh -c 'eval \"$READY\"; mkfifo $DIR/go; read x <$DIR/go'
         ? go
         terminal
         ^Z
         stopped
         no terminal
         : fg
         terminal
         ! go
         $ 0",
    ),
    (
        "fg_continues_all_of_a_job_that_needs_the_terminal",
        &[
            ("under $SAY &", "0"),
            ("sh -c 'under $SAY; true' &", "0"),
            ("sh -c 'under under $SAY; true' &", "0"),
            ("under $SAY | cat &", "0"),
        ],
        // The shell has started the whole job before the command needs the terminal.
        "held
         > JOB
         ? waiting
         prompt
         grant
         Stopped
         : fg
         > late
         < got:late
         ^D
         $ STATUS",
    ),
    (
        "a_command_stops_with_a_job_that_needs_the_terminal",
        &[("", "")],
        r#"> export REST='under sh -c "$READY; exec sleep 60" & until test -e $DIR/ready; do sleep 0.02; done; under $SAY; kill $!; wait'
         > sh -c "$REST" &
         stops"#,
    ),
    (
        "a_killed_command_leaves_the_terminal_modes_as_they_were",
        &[
            (r"kill -KILL \$\$", ""),
            ("echo runs:\\$((6 * 7)); exec sleep 60", "< runs:42\nlose"),
        ],
        // A shell that is not interactive leaves the modes alone.
        r#"> sh -c 'a=$(stty -g); under sh -c "stty -echo -icanon; JOB"; b=$(stty -g); stty $a; [ $a = $b ]'
         STATUS
         $ 0"#,
    ),
    (
        "ctrl_z_stops_all_of_a_pipeline_and_all_of_a_script",
        &[
            ("under $SAY", "0"),
            ("under $SAY | cat", "0"),
            ("sh -c 'under $SAY; echo over'", "0"),
            ("sh -c 'under under $SAY; echo over'", "0"),
            ("under sh -c 'under $SAY; echo over' | cat", "0"),
        ],
        "> JOB
         > one
         < got:one
         ^Z
         stopped
         : fg
         > two
         < got:two
         ^D
         $ STATUS",
    ),
    (
        "suspend_of_a_shell_under_the_lock_stops_the_job",
        &[("", "")],
        "> under sh -c 'kill -STOP $$; $SAY'
         stopped
         : fg
         > on
         < got:on
         ^D
         $ 0",
    ),
    (
        "a_script_reads_on_from_the_terminal_after_its_command",
        &[("", "")],
        "> sh -c 'under true; read x; echo got:$x'
         > the rest
         < got:the rest
         $ 0",
    ),
    (
        "a_script_reads_on_after_the_terminal_was_left_to_a_dead_group",
        &[("", "")],
        // The command gives the terminal to the group of its child, which is killed.
        r#"> cat >$DIR/leave; stty -g >$DIR/modes
         > import os, signal
         > child = os.fork()
         > if child == 0: signal.pause()
         > os.setpgid(child, child)
         > os.tcsetpgrp(0, child)
         > os.kill(child, signal.SIGKILL)
         > os.waitpid(child, 0)
         ^D
         ? modes
         > sh -c 'under python3 $DIR/leave; read x; echo got:$x'
         > the rest
         < got:the rest
         $ 0"#,
    ),
    (
        "a_shell_under_the_lock_has_job_control_of_its_own",
        &[("", "")],
        "> PS1='inner> ' under bash --norc --noprofile --noediting -i
         < inner>
         > $SAY
         > one
         < got:one
         ^Z
         < inner>
         : fg
         > two
         < got:two
         ^C
         < inner>
         > exit 3
         $ 3",
    ),
];

pub fn tests() -> Vec<crate::Test> {
    let conversations = CONVERSATIONS.iter();
    let mut tests: Vec<crate::Test> = conversations
        .map(|it| (it.0, Box::new(|| converse(it)) as _))
        .collect();
    tests.push((
        "without_a_shell_ctrl_z_does_not_hang_the_terminal",
        Box::new(without_a_shell_ctrl_z_does_not_hang_the_terminal),
    ));
    tests
}

/// Reads the terminal after its input, as a pager does.
const PAGER: &str = "read x; echo first:$x; read y </dev/tty; echo second:$y; echo >$DIR/go";

fn converse((_, rounds, steps): &Conversation) {
    if steps.contains("python3") {
        needs!("python3");
    }
    at_each_shell(|shell| {
        for (job, status) in *rounds {
            let mut talk = Talk::start(shell);
            fs::write(talk.lock.file("pager"), PAGER).expect("a file");
            let steps = steps.replace("JOB", job).replace("STATUS", status);
            steps.lines().for_each(|step| talk.take(step.trim_start()));
        }
    });
}

fn without_a_shell_ctrl_z_does_not_hang_the_terminal() {
    // As with `ssh -t host latch run ...`: no shell is there to continue it.
    let script = format!("printf '{PROMPT}'; exec {SAY}");
    for command in [
        &["under", "sh", "-c", &script][..],
        &["under", "under", "sh", "-c", &script],
    ] {
        let mut talk = Talk::start(command);
        // The terminal discards what is typed at the same time as Ctrl-Z.
        for step in [
            "> one",
            "< got:one",
            "^Z",
            "< ^Z",
            "> two",
            "< got:two",
            "^D",
        ] {
            talk.take(step);
        }
        eventually(PATIENCE, "it ends", || {
            talk.terminal.has_ended() && !talk.lock.is_locked()
        });
    }
}

/// A conversation.
struct Talk {
    /// Dropped before the folder of the lock, which its shells use.
    terminal: Terminal,
    lock: Lock,
    /// What keeps the lock granted.
    granted: Option<File>,
    /// How much the terminal had shown when a key was pressed last.
    pressed_at: usize,
}

impl Talk {
    fn start(command: &[&str]) -> Talk {
        let lock = Lock::new();
        let mut variables = lock.variables().to_vec();
        variables.push(("SAY", SAY.to_owned()));
        let variables: Vec<(&str, &str)> = variables.iter().map(|it| (it.0, &*it.1)).collect();
        Talk {
            terminal: Terminal::start(&variables, command),
            lock,
            granted: None,
            pressed_at: 0,
        }
    }

    fn take(&mut self, step: &str) {
        let (lock, terminal) = (&self.lock, &mut self.terminal);
        let command = || lock.number("ready");
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        match verb {
            ">" => terminal.enter(rest),
            ":" => terminal.command(rest),
            "<" => terminal.expect(rest),
            "^C" | "^D" | "^Z" => {
                self.pressed_at = terminal.screen().len();
                terminal.press(match verb {
                    "^C" => CTRL_C,
                    "^D" => CTRL_D,
                    _ => CTRL_Z,
                });
            }
            "prompt" => terminal.expect(PROMPT),
            "$" => {
                terminal.expect(PROMPT);
                let status = terminal.say("$?");
                assert!(
                    rest.is_empty() || rest == status,
                    "{status}: {}",
                    terminal.screen()
                );
                eventually(PATIENCE, "the lock is free", || !lock.is_locked());
            }
            "stopped" => {
                terminal.expect(PROMPT);
                eventually(PATIENCE, "the whole job has stopped", || {
                    all_below_have_stopped(terminal.shell())
                });
            }
            "Stopped" => {
                let seen = terminal.screen().len();
                eventually(PATIENCE, "the job has stopped", || {
                    terminal.command("jobs");
                    terminal.expect(PROMPT);
                    terminal.screen()[seen..].contains("Stopped")
                });
            }
            "terminal" => eventually(PATIENCE, "the command has the terminal", || {
                is_in_the_foreground(command())
            }),
            "no" => assert!(!is_in_the_foreground(command())),
            "stops" => eventually(PATIENCE, "the command stops", || has_stopped(command())),
            "?" => eventually(PATIENCE, rest, || lock.file(rest).exists()),
            "!" => eventually(PATIENCE, "something reads the pipe", || {
                // Without a reader, this open fails.
                let flags = OFlags::WRONLY | OFlags::NONBLOCK;
                rustix::fs::open(lock.file(rest), flags, Mode::empty())
                    .is_ok_and(|pipe| rustix::io::write(&pipe, b"go on\n").is_ok())
            }),
            "touch" => lock.touch(rest),
            "held" => lock.hold(),
            "grant" => self.granted = Some(lock.grant()),
            "lose" => lock.lose(),
            "never" => {
                let screen = &terminal.screen()[self.pressed_at..];
                assert!(!screen.contains(rest), "{screen}");
            }
            "" => {}
            _ => panic!("no such step: {step}"),
        }
    }
}

/// Whether its terminal is that of the process's group.
fn is_in_the_foreground(process: Pid) -> bool {
    let fields = stat_of(process.as_raw_pid().unsigned_abs()).expect("it runs");
    fields[2] == fields[5]
}

fn all_below_have_stopped(pid: u32) -> bool {
    let session = |pid| stat_of(pid).map(|fields| fields[3].clone());
    children_of(pid).into_iter().all(|child| {
        let child = child.as_raw_pid().unsigned_abs();
        // The guard of a command has a session of its own, and does not stop with the job. A
        // command that had just ended is left to a shell that has stopped before it could reap it.
        session(child) != session(pid)
            || stat_of(child).is_some_and(|fields| ["T", "Z"].contains(&fields[0].as_str()))
                && all_below_have_stopped(child)
    })
}
