//! The server as seen by the programs that people have at hand: three kinds of netcat, and telnet.
//!
//! A tool which is missing fails its test and names the Debian package that brings it: a check
//! that skips itself where it matters checks nothing.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::needs::{needs, Program};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, fence, parse_grant, Daemon, Deadline, PATIENCE};

/// The options with which programs end their half of the connection when their stdin ends, as a
/// pipe into them does.
const PIPED: [(usize, &[&str]); 4] = [(0, &["-N"]), (0, &["-q", "1"]), (1, &["nc"]), (2, &["-"])];

#[test]
fn a_pipe_into_any_netcat_gets_a_free_key_and_frees_it_again() {
    let programs = needs!("nc", "busybox", "socat");
    let daemon = Daemon::start(&[]);
    for (program, options) in PIPED.map(|(index, options)| (&programs[index], options)) {
        let outcome = pipe(netcat(program, options, &daemon), b"l\nk\n10\n");

        let grant = parse_grant(outcome.output.trim_end_matches('\n'), "ok");
        assert!(grant.is_some(), "{program:?} printed {:?}", outcome.output);
        eventually(PATIENCE, &format!("{program:?} left k free"), || {
            daemon.stats()["locks"]
                .as_array()
                .is_some_and(Vec::is_empty)
        });
    }
}

#[test]
fn a_pipe_that_would_wait_gets_error_and_no_grant() {
    let programs = needs!("nc", "busybox", "socat");
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    for (program, options) in PIPED.map(|(index, options)| (&programs[index], options)) {
        let held = holder.acquire("k", 0);
        let outcome = pipe(netcat(program, options, &daemon), b"l\nk\n60\n");

        println!("{program:?} was told after {:?}", outcome.took);
        assert_eq!(outcome.output, "error\n", "{program:?}");
        // Its wait would be much longer.
        in_time!(
            outcome.took < PATIENCE,
            "{program:?} ended after {:?}",
            outcome.took
        );
        assert_eq!(holder.request("r", "k", &held.token), "ok");
        // Fences rise by one with each grant: none has been given to the pipe.
        let next = holder.acquire("k", 0);
        assert_eq!(fence(&next.token), fence(&held.token) + 1, "{program:?}");
        assert_eq!(holder.request("r", "k", &next.token), "ok");
    }
}

#[test]
fn a_netcat_that_does_not_half_close_keeps_its_lock() {
    let nc = needs!("nc");
    let daemon = Daemon::start(&[]);
    let mut session = Session::start(netcat(&nc, &[], &daemon));
    session.send("l\nk\n10\n");
    session.hang_up_stdin(); // the end of the pipe, which this program keeps to itself
    session.expect_line("a grant", |line| parse_grant(line, "ok").is_some());
    assert_eq!(daemon.connect().request("l", "k", "0"), "timeout");

    drop(session);
    daemon.connect().acquire("k", 5);
}

#[test]
fn a_telnet_session_gets_a_lock_and_loses_it_at_its_end() {
    let tools = needs!("python3", "telnet");
    let daemon = Daemon::start(&[]);
    let mut session = telnet(&tools, &daemon);
    session.type_slowly("l\nk\n10\n");
    session.expect_line("a grant", |line| parse_grant(line, "ok").is_some());
    assert_eq!(daemon.connect().request("l", "k", "0"), "timeout");

    drop(session);
    daemon.connect().acquire("k", 5);
}

/// On Ctrl-C telnet throws away all replies until the server has answered its timing mark: a
/// server that does not is silent for the rest of the session.
#[test]
fn telnet_shows_replies_after_ctrl_c_within_a_frame() {
    let tools = needs!("python3", "telnet");
    let daemon = Daemon::start(&[]);
    let mut session = telnet(&tools, &daemon);
    for round in 1..=3 {
        session.type_slowly("l\nhalf\n");
        session.type_slowly(CTRL_C);
        session.type_slowly("ping\n_\n_\n");
        session.expect_line(&format!("reply {round} of 3"), |line| line == "ok");
    }
    // The half-typed frames were given up, not completed by what followed.
    assert_eq!(daemon.stats()["locks"], serde_json::json!([]));
}

