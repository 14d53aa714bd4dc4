//! Conversations with the wrapper as text: each section of a file is one claim, and is played with
//! a lock of its own, step by step. After two blanks, a line goes on with the step before.
//!
//! ```text
//! == a loss ends a stopped command
//! needs: python3 pidfds process-1      what it needs, or it is skipped
//! for: STOP => 3                       it is played for each such line, with these words in place
//!                                      of JOB and STATUS
//! signals: TERM 37                     the same with the numbers of these signals, and the exit
//!                                      statuses for them
//! # why this matters                   a comment
//! end $READY; exit 3                   starts a shell script under the lock, with --leftovers end;
//!                                      also leave, wait, and end/0.3 with a time before SIGKILL
//! sh exec under sh -c true             starts a shell script that becomes the wrapper
//! unshared exec under sh -c true       the same as process 1, which is called init
//! orphans 0                            so many children has init in the end
//! command stops                        also ends, goes on; and wrapper, guard, or a file that has
//!                                      the number of a process
//! command is stopped                   is so at once; also is running, is gone
//! wrapper TERM                         sends a signal to the process
//! guard                                waits for the guard, and writes its number into a file
//! group is empty                       is so at once; also group is not empty, group ends
//! = 70                                 the wrapper ends with this status, as a shell has it
//! dies 15                              dies of this signal, without a core dump
//! lasted 1                             that took so many seconds at least
//! said latch: no guard                 just this is on the standard error; `says` waits for it
//! log one two                          these are the lines of the file `log`
//! locked                               also free
//! lives daemon                         the process whose number the file has runs, and is killed
//! for all users                        the lock is there for AS_NOBODY, too
//! $ echo $DIR >&2; exit 3              a shell script has this status, output and errors; if no
//! | 3 ! DIR                            line follows, it succeeds in silence
//! file script                          writes the lines that follow into a file
//! ```
//!
//! At a terminal, it is a conversation with each shell:
//!
//! - `> TEXT` types a line, and `: TEXT` types a line for the shell after a job has stopped;
//! - `< TEXT` waits until the terminal shows it, after what was shown before;
//! - `^C`, `^D`, `^Z` press these keys;
//! - `prompt` waits for the shell's prompt;
//! - `= STATUS` waits for it, compares the last exit status, and waits until the lock is free;
//! - `stopped` waits for the prompt, and until all that the shell has started has stopped;
//! - `Stopped` asks the shell for its jobs until one has stopped;
//! - `terminal`, `no terminal`: whether the group of the command has the terminal;
//! - `never TEXT`: since the last key, the terminal has not shown this;
//! - `closes`: the program at the terminal ends.
//!
//! In both, `? FILE` waits for a file, `! FILE` writes to a named pipe that something reads, and
//! `held`, `grant`, `lose` and `touch FILE` do to the lock what their names say. The command is the
//! process that has written its number with `$READY`. In a script, `$WAIT` waits for the file `go`.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal as Named;
use rustix::fs::{Mode, OFlags};
use rustix::process::{kill_process, Pid, Signal};
use rustix_libc_wrappers::process::SignalExt;

use crate::fixture::{as_nobody, has_ended, has_stopped, Lock, Stray, Wrapper};
use crate::support::group::is_empty;
use crate::support::latch::{is_gone, process_1, shell_status};
use crate::support::needs::{has_pidfds, programs, skipped};
use crate::support::terminal::{at_each_shell, Terminal, CTRL_C, CTRL_D, CTRL_Z, PROMPT, SAY};
use crate::support::{children_of, eventually, stat_of, PATIENCE};

/// The files, and whether they are played at a terminal.
const FILES: [(&str, bool); 5] = [
    (include_str!("start.txt"), false),
    (include_str!("signals.txt"), false),
    (include_str!("end.txt"), false),
    (include_str!("guard.txt"), false),
    (include_str!("terminal.txt"), true),
];

/// The signals that the wrapper dies of as the command did.
const USUAL: [Signal; 7] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
];

#[derive(Default)]
struct Section {
    is_at_terminal: bool,
    needs: Vec<&'static str>,
    /// What takes the places of `JOB` and `STATUS`.
    rounds: Vec<(String, String)>,
    steps: Vec<String>,
}

pub fn tests() -> Vec<crate::Test> {
    let mut tests: Vec<crate::Test> = Vec::new();
    for (text, is_at_terminal) in FILES {
        for section in text.split("\n== ").skip(1) {
            let (claim, lines) = section.split_once('\n').expect("steps");
            let section = Section::parse(is_at_terminal, lines);
            tests.push((claim.replace(' ', "_"), Box::new(move || section.play())));
        }
    }
    tests
}

