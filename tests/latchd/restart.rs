//! A restart in order keeps every lock: `--state-file`.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::FlockOperation;
use tempfile::TempDir;

use crate::fences::{inject, tracer};
use crate::support::at_the_end::AtTheEnd;
use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::limited::{behind, with_surroundings_of};
use crate::support::locks::flocked;
use crate::support::needs::needs;
use crate::support::silent::free_port;
use crate::support::{eventually, fence, Client, Daemon, Event, Grant, Signal, PATIENCE};

/// A server at a Unix socket that hands over to the next one there.
pub struct Service {
    pub directory: TempDir,
    options: Vec<String>,
}

impl Service {
    pub fn new(options: &[&str]) -> Service {
        Service {
            directory: tempfile::tempdir().expect("a directory"),
            options: options.iter().map(|option| option.to_string()).collect(),
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub fn file(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    fn staged(&self) -> PathBuf {
        self.directory.path().join("state.new")
    }

    /// Whether the file is that of a server that runs, or has crashed.
    pub fn is_open(&self) -> bool {
        let text = fs::read_to_string(self.file());
        text.is_ok_and(|text| text.contains(r#""state":"open""#))
    }

    /// Lets the next server find what a first one finds: nothing.
    fn begin_anew(&self) {
        for name in ["state", "state.lock"] {
            let removed = fs::remove_file(self.directory.path().join(name));
            removed.expect("a server has used it");
        }
    }

    pub fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    pub fn start_with(&self, more: &[&str]) -> Daemon {
        let file = self.file();
        let mut options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        options.extend(more);
        options.extend(["--state-file", file.to_str().expect("UTF-8")]);
        let daemon = Daemon::start_unix(&self.socket(), &options);
        // It listens before it opens the file, and serves after that.
        assert_eq!(self.connect().request("ping", "_", "_"), "ok");
        daemon
    }

    /// A server with the file that has this socket, too.
    pub fn command(&self, port: &str, socket: &Path) -> Command {
        let mut command = Daemon::command();
        command.args(["--port", port, "--unix"]).arg(socket);
        command.arg("--state-file").arg(self.file());
        command
    }

    /// What a server says that cannot start.
    pub fn refusal(&self) -> String {
        let output = self.command("off", &self.socket()).output();
        let output = output.expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).expect("UTF-8")
    }

    pub fn connect(&self) -> Client {
        Client::unix(&self.socket())
    }
}

pub fn stop(daemon: &Daemon) {
    daemon.signal(Signal::TERM);
    let status = daemon.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
}

/// A client that holds a lock and can come back for it.
pub fn held(service: &Service, key: &str, lease: u64) -> (Client, Grant) {
    let mut client = service.connect();
    assert_eq!(
        client.request("hello", "_", "adopt"),
        "ok adopt slots keeps proofs status ages"
    );
    let grant = client.acquire_for(key, 0, lease);
    (client, grant)
}

#[test]
fn a_relative_path_is_that_of_the_directory_of_the_start() {
    for option in ["--state-file", "--handover-file"] {
        let service = Service::new(&[]);
        let directory = service.directory.path();
        let start = || {
            let mut command = Daemon::command();
            command.args(["--port", "off", "--unix", "socket", option, "state"]);
            command.args(["--no-auto-release-on-disconnect"]);
            command.current_dir(directory);
            Daemon::from_command(command)
        };
        let first = start();
        first.wait_for_log("listening", PATIENCE);
        let token = service.connect().acquire("k", 0).token;
        let path = directory.join("state");
        assert!(path.is_file(), "{option}");
        first.signal(Signal::TERM);
        assert!(first.wait_exit(PATIENCE).is_some_and(|it| it.success()));
        let next = start();
        next.wait_for_log(&format!("took-over path={}", path.display()), PATIENCE);
        next.wait_for_log("listening", PATIENCE);
        assert_eq!(service.connect().request("n", "k", &token), "ok 33");
    }
}

/// Here because the port cannot be printed. What the file had is not lost with this server.
#[test]
fn a_start_that_fails_late_leaves_the_file() {
    let service = Service::new(&[]);
    let first = service.start();
    let (client, grant) = held(&service, "k", 600);
    stop(&first);
    drop(client);
    let full = fs::File::options().write(true).open("/dev/full");
    let mut command = service.command(&free_port().to_string(), &service.socket());
    command.arg("--print-port");
    command.stdout(full.expect("every host has it"));
    let output = command.output().expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(!service.is_open(), "{output:?}");

    let _second = service.start();
    let mut other = service.connect();
    assert_eq!(other.request("l", "k", "0"), "timeout");
    assert_eq!(other.request("adopt", "k", &grant.token), "ok 33");
}

/// The closed file is in its place by then, and would soon be out of date.
#[test]
fn a_server_that_cannot_sync_the_directory_opens_the_file_again() {
    let Some(strace) = tracer() else { return };
    let service = Service::new(&[]);
    let first = service.start();
    let (mut client, grant) = held(&service, "k", 600);
    // The first call is about the file itself.
    let recover = inject(&strace, &first, "fsync:error=EIO:when=2");
    first.signal(Signal::TERM);
    first.wait_for_log("cannot-hand-over", PATIENCE);
    assert!(service.is_open() || first.log().contains("handed-over"));
    recover();
    let _ = client.try_send(format!("r\nk\n{}\n", grant.token).as_bytes());
    let status = first.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0));
    assert!(!service.is_open(), "{}", first.log());
}

#[test]
fn a_lock_file_of_another_user_is_refused() {
    needs!(root);
    const OTHER: u32 = 54_321;
    let service = Service::new(&[]);
    let lock = service.directory.path().join("state.lock");
    let file = fs::File::create(&lock).expect("there is room");
    chown(&lock, Some(OTHER), None).expect("we are root");
    drop(file);
    for is_locked in [false, true] {
        let _locked = is_locked.then(|| flocked(&lock, FlockOperation::LockExclusive));
        let refusal = service.refusal();
        assert!(
            refusal.contains("state.lock: it belongs to another user"),
            "{refusal}"
        );
    }
}

/// Puts a copy in the place of the file. At the next change, the server does not append to it, but
/// replaces it.
pub fn displace(service: &Service) {
    let copy = service.directory.path().join("copy");
    fs::copy(service.file(), &copy).expect("it is written");
    fs::rename(copy, service.file()).expect("it is there");
}

/// Puts something where a server writes its file before it renames it, and which it cannot remove.
pub fn obstruct(service: &Service) {
    if service.file().exists() {
        displace(service);
    }
    fs::create_dir(service.staged()).expect("a directory");
}

/// Lets a server write its file again.
pub fn unobstruct(service: &Service) {
    fs::remove_dir(service.staged()).expect("it is empty");
}

/// The next reply; `None` if the connection ends first.
fn reply(client: &mut Client) -> Option<String> {
    match client.next_event(PATIENCE) {
        Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
        Event::Nothing => panic!("no reply"),
        _ => None,
    }
}

/// Comes back for a lock as a client should, until `is_over`. Returns how often it did.
fn hold_on(service: &Service, key: &str, is_over: &AtomicBool) -> usize {
    let (mut client, grant) = held(service, key, 60);
    let mut returns = 0;
    while !is_over.load(Ordering::Relaxed) {
        let asked = format!("adopt\n{key}\n{} 60\n", grant.token);
        let sent = client.try_send(asked.as_bytes());
        match sent.ok().and_then(|()| reply(&mut client)) {
            Some(reply) => assert_eq!(reply, "ok 60", "{key} is lost"),
            None => {
                let mut next = None;
                eventually(PATIENCE, "a server is there", || {
                    next = Client::try_unix(&service.socket());
                    next.is_some()
                });
                client = next.expect("just connected");
                let _ = client.try_send(b"hello\n_\nadopt\n");
                let _ = reply(&mut client);
                returns += 1;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    returns
}

#[test]
fn twenty_restarts_in_a_row_lose_no_lock_and_give_none_twice() {
    let service = Service::new(&[]);
    let mut daemon = service.start();
    let is_over = AtomicBool::new(false);
    let keys: Vec<String> = (0..6).map(|number| format!("key-{number}")).collect();
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        let holders: Vec<_> = keys
            .iter()
            .map(|key| {
                let (service, is_over) = (&service, &is_over);
                scope.spawn(move || hold_on(service, key, is_over))
            })
            .collect();
        let mut witness = service.connect();
        eventually(PATIENCE, "all hold", || {
            let stats = witness.stats();
            stats["locks"].as_array().map(Vec::len) == Some(keys.len())
        });
        drop(witness);
        for _ in 0..20 {
            stop(&daemon);
            daemon = service.start();
            let mut witness = service.connect();
            for key in &keys {
                let reply = witness.request("l", key, "0");
                assert_eq!(reply, "timeout", "{key} was given twice");
            }
        }
        is_over.store(true, Ordering::Relaxed);
        let returns = holders
            .into_iter()
            .map(|holder| holder.join().expect("it held on"));
        assert!(returns.sum::<usize>() >= 60, "the clients saw few restarts");
    });
    drop(daemon);
}

/// The steps of a server with the names and the contents of its files, and with its sockets.
const STEPS: &str = "openat,flock,fsync,rename,unlink,unlinkat,bind,listen,socket";

/// The leases of four holders. The open file has two of them, the closed file has all.
const LEASES: [u64; 4] = [30, 3600, 30, 3600];

/// What a kill leaves is a whole file; the file is closed only until something is served.
#[test]
fn a_kill_between_any_two_steps_of_a_start_shares_no_lock() {
    let strace = needs!("strace");
    let service = Service::new(&[]);
    let first = service.start();
    let holders: Vec<_> = (0..)
        .zip(LEASES)
        .map(|(number, lease)| held(&service, &format!("k{number}"), lease))
        .collect();
    stop(&first);
    let content = fs::read(service.file()).expect("it is written");
    let mut outcomes = HashMap::new();
    for step in 1.. {
        fs::write(service.file(), &content).expect("there is room");
        let mut plain = service.command("off", &service.socket());
        plain.arg("--idle-exit").arg("1");
        let inject = format!("inject={STEPS}:signal=KILL:when={step}");
        let strace = strace.path().to_string_lossy();
        let wrapper = [&strace, "-f", "-qq", "-o", "/dev/null", "-e", &inject];
        let command = with_surroundings_of(&Daemon::command(), behind(&wrapper, &plain));
        let killed = Daemon::from_command(command);
        let status = killed.wait_exit(PATIENCE).expect("it ends");
        let was_killed = status.code().is_none_or(|code| code != 0);
        let has_listened = killed.log().contains("listening");
        if !was_killed {
            assert!(step > 10 && has_listened, "{step}: {}", killed.log());
            break;
        }
        let is_open = service.is_open();
        let next = service.start();
        let mut client = service.connect();
        let alive = holders.iter().enumerate().filter(|(number, (_, grant))| {
            client.request("n", &format!("k{number}"), &grant.token) == "ok 33"
        });
        let alive = alive.count();
        assert_eq!(alive, if is_open { 2 } else { 4 }, "step {step}");
        *outcomes.entry(alive).or_insert(0) += 1;
        drop(client);
        next.signal(Signal::KILL);
        next.wait_exit(PATIENCE).expect("it ends");
    }
    assert!(outcomes[&4] > 0, "{outcomes:?}");
}

#[test]
fn a_kill_between_any_two_steps_of_a_stop_shares_no_lock() {
    let Some(strace) = tracer() else { return };
    let service = Service::new(&[]);
    let mut outcomes = HashMap::new();
    for step in 1.. {
        let daemon = service.start();
        let holders: Vec<_> = (0..)
            .zip(LEASES)
            .map(|(number, lease)| held(&service, &format!("k{step}-{number}"), lease))
            .collect();
        let calls = "openat,fsync,rename,unlink,unlinkat,exit_group";
        let recover = inject(
            &strace,
            &daemon,
            &format!("{calls}:signal=KILL:when={step}"),
        );
        daemon.signal(Signal::TERM);
        let status = daemon.wait_exit(PATIENCE).expect("it ends");
        recover();
        let next = service.start();
        let mut client = service.connect();
        let alive = holders.iter().enumerate().filter(|(number, (_, grant))| {
            client.request("r", &format!("k{step}-{number}"), &grant.token) == "ok"
        });
        *outcomes.entry(alive.count()).or_insert(0) += 1;
        drop(client);
        next.signal(Signal::KILL);
        next.wait_exit(PATIENCE).expect("it ends");
        service.begin_anew();
        if status.code() == Some(0) {
            break;
        }
    }
    assert!(
        outcomes.keys().all(|alive| [2, 4].contains(alive)) && outcomes.len() == 2,
        "{outcomes:?}"
    );
}

/// Fences rise, and leases are as long as they were.
#[test]
fn a_clock_that_is_set_back_over_a_restart_costs_nothing() {
    let libfaketime = needs!("libfaketimeMT.so.1");
    let service = Service::new(&[]);
    let first = service.start();
    let (mut client, grant) = held(&service, "k", 600);
    let used = client.acquire("other", 0);
    stop(&first);
    let mut command = service.command("off", &service.socket());
    with_a_clock_of_its_own(&mut command, &libfaketime).env("FAKETIME", "-3d");
    let second = Daemon::from_command(command);
    second.wait_for_log("listening", PATIENCE);
    let mut client = service.connect();
    assert_eq!(client.request("l", "k", "0"), "timeout");
    let stats = client.stats();
    let left = stats["locks"][0]["lease_expires_in_s"].as_f64();
    let left = left.unwrap_or_else(|| panic!("{stats}"));
    assert!((580.0..=600.0).contains(&left), "{left}");
    let newer = client.acquire("newer", 0);
    assert!(fence(&newer.token) > fence(&used.token));
    assert_eq!(client.request("adopt", "k", &grant.token), "ok 33");
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    let pid = second.pid();
    second.signal(Signal::KILL);
    second.wait_exit(PATIENCE).expect("it ends");
    clear_up_after(pid);
}
