//! Ctrl-C, Ctrl-\ and Ctrl-Z at real terminals: in each shell, and in each form in which a shell
//! runs a command, a key does what it does without the wrapper.
//!
//! A case is a shell, a form and a key. It runs twice, under the wrapper and under env(1), which
//! becomes the command. Both must give the same facts: who got the signal, who stopped, and what
//! the script and the shell say of the status.

use std::fs::{self, File};
use std::io::Write;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{mkfifoat, Mode, CWD};
use rustix::process::{kill_process, Pid, Signal};

use crate::fixture::{has_ended, has_stopped, Lock};
use crate::support::latch::{number_in, state};
use crate::support::needs::programs;
use crate::support::terminal::{Terminal, CTRL_BACKSLASH, CTRL_C, CTRL_Z};
use crate::support::{eventually, is_soon, PATIENCE};
use crate::wrapper::WRAPPER;

/// How many cases of a shell run at a time. Most of them wait.
const CASES_AT_A_TIME: usize = 4;

/// How long something may take that perhaps does not happen: without the wrapper, and with it if
/// it has not happened without.
const A_WHILE: Duration = Duration::from_millis(500);

/// How each shell runs a script, and how it is started at a terminal.
const SHELLS: [(&str, &str); 7] = [
    BASH,
    ("dash", "dash -i"),
    ("zsh -f", "zsh -f -i +Z"),
    ("fish --no-config", "fish --no-config -i"),
    ("mksh", "mksh -i"),
    ("ksh93", "ksh93 -i"),
    ("busybox sh", "busybox sh -i"),
];
const BASH: (&str, &str) = ("bash", "bash --norc --noprofile --noediting -i");