#[test]
fn the_reply_of_a_wait_still_appears_in_a_telnet_after_ctrl_c() {
    // A grant that comes before the answer to the interrupt is dropped by telnet itself.
    fair_test(|| {
        let tools = needs!("python3", "telnet");
        let daemon = Daemon::start(&[]);
        let mut holder = daemon.connect();
        let held = holder.acquire("k", 0);
        let mut session = telnet(&tools, &daemon);
        session.type_slowly("l\nk\n10\n");
        daemon.wait_for_waiters("k", 1);

        session.type_slowly(CTRL_C);
        // Long enough for the two commands to have crossed: the server meets them while it waits.
        thread::sleep(Duration::from_millis(500));
        assert_eq!(holder.request("r", "k", &held.token), "ok");

        session.expect_line("the grant", |line| parse_grant(line, "ok").is_some());
    });
}

// ---- running programs ------------------------------------------------------------------------

const CTRL_C: &str = "\x03";

/// A program that is to talk to `daemon`.
fn netcat(program: &Program, options: &[&str], daemon: &Daemon) -> Command {
    let mut command = program.command();
    command.args(options);
    if program.path().ends_with("socat") {
        command.arg(format!("TCP:{}", daemon.addr()))
    } else {
        command.arg("127.0.0.1").arg(daemon.port().to_string())
    };
    command
}

/// A telnet at a terminal, past its greeting. Without a terminal it knows no line mode and no
/// Ctrl-C, so Python lends it one.
fn telnet([python, telnet]: &[Program; 2], daemon: &Daemon) -> Session {
    let mut command = python.command();
    command
        .args(["-c", "import pty, sys; pty.spawn(sys.argv[1:])"])
        .arg(telnet)
        .args(["127.0.0.1", &daemon.port().to_string()])
        .env("TERM", "dumb");
    let session = Session::start(command);
    session.expect_line("the greeting", |line| {
        line.starts_with("Escape character is")
    });
    session
}

struct Outcome {
    output: String,
    took: Duration,
}

/// Does `printf INPUT | command`, and insists that it ends.
fn pipe(command: Command, input: &[u8]) -> Outcome {
    let began = Instant::now();
    let mut session = Session::start(command);
    session
        .stdin
        .as_mut()
        .expect("not hung up yet")
        .write_all(input)
        .expect("it reads its stdin");
    session.hang_up_stdin();
    session.wait_for_end();
    Outcome {
        took: began.elapsed(),
        output: session.output(),
    }
}

/// A program with its stdin and stdout in our hands; ended when dropped.
struct Session {
    child: Child,
    stdin: Option<ChildStdin>,
    output: Arc<Mutex<String>>,
    /// How much of the output has been looked at.
    seen: std::cell::Cell<usize>,
}

impl Session {
    fn start(mut command: Command) -> Session {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let mut stdout = child.stdout.take().expect("stdout is piped");
        let output = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&output);
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut chunk) {
                sink.lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&chunk[..count]));
            }
        });
        Session {
            stdin: child.stdin.take(),
            child,
            output,
            seen: Default::default(),
        }
    }

    fn send(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("not hung up yet");
        stdin
            .write_all(text.as_bytes())
            .expect("it reads its stdin");
        stdin.flush().expect("it reads its stdin");
    }

    /// Sends `text` a key at a time, so that hardly two bytes of a frame come together.
    fn type_slowly(&mut self, text: &str) {
        for byte in text.bytes() {
            self.send(char::from(byte).encode_utf8(&mut [0; 4]));
            thread::sleep(Duration::from_millis(3));
        }
    }

    fn hang_up_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for a line that `fits`, and gives it without its end. Lines before it, such as the
    /// echo of what was typed, are passed over.
    fn expect_line(&self, what: &str, fits: impl Fn(&str) -> bool) -> String {
        let deadline = Deadline::after(PATIENCE);
        loop {
            if let Some(line) = self.next_line(&fits) {
                return line;
            }
            assert!(
                !deadline.is_over(),
                "{what} did not appear in {:?}",
                self.output()
            );
            thread::sleep(Duration::from_millis(3));
        }
    }

    fn next_line(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let output = self.output();
        while let Some(length) = output[self.seen.get()..].find('\n') {
            let line = output[self.seen.get()..][..length].trim_matches('\r');
            self.seen.set(self.seen.get() + length + 1);
            // The terminal shows Ctrl-C where it was typed, and stays in that line.
            let line = line.trim_start_matches("^C");
            if fits(line) {
                return Some(line.to_owned());
            }
        }
        None
    }

    fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    fn wait_for_end(&mut self) {
        eventually(PATIENCE, "the program ended by itself", || {
            self.child.try_wait().expect("it is our child").is_some()
        });
        // Its output comes through another thread.
        eventually(PATIENCE, "its output ended", || {
            Arc::strong_count(&self.output) == 1
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Both fail only if it has ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
