//! A shell with job control at a terminal, which a test types at and reads.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::panic::resume_unwind;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustix::fs::{open, Mode, OFlags};
use rustix::process::{kill_process, Pid, Signal};
use rustix::pty::{openpt, ptsname, unlockpt, OpenptFlags};
use rustix::termios::{tcflow, Action};

use super::{eventually, is_soon, stat_of, PATIENCE};

/// Shells with job control.
pub const SHELLS: [&[&str]; 2] = [
    &["bash", "--norc", "--noprofile", "--noediting", "-i"],
    &["dash", "-i"],
];

pub const PROMPT: &str = "ready> ";
pub const CTRL_C: &str = "\x03";
pub const CTRL_BACKSLASH: &str = "\x1c";
pub const CTRL_D: &str = "\x04";
pub const CTRL_Z: &str = "\x1a";

/// Says what it reads, and is told from the terminal's echo by that.
pub const SAY: &str = "sed -u s/^/got:/";

/// An interactive shell at a terminal of its own; hung up when dropped.
pub struct Terminal {
    shell: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    /// The length of the output that the test has already matched.
    pub seen: Cell<usize>,
}

impl Terminal {
    /// Starts a shell, or another program that prints [`PROMPT`] when it is ready.
    pub fn start(variables: &[(&str, &str)], command: &[&str]) -> Terminal {
        let terminal = Terminal::open(variables, command);
        terminal.expect(PROMPT);
        terminal
    }

    /// Starts a program at a new terminal.
    pub fn open(variables: &[(&str, &str)], command: &[&str]) -> Terminal {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let keyboard = openpt(flags).expect("a terminal is left");
        unlockpt(&keyboard).expect("it is ours");
        let device = ptsname(&keyboard, Vec::new()).expect("it has a name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let device = open(device, flags, Mode::empty()).expect("the other side");
        let copy = || device.try_clone().expect("descriptors are left");
        let shell = Command::new("setsid")
            // It becomes the shell.
            .args(["--ctty", "env", &format!("PS1={PROMPT}")])
            .args(command)
            .envs(variables.iter().copied())
            .env("TERM", "dumb")
            .env_remove("ENV")
            // Without this, bash writes what the test types into the user's history.
            .env("HISTFILE", "")
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .spawn()
            .expect("setsid starts");
        let keyboard = File::from(keyboard);
        let mut output = keyboard.try_clone().expect("descriptors are left");
        let screen = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&screen);
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            // It fails once no process has the terminal.
            while let Ok(count @ 1..) = output.read(&mut chunk) {
                let text = String::from_utf8_lossy(&chunk[..count]).into_owned();
                sink.lock().unwrap().push_str(&text);
            }
        });
        Terminal {
            shell,
            keyboard,
            screen,
            seen: Cell::new(0),
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .and_then(|()| self.keyboard.flush())
            .expect("the terminal is there");
    }

    pub fn enter(&mut self, line: &str) {
        self.press(&format!("{line}\n"));
    }

    /// Types a line for the shell. Bash can lose the first byte while it hears of a child that has
    /// stopped.
    pub fn command(&mut self, line: &str) {
        self.enter(&format!(" {line}"));
    }

    /// Waits until `text` appears after everything that was matched before.
    pub fn expect(&self, text: &str) {
        let seen = self.seen.get();
        let mut found = None;
        let is_shown = is_soon(PATIENCE, || {
            found = self.screen()[seen..].find(text);
            found.is_some()
        });
        assert!(is_shown, "no {text:?} at the end of:\n{}", self.screen());
        self.seen
            .set(seen + found.expect("just found") + text.len());
    }

    /// Has the shell print the last exit status, which shows that it reads its terminal.
    pub fn expect_status(&mut self, status: i32) {
        assert_eq!(self.say("$?"), status.to_string(), "{}", self.screen());
    }

    /// Has the shell print the expansion of `word`.
    pub fn say(&mut self, word: &str) -> String {
        // The terminal echoes this line as another text than the output.
        self.command(&format!("echo \"<{word}:$((40 + 2))>\""));
        self.expect(":42>");
        let screen = self.screen();
        let said = screen[..self.seen.get()].rsplit_once('<').expect("said").1;
        let said = said.strip_suffix(":42>").expect("just seen").to_owned();
        self.expect(PROMPT);
        said
    }

    /// Has the terminal stop its output, as Ctrl-S does, or go on with it.
    pub fn flow(&self, action: Action) {
        let device = format!("/proc/{}/fd/0", self.shell());
        let device = rustix::fs::open(device, OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        tcflow(device.expect("the shell reads it"), action).expect("a terminal");
    }

    pub fn screen(&self) -> String {
        self.screen.lock().unwrap().clone()
    }

    /// The process number of the shell.
    pub fn shell(&self) -> u32 {
        self.shell.id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.shell.try_wait().expect("our child").is_some()
    }

    /// Waits until a job has the terminal, and runs. The shell says what it continues before that.
    pub fn wait_for_the_job(&self) {
        eventually(PATIENCE, "the job goes on", || {
            let fields = stat_of(self.shell()).expect("it runs");
            let (own, foreground) = (&fields[2], &fields[5]);
            own != foreground && !has_a_stopped_process(foreground)
        });
    }
}

fn has_a_stopped_process(group: &str) -> bool {
    let processes = fs::read_dir("/proc").expect("it is Linux").flatten();
    let numbers = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(stat_of)
        .any(|fields| fields[2] == group && fields[0] == "T")
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // As a terminal that hangs up: a shell passes it on to its jobs.
        for signal in [Signal::HUP, Signal::CONT] {
            let _ = kill_process(Pid::from_child(&self.shell), signal);
        }
        if !is_soon(Duration::from_secs(1), || self.has_ended()) {
            let _ = self.shell.kill();
            let _ = self.shell.wait();
        }
    }
}

/// Runs a test with each shell, side by side: a test mostly waits.
pub fn at_each_shell(test: impl Fn(&[&str]) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for run in SHELLS.map(|shell| scope.spawn(move || test(shell))) {
            // With its own panic, by which `fair_test` knows what was late.
            run.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}