/// A form in which a shell runs a command, and the keys that are tried. `RUN` is the wrapper, or
/// nothing. `JOB` is a command that goes on until it is told to end, `FIRM` takes the signals and
/// ends with 3, `ASK` asks a person, and `TAIL` is the end of a pipeline. A file `waits` says that
/// the script waits.
type Form = (&'static str, &'static [&'static str]);

const KEYS: &[&str] = &[CTRL_C, CTRL_BACKSLASH, CTRL_Z];
const ENDING_KEYS: &[&str] = &[CTRL_C, CTRL_BACKSLASH];
const ANSWERS: &[&str] = &["secret\n", CTRL_C];

/// What an interactive shell runs.
const TYPED: &[Form] = &[
    ("RUN JOB one", KEYS),
    ("RUN FIRM one", KEYS),
    ("RUN JOB one | TAIL", KEYS),
    ("x=$(RUN JOB one)", ENDING_KEYS),
    ("x=$(RUN ASK one)", ANSWERS),
    ("RUN ASK one | TAIL", ANSWERS),
];

/// What a script does, before it notes the status.
const SCRIPTS: &[Form] = &[
    ("RUN JOB one", KEYS),
    // The others reach the script, too, without the wrapper: see CAVEATS in latch-job(7).
    ("RUN FIRM one", &[CTRL_Z]),
    (
        "trap 'echo trap >>log; exit 7' INT QUIT\nRUN JOB one & RUN JOB two &\necho >waits; wait",
        KEYS,
    ),
    ("RUN JOB one &\necho >waits; wait", KEYS),
    ("RUN JOB one | TAIL &\necho >waits; wait", KEYS),
    ("x=$(RUN JOB one)", KEYS),
    ("x=$(RUN ASK one)", ANSWERS),
    ("RUN JOB one | TAIL", KEYS),
    ("true | RUN FIRM one", KEYS),
    ("(RUN JOB one; true) &\necho >waits; wait", KEYS),
];

/// Programs between the shell and the wrapper, each with what is typed.
const OTHERS: &[(&str, &str)] = &[
    (
        "script",
        "script -q -c 'RUN JOB one; echo script:$? >>log' typescript",
    ),
    ("su", "su -c 'RUN JOB one; echo script:$? >>log'"),
    ("su", "su -P -c 'RUN JOB one; echo script:$? >>log'"),
    ("sudo", "sudo -E env PATH=\"$PATH\" RUN JOB one"),
    (
        "tmux",
        "TERM=vt100 tmux -S tmux -f /dev/null new-session 'RUN JOB one; echo script:$? >>log'",
    ),
    (
        "screen",
        "TERM=vt100 screen -c /dev/null sh -c 'RUN JOB one; echo script:$? >>log'",
    ),
    ("timeout", "timeout --foreground 60 RUN JOB one"),
];

/// The job: says that it runs, and ends when it is told to. `FIRM` sets `firm`.
const JOB: &str = "[ -z \"$firm\" ] || trap 'echo $1:signal >>log; exit 3' INT QUIT
exec 9<>go
echo $$ >$1
until read x <&9; do :; done
echo $1:done >>log";

/// The end of a pipeline.
const TAIL: &str = ": >tail
exec cat";

/// A job that asks a person.
const ASK: &str = "exec 9<>/dev/tty
echo $$ >$1
if read x <&9; then echo $1:$x >>log; else echo $1:none >>log; fi";

pub fn tests() -> Vec<crate::Test> {
    let mut tests: Vec<crate::Test> = Vec::new();
    for (script, interactive) in SHELLS {
        let name = script.split(' ').next().expect("a program");
        let test = move || {
            if ["bash", "dash"].contains(&name) || programs([name]).is_some() {
                compare_in(script, interactive);
            }
        };
        let claim = format!("keys_in_{name}_do_what_they_do_without_a_lock");
        tests.push((claim, Box::new(test)));
    }
    tests.push((
        "keys_under_other_programs_do_what_they_do_without_a_lock".to_owned(),
        Box::new(keys_under_other_programs_do_what_they_do_without_a_lock),
    ));
    tests
}

fn keys_under_other_programs_do_what_they_do_without_a_lock() {
    let mut cases = Vec::new();
    for (program, typed) in OTHERS {
        let is_there = match *program {
            "su" => rustix::process::geteuid().is_root(),
            "timeout" => true,
            "sudo" => rustix::process::geteuid().is_root() && programs(["sudo"]).is_some(),
            name => programs([name]).is_some(),
        };
        if is_there {
            for key in KEYS {
                cases.push(Case {
                    interactive: BASH.1,
                    typed: (*typed).to_owned(),
                    script: "RUN JOB one".to_owned(),
                    key,
                });
            }
        }
    }
    compare_all(&cases);
}

/// Compares all forms and keys in one shell.
fn compare_in(script: &str, interactive: &'static str) {
    let mut cases = Vec::new();
    for (forms, is_script) in [(TYPED, false), (SCRIPTS, true)] {
        for (form, keys) in forms {
            let mut text = (*form).to_owned();
            if is_script {
                text += "; echo script:$? >>log";
            }
            if script.starts_with("fish") {
                if text.starts_with('(') {
                    // It has no such form.
                    continue;
                }
                text = text.replace("$?", "$status").replace("x=$(", "set x (");
            }
            for key in *keys {
                cases.push(Case {
                    // The shell of a script is its own; the one at the terminal is bash.
                    interactive: if is_script { BASH.1 } else { interactive },
                    typed: if is_script {
                        format!("{script} script")
                    } else {
                        text.clone()
                    },
                    script: text.clone(),
                    key,
                });
            }
        }
    }
    compare_all(&cases);
}

struct Case {
    /// Starts the shell at the terminal.
    interactive: &'static str,
    typed: String,
    script: String,
    key: &'static str,
}

fn compare_all(cases: &[Case]) {
    let next = AtomicUsize::new(0);
    let different: Vec<String> = thread::scope(|scope| {
        let runs: Vec<_> = (0..CASES_AT_A_TIME)
            .map(|_| {
                scope.spawn(|| {
                    let mut different = Vec::new();
                    while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                        different.extend(case.difference());
                    }
                    different
                })
            })
            .collect();
        let ends = runs.into_iter().map(|run| run.join());
        ends.flat_map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    assert!(different.is_empty(), "{}", different.join("\n"));
}

impl Case {
    /// What differs with the wrapper, in words, if it differs twice. Once in a while a shell loses
    /// a key by itself: ksh93 did, with the wrapper and without.
    fn difference(&self) -> Option<String> {
        self.compare().and_then(|_| self.compare())
    }

    fn compare(&self) -> Option<String> {
        let without = Run::facts_of(self, "/usr/bin/env", None);
        let with = Run::facts_of(self, WRAPPER, Some(&without));
        (with != without).then(|| {
            format!(
                "{}, {}, {:?}:\n    without {without:?}\n    with    {with:?}",
                self.typed, self.script, self.key
            )
        })
    }
}

/// A case with or without the wrapper.
struct Run<'a> {
    case: &'a Case,
    /// Dropped before the folder of the lock, which its shells use.
    terminal: Terminal,
    lock: Lock,
    jobs: Vec<Pid>,
    facts: Vec<String>,
    /// The facts without the wrapper.
    expected: Option<&'a [String]>,
}

impl<'a> Run<'a> {
    fn facts_of(case: &'a Case, run: &str, expected: Option<&'a [String]>) -> Vec<String> {
        let lock = Lock::new();
        let fill = |text: &str| {
            let text = text.replace("RUN", run);
            // With their paths: busybox would run what it has in itself.
            let text = text
                .replace("JOB", "/bin/sh job")
                .replace("ASK", "/bin/sh ask");
            let text = text.replace("TAIL", "/bin/sh end");
            text.replace("FIRM", "/usr/bin/env firm=yes /bin/sh job")
        };
        mkfifoat(CWD, lock.file("go"), Mode::RWXU).expect("a pipe");
        for (name, text) in [
            ("job", JOB),
            ("ask", ASK),
            ("end", TAIL),
            ("script", &fill(&case.script)),
        ] {
            fs::write(lock.file(name), format!("{text}\n")).expect("a file");
        }
        fs::create_dir(lock.file("screens")).expect("a folder");
        let mut variables = lock.variables().to_vec();
        variables.push(("SCREENDIR", lock.file("screens").display().to_string()));
        let variables: Vec<(&str, &str)> = variables.iter().map(|it| (it.0, &*it.1)).collect();
        let interactive: Vec<&str> = case.interactive.split(' ').collect();
        let mut this = Run {
            case,
            terminal: Terminal::open(&variables, &interactive),
            lock,
            jobs: Vec::new(),
            facts: Vec::new(),
            expected,
        };
        this.take(&fill(&case.typed));
        std::mem::take(&mut this.facts)
    }

    fn take(&mut self, typed: &str) {
        // The limit is for Ctrl-\, and the mode for the folder of screen.
        let begun = self.lock.file("begun");
        self.type_until(
            "cd $DIR; ulimit -c 0; chmod 700 screens; echo >begun",
            PATIENCE,
            || begun.exists(),
        );
        self.terminal.enter(typed);
        let text = &self.case.script;
        let jobs = ["one", "two"].into_iter().filter(|job| text.contains(job));
        let others = [("TAIL", "tail"), ("waits", "waits")];
        let others = others.iter().filter(|(word, _)| text.contains(word));
        eventually(PATIENCE, "the jobs run", || {
            let numbers = jobs
                .clone()
                .filter_map(|job| number_in(&self.lock.file(job)));
            // A shell that does not read yet would run its trap only after it has read.
            self.jobs = numbers.filter(|job| state(*job) == Some('S')).collect();
            self.jobs.len() == jobs.clone().count()
        });
        eventually(PATIENCE, "the rest of the form runs", || {
            others
                .clone()
                .all(|(_, file)| self.lock.file(file).exists())
        });
        self.terminal.press(self.case.key);
        if self.case.key == CTRL_Z {
            // Without job control, a stop lasts for a moment. It counts if the shell is back.
            let wait = self.patience("stopped");
            is_soon(wait, || self.jobs.iter().all(|job| has_stopped(*job)));
            self.tell("stopped");
            if self.has("stopped") {
                self.terminal.enter(" fg");
                self.note("continued", |it| {
                    !it.jobs.iter().any(|job| has_stopped(*job))
                });
            }
        } else {
            self.tell("status");
            self.note("ended by it", |it| {
                it.jobs.iter().all(|job| has_ended(*job))
            });
        }
        let mut go = File::options()
            .read(true)
            .write(true)
            .open(self.lock.file("go"));
        let go = go.as_mut().expect("a pipe");
        go.write_all(b"go\ngo\n").expect("there is room");
        self.note("ended", |it| it.jobs.iter().all(|job| has_ended(*job)));
        if self.has("ended") {
            self.tell("at the end");
            let lock = &self.lock;
            eventually(PATIENCE, "the lock is free", || !lock.is_locked());
        }
        let mut log = self.lock.lines("log");
        log.sort();
        self.facts.extend(log);
    }

    fn has(&self, fact: &str) -> bool {
        self.facts
            .iter()
            .any(|it| it.starts_with(&format!("{fact}: ")) && !it.ends_with("no"))
    }

    /// How long to wait for a fact.
    fn patience(&self, fact: &str) -> Duration {
        let no = format!("{fact}: no");
        let is_on = |job: &Pid| !has_ended(*job) && !has_stopped(*job);
        match self.expected {
            Some(expected) if expected.contains(&no) => A_WHILE,
            // The shell is back soon if its job has ended or stopped.
            None if fact == "ended by it" => A_WHILE,
            None if self.case.key == CTRL_Z && self.jobs.iter().all(is_on) => 3 * A_WHILE,
            _ => PATIENCE,
        }
    }

    /// Notes whether something happens.
    fn note(&mut self, fact: &str, holds: impl Fn(&Run<'_>) -> bool) {
        let happens = is_soon(self.patience(fact), || holds(self));
        let happens = if happens { "yes" } else { "no" };
        self.facts.push(format!("{fact}: {happens}"));
    }

    /// Notes the last status of the shell at the terminal, if it reads commands.
    fn tell(&mut self, fact: &str) {
        let file = self.lock.file(&fact.replace(' ', "-"));
        let is_fish = self.case.interactive.starts_with("fish");
        let status = if is_fish { "$status" } else { "$?" };
        let line = format!(" echo {status} >>{}", file.display());
        let patience = self.patience(fact);
        self.type_until(&line, patience, || {
            fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n'))
        });
        let told = fs::read_to_string(&file).unwrap_or_default();
        let told = told.lines().next().unwrap_or("no");
        self.facts.push(format!("{fact}: {told}"));
    }

    /// Types a line for the shell until it has an effect: a shell may discard what is typed while
    /// it takes its terminal.
    fn type_until(&mut self, line: &str, patience: Duration, done: impl Fn() -> bool) {
        let tries = if patience == PATIENCE { 20 } else { 1 };
        for _ in 0..tries {
            self.terminal.enter(line);
            if is_soon(patience / tries, &done) {
                break;
            }
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        for job in &self.jobs {
            if !has_ended(*job) {
                let _ = kill_process(*job, Signal::KILL);
            }
        }
    }
}