impl Section {
    fn parse(is_at_terminal: bool, lines: &'static str) -> Section {
        let mut section = Section {
            is_at_terminal,
            ..Section::default()
        };
        for line in lines.lines().filter(|it| !it.starts_with('#')) {
            let (head, rest) = line.split_once(' ').unwrap_or((line, ""));
            match head {
                "needs:" => section.needs = rest.split(' ').collect(),
                "for:" => {
                    let (job, status) = rest.split_once(" => ").unwrap_or((rest, ""));
                    section.rounds.push((job.to_owned(), status.to_owned()));
                }
                "signals:" => {
                    let numbers = rest.split(' ').map(|name| signal(name).as_raw());
                    let rounds = numbers.map(|it| (it.to_string(), (128 + it).to_string()));
                    section.rounds = rounds.collect();
                }
                // The step above goes on.
                "" if !rest.is_empty() => {
                    *section.steps.last_mut().expect("a step") += &format!("\n{}", &line[2..]);
                }
                "|" => *section.steps.last_mut().expect("a step") += &format!("\n| {rest}"),
                "" => {}
                _ => section.steps.push(line.to_owned()),
            }
        }
        if section.rounds.is_empty() {
            section.rounds.push(Default::default());
        }
        section
    }

    fn play(&self) {
        let is_there = |name: &&str| match *name {
            "pidfds" if has_pidfds() => true,
            "pidfds" => {
                skipped(&["pidfds"]);
                false
            }
            "process-1" => process_1(&[]).is_some(),
            name => programs([name]).is_some(),
        };
        if !self.needs.iter().all(is_there) {
            return;
        }
        if self.is_at_terminal {
            at_each_shell(|shell| {
                let rounds = self.rounds.iter();
                rounds.for_each(|round| self.play_round(round, Some(shell)));
            });
        } else {
            thread::scope(|scope| {
                for round in &self.rounds {
                    scope.spawn(|| self.play_round(round, None));
                }
            });
        }
    }

    fn play_round(&self, (job, status): &(String, String), shell: Option<&[&str]>) {
        let mut stage = Stage::new(shell);
        for step in &self.steps {
            let step = step.replace("JOB", job).replace("STATUS", status);
            stage.step.clone_from(&step);
            stage.take(&step);
        }
    }
}

/// What a section has brought about so far.
struct Stage {
    step: String,
    began: Instant,
    /// These are dropped before the folder of the lock, which their shells use.
    terminal: Option<Terminal>,
    wrapper: Option<Wrapper>,
    strays: Vec<Stray>,
    lock: Arc<Lock>,
    /// What keeps the lock granted.
    granted: Option<File>,
    /// How much the terminal had shown when a key was pressed last.
    pressed_at: usize,
}

impl Stage {
    fn new(shell: Option<&[&str]>) -> Stage {
        let lock = Lock::new();
        let start = |shell: &[&str]| {
            let mut variables = lock.variables().to_vec();
            variables.push(("SAY", SAY.to_owned()));
            let variables: Vec<(&str, &str)> = variables.iter().map(|it| (it.0, &*it.1)).collect();
            Terminal::start(&variables, shell)
        };
        Stage {
            step: String::new(),
            began: Instant::now(),
            terminal: shell.map(start),
            wrapper: None,
            strays: Vec::new(),
            lock: Arc::new(lock),
            granted: None,
            pressed_at: 0,
        }
    }

    fn wrapper(&mut self) -> &mut Wrapper {
        self.wrapper.as_mut().expect("a wrapper")
    }

    fn init(&mut self) -> Pid {
        children_of(self.wrapper().child.id())[0]
    }

    fn take(&mut self, step: &str) {
        let lock = Arc::clone(&self.lock);
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        let (more, text) = rest.split_once('\n').unwrap_or((rest, ""));
        match verb {
            "?" => eventually(PATIENCE, rest, || lock.file(rest).exists()),
            "!" => eventually(PATIENCE, "something reads the pipe", || {
                // Without a reader, this open fails.
                let flags = OFlags::WRONLY | OFlags::NONBLOCK;
                rustix::fs::open(lock.file(rest), flags, Mode::empty())
                    .is_ok_and(|pipe| rustix::io::write(&pipe, b"go on\n").is_ok())
            }),
            "file" => fs::write(lock.file(more), format!("{text}\n")).expect("a file"),
            "touch" => lock.touch(rest),
            "held" => lock.hold(),
            "grant" => self.granted = Some(lock.grant()),
            "lose" => lock.lose(),
            "locked" => assert!(lock.is_locked()),
            "free" => assert!(!lock.is_locked()),
            "log" => assert_eq!(lock.lines("log").join(" "), rest),
            "$" => {
                let (script, expected) = rest.split_once("\n| ").unwrap_or((rest, "0"));
                let script = script.replace("AS_NOBODY", as_nobody());
                assert_eq!(lock.output(&script), expected.replace("\n| ", "\n"));
            }
            "for" => self.lock = Arc::new(Lock::for_all()),
            // A round may do nothing more here.
            "" => {}
            _ if self.terminal.is_some() => self.take_at_terminal(verb, rest),
            _ => self.take_of_wrapper(verb, rest),
        }
    }

    fn take_of_wrapper(&mut self, verb: &str, rest: &str) {
        let lock = Arc::clone(&self.lock);
        match verb {
            "sh" => self.wrapper = Some(Wrapper::shell(lock, rest)),
            "=" => assert_eq!(self.wrapper().status().to_string(), rest),
            "dies" => {
                let status = self.wrapper().end();
                let sent = signal(rest);
                assert_eq!(status.signal().is_some(), USUAL.contains(&sent));
                assert_eq!(shell_status(status), Some(128 + sent.as_raw()));
                assert!(!status.core_dumped());
            }
            "said" => assert_eq!(self.wrapper().said().trim_end(), rest),
            "says" => {
                let wrapper = self.wrapper();
                eventually(PATIENCE, rest, || wrapper.said().contains(rest));
            }
            "lasted" => {
                let least = Duration::from_secs(rest.parse().expect("seconds"));
                assert!(self.began.elapsed() >= least);
            }
            "group" => {
                let group = lock.number("ready");
                match rest {
                    "ends" => eventually(PATIENCE, rest, || is_empty(group)),
                    _ => assert_eq!(is_empty(group), rest == "is empty"),
                }
            }
            "end" | "end/0.3" | "leave" | "leave/0.3" | "wait" => {
                self.wrapper = Some(Wrapper::script(lock, verb, rest));
            }
            "lives" => {
                let stray = Stray(lock.number(rest));
                assert!(!has_ended(stray.0));
                self.strays.push(stray);
            }
            "guard" if !["ends", "is gone"].contains(&rest) => {
                let guard = self.wrapper().guard();
                fs::write(lock.file("guard"), guard.to_string()).expect("a file");
                if !rest.is_empty() {
                    self.strays.push(Stray(guard));
                    take_of_process(guard, rest);
                    let is_done = || has_stopped(guard) || is_gone(guard);
                    eventually(PATIENCE, rest, is_done);
                }
            }
            "unshared" => self.wrapper = Some(Wrapper::unshared(lock, rest)),
            "init" => take_of_process(self.init(), rest),
            "orphans" => {
                let init = self.init().as_raw_pid().unsigned_abs();
                let count: usize = rest.parse().expect("a number");
                eventually(PATIENCE, "orphans", || children_of(init).len() == count);
            }
            "wrapper" => take_of_process(self.wrapper().pid(), rest),
            "command" => take_of_process(lock.number("ready"), rest),
            file => take_of_process(lock.number(file), rest),
        }
    }

    fn take_at_terminal(&mut self, verb: &str, rest: &str) {
        let lock = &self.lock;
        let terminal = self.terminal.as_mut().expect("a terminal");
        let command = || lock.number("ready");
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
            "=" => {
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
            "command" => take_of_process(command(), rest),
            "closes" => eventually(PATIENCE, "it ends", || {
                terminal.has_ended() && !lock.is_locked()
            }),
            "never" => {
                let screen = &terminal.screen()[self.pressed_at..];
                assert!(!screen.contains(rest), "{screen}");
            }
            _ => panic!("no such step"),
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("failed in the step: {}", self.step);
        }
    }
}

fn take_of_process(process: Pid, rest: &str) {
    match rest {
        "stops" => eventually(PATIENCE, rest, || has_stopped(process)),
        "goes on" => eventually(PATIENCE, rest, || !has_stopped(process)),
        "ends" => eventually(PATIENCE, rest, || has_ended(process)),
        "is stopped" => assert!(has_stopped(process)),
        "is running" => assert!(!has_stopped(process) && !has_ended(process)),
        "is gone" => assert!(is_gone(process)),
        name => kill_process(process, signal(name)).expect("it runs"),
    }
}

/// A signal by its name or its number.
pub fn signal(name: &str) -> Signal {
    let named = |_| format!("SIG{name}").parse::<Named>().expect("a signal") as i32;
    Signal::from_raw(name.parse().unwrap_or_else(named)).expect("a signal")
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
