//! `lfpd` through real sockets: replies, files, who may ask, and what the usual client forces.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::lfp::{
    ask, command, dead_pid, greeted, lock_dirs, names_in, Alive, Lfpd, Rxtx, BUSY, DENIED, OKAY,
};
use crate::support::amount::amount;
use crate::support::barrier::Barrier;
use crate::support::limited::{copy_program, with_surroundings_of, without_users};
use crate::support::needs::{needs, skipped, Program};
use crate::support::stalls::fair_test;
use crate::support::syslog::Syslog;
use crate::support::{eventually, is_soon, program, Client, Daemon, Event, Signal, PATIENCE};

/// Within this the client must have sent what the server is to see before it greets (2 ms).
const PROMPT: Duration = Duration::from_micros(1500);

fn own_pid() -> u32 {
    std::process::id()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// One test at a time where clients and servers must not keep each other waiting.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

// ---------------------------------------------------------------------------------------------
// Words

#[test]
fn random_bytes_lock_nothing_and_delay_no_client() {
    let server = Lfpd::start(&[]);
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let pieces: [&[u8]; 10] = [
        b"lock ", b"unlock ", b"/dev/", b"lfpd-a ", b"-1", b"\n", b"\r\n", b"\xff", b"\0", b"..",
    ];
    // Few clients with much to say: for each, the kernel's whole list of connections is read, which
    // has those that other tests have just closed.
    for _ in 0..20 {
        let mut text = Vec::new();
        for _ in 0..random() % 600 {
            match random() % 3 {
                0 => text.push(random().to_le_bytes()[0]),
                _ => text.extend(pieces[(random() % 10) as usize]),
            }
        }
        let mut client = server.daemon.connect();
        let _ = client.try_send(&text);
        client.half_close();
    }
    assert_eq!(ask(&mut server.connect(), "noop"), OKAY);
    assert!(server.files().is_empty(), "{:?}", server.files());
}

// ---------------------------------------------------------------------------------------------
// Connections

#[test]
fn silent_and_deaf_peers_delay_no_client() {
    let server = Lfpd::start(&[]);
    let _silent: Vec<Client> = (0..20).map(|_| server.connect()).collect();
    let mut deaf = server.connect();
    let writer = {
        let mut writer = deaf.writer();
        thread::spawn(
            move || {
                while writer.write_all(&b"noop\n".repeat(1000)).is_ok() {}
            },
        )
    };
    for _ in 0..20 {
        assert_eq!(ask(&mut server.connect(), "noop"), OKAY);
    }
    // It does not take its replies, and is hung up on.
    eventually(PATIENCE, "the deaf one is dropped", || writer.is_finished());
    let _ = deaf.next_bytes(1, Duration::from_millis(10));
}

#[test]
fn one_too_many_is_refused_in_the_place_of_the_greeting() {
    let server = Lfpd::start(&["--max-connections", "2"]);
    let first = server.connect();
    let _second = server.connect();
    let mut third = server.daemon.connect();
    third.expect(DENIED);
    third.expect_eof();
    let rxtx = Rxtx {
        server: server.addr(),
    };
    let refused = rxtx.lock("/dev/lfpd-a", own_pid());
    assert!(!refused.is_ok_and(|call| call.succeeded));
    drop(first);
    eventually(PATIENCE, "there is room again", || {
        let event = server.daemon.connect().next_event(PATIENCE);
        matches!(event, Event::Line(line) if line.starts_with(b"220 "))
    });
}

#[test]
fn one_user_gets_a_quarter_of_the_places_and_others_the_rest() {
    let nc = needs!("nc");
    let server = Lfpd::start(&["--max-connections", "32"]);
    let mut crowd: Vec<Client> = (0..8).map(|_| server.connect()).collect();
    let mut ninth = server.daemon.connect();
    ninth.expect(DENIED);
    let end = ninth.next_event(PATIENCE);
    assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    server.daemon.wait_for_log("turned-away", PATIENCE);
    if is_root() {
        assert_eq!(as_a_stranger(&nc, &server, "noop\n"), ["200 Command okay."]);
    } else {
        skipped(&["root"]);
    }
    assert_eq!(ask(&mut crowd[0], "noop"), OKAY);
    drop(crowd.pop());
    eventually(PATIENCE, "this user has room again", || {
        let event = server.daemon.connect().next_event(PATIENCE);
        matches!(event, Event::Line(line) if line.starts_with(b"220 "))
    });
}

#[test]
fn a_stop_signal_waits_for_commands_and_leaves_the_locks() {
    let server = Lfpd::start(&[]);
    let own = own_pid();
    let mut client = server.connect();
    let _idle = server.connect();
    server.daemon.signal(Signal::STOP);
    let lines: String = (0..50)
        .map(|at| format!("lock /dev/lfpd-{at} {own}\n"))
        .collect();
    client.send(&lines);
    server.daemon.signal(Signal::TERM);
    server.daemon.signal(Signal::CONT);
    let status = server.daemon.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", server.daemon.log());
    for _ in 0..50 {
        client.expect(OKAY);
    }
    assert_eq!(server.files().len(), 50);
}

#[test]
fn a_lock_directory_that_may_not_be_searched_is_an_error() {
    needs!(root);
    // Without these, root may do no more than other users.
    let server = Lfpd::start_behind(&["setpriv", "--bounding-set=-dac_override,-dac_read_search"]);
    let mut client = server.connect();
    let directory = server.lock_file("");
    let mode = |mode| fs::set_permissions(&directory, fs::Permissions::from_mode(mode));
    mode(0o444).expect("it is ours");
    let lock = format!("lock /dev/lfpd-a {}", own_pid());
    let refused = ask(&mut client, &lock);
    mode(0o755).expect("it is ours");
    assert!(refused.starts_with("550 "), "{refused:?}");
    server
        .daemon
        .wait_for_log("cannot-use-lock-files", PATIENCE);
    assert_eq!(ask(&mut client, &lock), OKAY);
}

#[test]
fn a_stop_signal_that_was_blocked_at_the_start_ends_the_server() {
    let server = Lfpd::start_behind(&["env", "--block-signal"]);
    server.daemon.signal(Signal::TERM);
    let status = server.daemon.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn commands_before_the_stop_signal_are_done_even_if_slow() {
    fair_test(commands_before_the_stop_signal_are_done_even_if_slow_once);
}

fn commands_before_the_stop_signal_are_done_even_if_slow_once() {
    let strace = needs!("strace");
    const COUNT: usize = 20;
    // 20 ms for each lock.
    let server = Traced::start(&strace, "inject=linkat:delay_enter=20000", None);
    let mut client = server.connect();
    let own = own_pid();
    let lines: String = (0..COUNT)
        .map(|at| format!("lock /dev/lfpd-{at} {own}\n"))
        .collect();
    client.send(&lines);
    client.expect(OKAY);
    server.server.signal(Signal::TERM);
    for _ in 1..COUNT {
        client.expect(OKAY);
    }
    client.expect_eof();
    assert_eq!(server.files().len(), COUNT);
}

// ---------------------------------------------------------------------------------------------
// Ways to start

struct Inetd {
    child: Child,
    _dirs: tempfile::TempDir,
    own: std::path::PathBuf,
}

/// Starts a program with `socket` on all three standard descriptors, as inetd does.
fn spawn_on(mut command: Command, socket: impl Into<OwnedFd>) -> Child {
    let socket: OwnedFd = socket.into();
    let copy = || Stdio::from(socket.try_clone().expect("a descriptor"));
    command.stdin(copy()).stdout(copy()).stderr(copy());
    command.spawn().expect("lfpd was built")
}

impl Inetd {
    /// Starts `lfpd` as inetd does.
    fn start(socket: OwnedFd, args: &[&str]) -> Inetd {
        let dirs = lock_dirs();
        let own = dirs.path().join("own");
        let mut command = command(dirs.path());
        command.args(args);
        Inetd {
            child: spawn_on(command, socket),
            _dirs: dirs,
            own,
        }
    }

    fn wait(&mut self) -> Option<i32> {
        let mut status = None;
        eventually(PATIENCE, "it ends", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }
}

impl Drop for Inetd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let theirs = TcpStream::connect(listener.local_addr().expect("an address")).expect("connect");
    (theirs, listener.accept().expect("accept").0)
}

#[test]
fn a_connected_socket_on_descriptor_0_sees_only_replies() {
    for args in [&[][..], &["--inetd"], &["--inetd", "--debug"], &["--stdio"]] {
        let (mut theirs, ours) = tcp_pair();
        let mut inetd = Inetd::start(ours.into(), args);
        let own = own_pid();
        let lines = format!(
            "lock /dev/lfpd-a {own}\nlock /dev/lfpd-b {}\nlokc\nquit\n",
            dead_pid()
        );
        theirs.write_all(lines.as_bytes()).expect("sent");
        let mut text = String::new();
        theirs.read_to_string(&mut text).expect("replies");
        let starts: Vec<&str> = text.lines().map(|line| &line[..4]).collect();
        assert_eq!(starts, ["220 ", "200 ", "200 ", "500 ", "221 "], "{text}");
        assert_eq!(inetd.wait(), Some(0));
        assert_eq!(
            names_in(&inetd.own).len(),
            2,
            "locks outlive the connection"
        );
    }
}

#[test]
fn a_pair_of_unix_sockets_is_served() {
    let (mut theirs, ours) = UnixStream::pair().expect("a socket pair");
    let mut inetd = Inetd::start(ours.into(), &[]);
    theirs
        .write_all(format!("lock /dev/lfpd-a {}\n", own_pid()).as_bytes())
        .expect("sent");
    theirs.shutdown(Shutdown::Write).expect("half a close");
    let mut text = String::new();
    theirs.read_to_string(&mut text).expect("replies");
    assert!(text.ends_with(&format!("{OKAY}\n")), "{text}");
    assert_eq!(inetd.wait(), Some(0));
}

#[test]
fn the_end_of_the_peer_or_a_signal_ends_a_server_for_one() {
    let (theirs, ours) = tcp_pair();
    let mut inetd = Inetd::start(ours.into(), &[]);
    drop(theirs);
    assert_eq!(inetd.wait(), Some(0));
    let (mut theirs, ours) = tcp_pair();
    let mut inetd = Inetd::start(ours.into(), &[]);
    let _ = theirs.read(&mut [0; 1024]).expect("a greeting");
    let pid = rustix::process::Pid::from_child(&inetd.child);
    rustix::process::kill_process(pid, Signal::TERM).expect("a child");
    assert_eq!(inetd.wait(), Some(0));
    let mut rest = String::new();
    theirs.read_to_string(&mut rest).expect("the end");
    assert_eq!(rest, "");
}

#[test]
fn a_listening_socket_on_descriptor_0_is_accepted_from() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    let _inetd = Inetd::start(listener.into(), &[]);
    for _ in 0..3 {
        let mut client = Client::tcp(addr);
        greeted(&mut client);
        assert_eq!(ask(&mut client, "noop"), OKAY);
    }
}

#[test]
fn a_failure_under_inetd_is_in_the_syslog_and_not_on_the_wire() {
    let Some(syslog) = Syslog::new() else { return };
    let dirs = lock_dirs();
    let (mut theirs, ours) = tcp_pair();
    let command = syslog.reached_by(command(dirs.path()).arg("--nonsense"));
    let mut child = spawn_on(command, ours);
    let expected = format!("<27>lfpd[{}]: unknown option: --nonsense", child.id());
    assert_eq!(syslog.next(), expected);
    assert_eq!(child.wait().expect("a child").code(), Some(2));
    let mut text = String::new();
    theirs.read_to_string(&mut text).expect("the end");
    assert_eq!(text, "");
}

#[test]
fn under_inetd_the_log_can_go_to_the_syslog() {
    let Some(syslog) = Syslog::new() else { return };
    let dirs = lock_dirs();
    let (mut theirs, ours) = tcp_pair();
    let mut command = command(dirs.path());
    let command = syslog.reached_by(command.args(["--log", "syslog", "--debug"]));
    let mut child = spawn_on(command, ours);
    let lines = format!("lock /dev/lfpd-a {}\nquit\n", own_pid());
    theirs.write_all(lines.as_bytes()).expect("sent");
    let message = std::iter::from_fn(|| Some(syslog.next())).find(|line| line.contains("lfpd-a"));
    let message = message.expect("just found");
    let header = format!("<31>lfpd[{}]: DEBUG ", child.id());
    assert!(message.starts_with(&header), "{message}");
    assert_eq!(child.wait().expect("a child").code(), Some(0));
}

// ---------------------------------------------------------------------------------------------
// Who may ask

/// Sends `lines` as a user who is neither root nor this one, if this process may change its user;
/// else as this one. Returns the replies.
fn as_a_stranger(nc: &Program, server: &Lfpd, lines: &str) -> Vec<String> {
    let port = server.daemon.port().to_string();
    as_a_stranger_at(nc, &["127.0.0.1", &port], lines)
}

/// The same to a place as nc takes it.
fn as_a_stranger_at(nc: &Program, place: &[&str], lines: &str) -> Vec<String> {
    let mut nc = nc.command();
    nc.arg("-N")
        .args(place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if is_root() {
        nc.uid(65_534);
    }
    let mut nc = nc.spawn().expect("nc of netcat-openbsd");
    let mut stdin = nc.stdin.take().expect("a pipe");
    stdin.write_all(lines.as_bytes()).expect("sent");
    drop(stdin);
    let output = nc.wait_with_output().expect("it ends");
    let text = String::from_utf8(output.stdout).expect("ASCII");
    text.lines().skip(1).map(str::to_owned).collect()
}

/// A process that is not the stranger's, or `None` and a note: in a container, process 1 may be.
fn process_of_another_user() -> Option<u32> {
    if is_root() {
        return Some(own_pid());
    }
    let own_user = rustix::process::geteuid().as_raw();
    let mut processes = fs::read_dir("/proc").expect("it is Linux").flatten();
    let found = processes.find_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        (process.metadata().ok()?.uid() != own_user).then_some(pid)
    });
    if found.is_none() {
        skipped(&["process of another user"]);
    }
    found
}

#[test]
fn no_user_may_ask_for_the_process_of_another() {
    let nc = needs!("nc");
    let Some(others) = process_of_another_user() else {
        return;
    };
    let sockets = tempfile::tempdir().expect("a directory");
    let permissions = fs::Permissions::from_mode(0o755);
    fs::set_permissions(sockets.path(), permissions).expect("it is ours");
    let socket = sockets.path().join("socket");
    let socket = socket.to_str().expect("UTF-8");
    let server = Lfpd::start(&["--unix", socket]);
    let mut client = server.connect();
    let (own, dead) = (own_pid(), dead_pid());
    // A stranger to a user who is not root is that user.
    let stranger = if is_root() {
        65_534
    } else {
        rustix::process::geteuid().as_raw()
    };
    let theirs = Alive::as_user(stranger);
    let pid = theirs.pid();
    let [denied, busy, okay] = [DENIED, BUSY, OKAY].map(str::trim_end);
    for place in [
        &["127.0.0.1", &server.daemon.port().to_string()][..],
        &["-U", socket],
    ] {
        let expect = |lines: String, replies: &[&str]| {
            assert_eq!(as_a_stranger_at(&nc, place, &lines), replies, "{place:?}");
        };
        expect(format!("lock /dev/lfpd-b {others}\n"), &[denied]);
        assert!(server.files().is_empty());
        assert_eq!(ask(&mut client, &format!("lock /dev/lfpd-a {own}")), OKAY);
        expect(format!("unlock /dev/lfpd-a {pid}\n"), &[busy]);
        let lines = format!("lock /dev/lfpd-c {pid}\nunlock /dev/lfpd-c {pid}\n");
        expect(lines, &[okay, okay]);
        let of_own = if is_root() { denied } else { okay };
        expect(format!("unlock /dev/lfpd-a {own}\n"), &[of_own]);
        let _ = ask(&mut client, &format!("unlock /dev/lfpd-a {own}"));
        // The lock of a dead process is anybody's.
        let file = server.lock_file("LCK..lfpd-a");
        fs::write(file, format!("{dead:10}\n")).expect("written");
        expect(format!("unlock /dev/lfpd-a {dead}\n"), &[okay]);
    }
    server.daemon.wait_for_log("not-their-process", PATIENCE);
}

/// The namespace has no number for this test's user, nor for any other: the kernel gives all of
/// them the same one.
#[test]
fn users_unknown_to_the_namespace_lock_for_no_process() {
    let Some(wrapper) = without_users() else {
        return;
    };
    let server = Lfpd::start_behind(&wrapper);
    let mut client = server.connect();
    let lock = format!("lock /dev/lfpd-a {}", own_pid());
    assert_eq!(ask(&mut client, &lock), DENIED);
}

#[test]
fn the_rule_about_users_can_be_relaxed() {
    let nc = needs!("nc");
    let Some(others) = process_of_another_user() else {
        return;
    };
    for (rule, is_logged) in [("log", true), ("off", false)] {
        let server = Lfpd::start(&["--peer-uid", rule]);
        let replies = as_a_stranger(&nc, &server, &format!("lock /dev/lfpd-a {others}\n"));
        assert_eq!(replies, ["200 Command okay."]);
        let _ = ask(&mut server.connect(), "noop");
        server.daemon.signal(Signal::TERM);
        server.daemon.wait_exit(PATIENCE).expect("it ends");
        assert_eq!(server.daemon.log().contains("not-their-process"), is_logged);
    }
}

/// In a PID namespace of its own, where the numbers of processes can be chosen.
#[test]
fn a_lock_does_not_pass_to_another_users_process() {
    needs!(admin);
    needs!("python3");
    let dirs = lock_dirs();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lfpd/reused_number.py");
    let mut unshare = Command::new("timeout");
    unshare
        .args(["-k", "5", "50", "unshare", "--mount", "--pid", "--fork"])
        .args(["--kill-child", "--mount-proc", "python3"])
        .arg(script)
        .arg(program("lfpd"))
        .args(["own", "other"].map(|name| dirs.path().join(name)));
    let output = unshare.output().expect("timeout");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "dead number 200 200\n\
         reused number 200 200\n\
         same process 200 450 450\n\
         unused number 200 200\n\
         late number 450 True\n\
         own number 200 200 450\n\
         own number 200 200 450\n",
        "{said}"
    );
}

// ---------------------------------------------------------------------------------------------
// Files

/// A server of another user, on a directory with the sticky bit, and a connection to it. The other
/// directory is root's and has this mode.
fn server_of_another_user(dirs: &Path, mode_of_other: u32) -> (Daemon, Client) {
    for (name, mode) in [("", 0o755), ("own", 0o1777), ("other", mode_of_other)] {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(dirs.join(name), permissions).expect("it is ours");
    }
    let copy = dirs.join("lfpd");
    copy_program(program("lfpd"), &copy);
    let mut lfpd = Command::new(&copy);
    lfpd.args(command(dirs).get_args())
        .uid(65_534)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    listening(lfpd)
}

/// The server that `lfpd` starts, and a connection to it.
fn listening(mut lfpd: Command) -> (Daemon, Client) {
    lfpd.args(["--listen", "0", "--print-port"]);
    let daemon = Daemon::from_command(lfpd);
    let mut client = daemon.connect();
    greeted(&mut client);
    (daemon, client)
}

#[test]
fn a_stale_lock_that_may_not_be_removed_is_denied_and_stays() {
    needs!(root);
    let dirs = lock_dirs();
    let own = dirs.path().join("own");
    let stale = format!("{:10}\n", dead_pid());
    fs::write(own.join("LCK..lfpd-a"), &stale).expect("written");
    let (daemon, mut client) = server_of_another_user(dirs.path(), 0o755);
    let pid = own_pid();
    assert_eq!(ask(&mut client, &format!("lock /dev/lfpd-a {pid}")), DENIED);
    assert_eq!(
        ask(&mut client, &format!("unlock /dev/lfpd-a {pid}")),
        DENIED
    );
    assert_eq!(names_in(&own), ["LCK..lfpd-a"]);
    assert_eq!(ask(&mut client, &format!("lock /dev/lfpd-b {pid}")), OKAY);
    daemon.wait_for_log("cannot-use-lock-files", PATIENCE);
}

#[test]
fn a_directory_that_cannot_be_opened_is_not_taken_for_empty() {
    let strace = needs!("strace");
    for error in ["EMFILE", "ENFILE", "ENOMEM", "EIO"] {
        let injection = format!("inject=openat:error={error}:when=1");
        let server = Traced::start(&strace, &injection, Some("other"));
        let path = server.dirs.path().join("other/LCK..lfpd-a");
        fs::write(path, "         1\n").expect("written");
        let mut client = server.connect();
        let lock = format!("lock /dev/lfpd-a {}", own_pid());
        assert_eq!(ask(&mut client, &lock), DENIED, "{error}");
        assert_eq!(ask(&mut client, &lock), BUSY, "{error}");
        assert!(server.files().is_empty());
    }
}

#[test]
fn if_one_name_cannot_be_made_none_is() {
    let strace = needs!("strace");
    let own = own_pid();
    for (error, reply) in [("EEXIST", BUSY), ("ENOSPC", DENIED), ("EDQUOT", DENIED)] {
        let inject = format!("inject=linkat:error={error}:when=2");
        let server = Traced::start(&strace, &inject, None);
        let mut client = server.connect();
        let lock = format!("lock /dev/lfpd/tts/0 {own}");
        assert_eq!(ask(&mut client, &lock), reply, "{error}");
        assert!(server.files().is_empty(), "{error}: {:?}", server.files());
        assert_eq!(ask(&mut client, &lock), OKAY, "{error}");
        assert_eq!(server.files(), ["LCK..0", "LCK..lfpd_tts_0"]);
    }
}

#[test]
fn without_hard_links_each_name_gets_a_file_of_its_own() {
    let strace = needs!("strace");
    for error in ["EPERM", "EOPNOTSUPP", "EMLINK", "EIO", "EXDEV", "EINVAL"] {
        let server = Traced::start(&strace, &format!("inject=linkat:error={error}"), None);
        let holder = Alive::new();
        let (own, pid) = (own_pid(), holder.pid());
        let mut client = server.connect();
        let mut say = |verb: &str, pid: u32| ask(&mut client, &format!("{verb} /dev/lfpd/0 {pid}"));
        assert_eq!(say("lock", own), OKAY, "{error}");
        assert_eq!(server.files(), ["LCK..0", "LCK..lfpd_0"]);
        let path = server.dirs.path().join("own/LCK..lfpd_0");
        let content = fs::read_to_string(path).expect("readable");
        assert_eq!(content, format!("{own:10}\n"));
        assert_eq!(say("lock", pid), BUSY);
        assert_eq!(say("unlock", own), OKAY);
        assert!(server.files().is_empty(), "{error}");
        assert_eq!(say("lock", pid), OKAY);
        drop(holder);
        eventually(PATIENCE, "the lock of the dead is gone", || {
            server.files().is_empty()
        });
    }
}

#[test]
fn a_lock_that_cannot_be_written_to_the_disk_is_not_made() {
    let strace = needs!("strace");
    let null = Path::new("/dev/null");
    for more in [&[][..], &["-e", "inject=linkat:error=EPERM"]] {
        let options = [&["-e", "inject=fdatasync:error=EIO:when=1..2"], more].concat();
        let server = Traced::start_with(&strace, null, &options);
        let mut client = server.connect();
        let lock = format!("lock /dev/lfpd-a {}", own_pid());
        assert_eq!(ask(&mut client, &lock), DENIED);
        assert!(server.files().is_empty());
    }
}

/// A file system on an image, whose copy is what a power cut at that time would leave.
#[test]
fn a_lock_has_its_content_three_seconds_later_whatever_comes() {
    needs!(admin);
    let mkfs = needs!("mkfs.ext4");
    let dirs = lock_dirs();
    let [image, copy] = ["image", "copy"].map(|name| dirs.path().join(name));
    let made = fs::File::create(&image).and_then(|file| file.set_len(8 << 20));
    made.expect("there is room");
    let mut mkfs = mkfs.command();
    assert!(mkfs
        .arg("-q")
        .arg(&image)
        .status()
        .expect("it runs")
        .success());
    // In a mount namespace of its own. The names of new files are on the disk within a second, but
    // what is in them may take longer.
    let mounted = |image: &Path, script: &str| {
        let mut unshare = Command::new("unshare");
        let mount = "mount -o loop,commit=1 \"$1\" \"$2\" || exit 77; shift 2; ";
        unshare.args(["--mount", "--propagation", "private", "sh", "-c"]);
        unshare.arg(format!("{mount}{script}")).arg("sh");
        unshare.arg(image).arg(dirs.path().join("own"));
        unshare
    };
    if mounted(&image, "").status().expect("unshare").code() == Some(77) {
        return skipped(&["loop devices"]);
    }
    let plain = command(dirs.path());
    let mut server = mounted(&image, "exec \"$@\"");
    server.arg(plain.get_program()).args(plain.get_args());
    let (daemon, mut client) = listening(with_surroundings_of(&plain, server));
    let own = own_pid();
    assert_eq!(ask(&mut client, &format!("lock /dev/lfpd-a {own}")), OKAY);
    thread::sleep(Duration::from_secs(3));
    fs::copy(&image, &copy).expect("there is room");
    drop(daemon);
    let mut show = mounted(&copy, "cat \"$1\"");
    let output = show.arg(dirs.path().join("own/LCK..lfpd-a")).output();
    let found = String::from_utf8(output.expect("unshare").stdout).expect("text");
    assert_eq!(found, format!("{own:10}\n"));
}

/// What a server that was killed has left: whole lock files, or what is no lock at all.
fn check_left_overs(own: &Path, pids: &[u32]) {
    for name in names_in(own) {
        if name.starts_with("LCK..") {
            let content = fs::read_to_string(own.join(&name)).expect("readable");
            let is_whole = pids.iter().any(|pid| content == format!("{pid:10}\n"));
            assert!(is_whole, "{name}: {content:?}");
        } else {
            assert!(name.starts_with(".lfpd-"), "{name}");
        }
    }
}

/// A server on directories that another one has used, and a connection to it.
fn fresh_server(dirs: &Path) -> (Daemon, Client) {
    listening(command(dirs))
}

#[test]
fn a_server_killed_at_any_step_leaves_no_half_made_lock() {
    let strace = needs!("strace");
    let rename = "?renameat,?renameat2";
    for (call, nth) in [
        ("flock", 1),
        ("fchmod", 1),
        ("fdatasync", 1),
        ("linkat", 1),
        ("linkat", 2),
        (rename, 1),
        (rename, 2),
        (rename, 3),
        ("unlinkat", 1),
        ("unlinkat", 2),
        ("unlinkat", 3),
    ] {
        // LCK..5 comes before LCK..lfpd_5, and LCK..z after LCK..lfpd_z.
        for last_part in ["5", "z"] {
            check_kill(&strace, call, nth, last_part);
        }
    }
}

fn check_kill(strace: &Program, call: &str, nth: u32, last_part: &str) {
    let (own, dead) = (own_pid(), dead_pid());
    let target = format!("/dev/lfpd/{last_part} {own}");
    let server = Traced::start(
        strace,
        &format!("inject={call}:signal=KILL:when={nth}"),
        None,
    );
    let directory = server.dirs.path().join("own");
    let stale = directory.join(format!("LCK..lfpd_{last_part}"));
    fs::write(stale, format!("{dead:10}\n")).expect("written");
    let mut client = server.connect();
    client.send(&format!("lock {target}\nunlock {target}\n"));
    let mut reply_count = 0;
    while let Event::Line(_) = client.next_event(PATIENCE) {
        reply_count += 1;
    }
    assert!(reply_count < 2, "it was not killed at {call} {nth}");
    check_left_overs(&directory, &[own, dead]);

    let (_daemon, mut client) = fresh_server(server.dirs.path());
    let _ = ask(&mut client, &format!("unlock {target}"));
    for verb in ["lock", "unlock"] {
        let line = format!("{verb} {target}");
        assert_eq!(ask(&mut client, &line), OKAY, "{call} {nth}: {line}");
    }
    let left = names_in(&directory);
    assert!(!left.iter().any(|name| name.starts_with("LCK")), "{left:?}");
}

#[test]
fn a_server_killed_amid_traffic_leaves_whole_locks() {
    const ROUNDS: u64 = 8;
    const DEVICES: usize = 4;
    let dirs = lock_dirs();
    let directory = dirs.path().join("own");
    let own = own_pid();
    for round in 0..ROUNDS {
        let (daemon, mut first) = fresh_server(dirs.path());
        for at in 0..DEVICES {
            let device = format!("/dev/lfpd/{at} {own}");
            let _ = ask(&mut first, &format!("unlock {device}"));
            assert_eq!(ask(&mut first, &format!("lock {device}")), OKAY);
            assert_eq!(ask(&mut first, &format!("unlock {device}")), OKAY);
        }
        let clients: Vec<Client> = (0..DEVICES).map(|_| daemon.connect()).collect();
        thread::scope(|scope| {
            for (at, mut client) in clients.into_iter().enumerate() {
                scope.spawn(move || {
                    let lines = format!("lock /dev/lfpd/{at} {own}\nunlock /dev/lfpd/{at} {own}\n");
                    while client.try_send(lines.as_bytes()).is_ok() {
                        for _ in 0..2 {
                            let Event::Line(_) = client.next_event(PATIENCE) else {
                                return;
                            };
                        }
                    }
                });
            }
            thread::sleep(Duration::from_millis(20 + 7 * round));
            daemon.signal(Signal::KILL);
        });
        assert!(daemon.wait_exit(PATIENCE).is_some());
        check_left_overs(&directory, &[own]);
    }
}

#[test]
fn a_directory_that_may_not_be_searched_is_ignored() {
    needs!(root);
    let dirs = lock_dirs();
    let (_daemon, mut client) = server_of_another_user(dirs.path(), 0o700);
    let lock = format!("lock /dev/lfpd-a {}", own_pid());
    assert_eq!(ask(&mut client, &lock), OKAY);
    assert_eq!(names_in(&dirs.path().join("own")), ["LCK..lfpd-a"]);
}

#[test]
fn holders_who_are_many_leave_descriptors_for_those_who_ask() {
    let server = Lfpd::start_behind(&["prlimit", "--nofile=40:40"]);
    let mut client = server.connect();
    let holders: Vec<Alive> = (0..60).map(|_| Alive::new()).collect();
    for holder in &holders {
        let pid = holder.pid();
        assert_eq!(
            ask(&mut client, &format!("lock /dev/lfpd-{pid} {pid}")),
            OKAY
        );
    }
    assert_eq!(ask(&mut server.connect(), "noop"), OKAY);
}

#[test]
fn without_descriptors_nothing_is_locked_until_some_are_free() {
    let server = Lfpd::start_behind(&["env", "RUST_LOG=debug", "prlimit", "--nofile=32:32"]);
    let mut client = server.connect();
    let own = own_pid();
    let holder = Alive::new();
    let pid = holder.pid();
    assert_eq!(ask(&mut client, &format!("lock /dev/lfpd-a {pid}")), OKAY);
    fs::write(server.other_file("LCK..lfpd-b"), "         1\n").expect("written");
    let crowd: Vec<TcpStream> = (0..50)
        .map(|_| TcpStream::connect(server.addr()).expect("a place in the queue"))
        .collect();
    server.daemon.wait_for_log("cannot-accept", PATIENCE);
    for _ in 0..20 {
        let reply = ask(&mut client, &format!("lock /dev/lfpd-b {own}"));
        assert!([BUSY, DENIED].contains(&reply.as_str()), "{reply}");
        let reply = ask(&mut client, &format!("unlock /dev/lfpd-a {own}"));
        assert!([BUSY, DENIED].contains(&reply.as_str()), "{reply}");
        assert_eq!(server.files(), ["LCK..lfpd-a"]);
    }
    drop(holder);
    // Also if it cannot be looked at yet.
    server.daemon.wait_for_log("reaped", PATIENCE);
    drop(crowd);
    eventually(PATIENCE, "the lock of the dead is gone", || {
        server.files().is_empty()
    });
    // The server closes the connections of the crowd one by one.
    eventually(PATIENCE, "there are descriptors for a question", || {
        ask(&mut client, &format!("lock /dev/lfpd-b {own}")) == BUSY
    });
    let lock = format!("lock /dev/lfpd-c {own}");
    eventually(PATIENCE, "a new connection may lock", || {
        let mut client = server.daemon.connect();
        client.line().starts_with("220 ") && ask(&mut client, &lock) == OKAY
    });
}

#[test]
fn a_peer_greeted_while_descriptors_are_short_has_a_user() {
    let server = Lfpd::start_behind(&["prlimit", "--nofile=32:32"]);
    let own = own_pid();
    let reply = |client: &mut TcpStream| {
        let mut buffer = [0; 1024];
        let len = client.read(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
    };
    let is_short = || server.daemon.log().contains("cannot-accept");
    let mut greeted = Vec::new();
    for _ in 0..40 {
        let mut client = TcpStream::connect(server.addr()).expect("a place in the queue");
        let interval = Some(Duration::from_millis(20));
        client.set_read_timeout(interval).expect("a timeout");
        let mut answer = None;
        eventually(PATIENCE, "it is answered, or the server is short", || {
            answer = reply(&mut client);
            answer.is_some() || is_short()
        });
        if answer.is_some_and(|greeting| greeting.starts_with("220 ")) {
            client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            greeted.push(client);
        }
    }
    assert!(
        greeted.len() > 5,
        "{}:\n{}",
        greeted.len(),
        server.daemon.log()
    );
    let last = greeted.split_off(greeted.len() - 3);
    drop(greeted);
    for (at, mut client) in last.into_iter().enumerate() {
        let lock = format!("lock /dev/lfpd-{at} {own}\n");
        eventually(PATIENCE, "it may lock", || {
            client.write_all(lock.as_bytes()).expect("it is open");
            reply(&mut client).is_some_and(|line| line.starts_with("200 "))
        });
    }
}

// ---------------------------------------------------------------------------------------------
// What the usual client forces

#[test]
fn rxtx_locks_and_unlocks_two_hundred_times_without_an_error() {
    let _alone = alone();
    let server = Lfpd::start(&[]);
    let rxtx = Rxtx {
        server: server.addr(),
    };
    let (device, own) = ("/dev/lfpd-rxtx", own_pid());
    let mut prompt_count = 0;
    let began = Instant::now();
    for round in 0.. {
        // On a busy machine, few commands are prompt: it takes more of them.
        let has_time = began.elapsed() < 6 * PATIENCE;
        if round >= 200 && (prompt_count > 100 || !has_time) {
            break;
        }
        let locked = rxtx.lock(device, own).expect("the server is there");
        assert!(locked.succeeded, "refused in round {round}");
        let unlocked = rxtx.unlock(device, own).expect("the server is there");
        let left = server.files();
        assert!(unlocked.succeeded, "round {round}");
        if unlocked.sent_after < PROMPT {
            prompt_count += 1;
            assert!(left.is_empty(), "left over in round {round}: {left:?}");
        } else {
            // It was the client that was kept from sending, by a busy machine.
            eventually(PATIENCE, "it is unlocked", || server.files().is_empty());
        }
    }
    if prompt_count == 0 {
        skipped(&["time on this machine for a prompt client"]);
    }
}

#[test]
fn the_greeting_and_each_reply_are_single_writes() {
    let strace = needs!("strace");
    let directory = tempfile::tempdir().expect("a directory");
    let trace = directory.path().join("trace");
    let calls = ["-s", "200", "-e", "trace=write,writev,sendto,sendmsg"];
    let mut server = Traced::start_with(&strace, &trace, &calls);
    let own = own_pid();
    let mut client = server.connect();
    for line in [format!("lock /dev/lfpd-a {own}"), "help".into(), "x".into()] {
        let _ = ask(&mut client, &line);
    }
    client.send("noop\nnoop\nquit\n");
    while let Event::Line(_) = client.next_event(PATIENCE) {}
    // Two commands that have come before the greeting: the first reply goes with it.
    let mut early = TcpStream::connect(server.addr).expect("connect");
    early
        .write_all(format!("unlock /dev/lfpd-a {own}\nquit\n").as_bytes())
        .expect("sent");
    let mut text = String::new();
    early.read_to_string(&mut text).expect("replies");
    server.server.end();
    let trace = fs::read_to_string(&trace).expect("a trace");
    let sent: Vec<String> = trace
        .lines()
        .filter(|line| line.contains("\\r\\n\""))
        .map(|line| {
            let text = line.split('"').nth(1).expect("a text");
            assert!(line.contains(") = "), "an unfinished write: {line}");
            text.split("\\r\\n")
                .filter(|line| !line.is_empty())
                .map(|line| format!("{} ", &line[..3]))
                .collect()
        })
        .collect();
    let sent: Vec<&str> = sent.iter().map(|codes| codes.trim_end()).collect();
    assert!(
        [&["220 200", "221"][..], &["220", "200", "221"]].contains(&&sent[7..]),
        "{sent:?}\n{text}"
    );
    assert_eq!(
        sent[..7],
        ["220", "200", "202", "500", "200", "200", "221"],
        "{trace}"
    );
}

/// A server under strace, which makes some of its system calls fail.
struct Traced {
    server: KillGroup,
    dirs: tempfile::TempDir,
    addr: SocketAddr,
}

impl Traced {
    /// `injection` is strace's; only calls about `within` are counted, if it is given.
    fn start(strace: &Program, injection: &str, within: Option<&str>) -> Traced {
        let options = ["-e", injection];
        let within = within.map_or(vec![], |name| vec!["-P", name]);
        Traced::start_with(
            strace,
            Path::new("/dev/null"),
            &[&options, &within[..]].concat(),
        )
    }

    /// With these options of strace, which writes into `trace`. A path is one below `dirs`.
    fn start_with(strace: &Program, trace: &Path, options: &[&str]) -> Traced {
        let dirs = lock_dirs();
        let lfpd = command(dirs.path());
        let mut strace = strace.command();
        strace
            .args(["-f", "-qq", "-o"])
            .arg(trace)
            .args(options)
            .current_dir(dirs.path())
            .arg(lfpd.get_program())
            .args(lfpd.get_args())
            .args(["--listen", "0", "--print-port"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut server = KillGroup::spawn(&mut strace);
        let port = server.first_line().trim().parse().expect("a port");
        Traced {
            server,
            dirs,
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        }
    }

    fn connect(&self) -> Client {
        let mut client = Client::tcp(self.addr);
        greeted(&mut client);
        client
    }

    fn files(&self) -> Vec<String> {
        names_in(&self.dirs.path().join("own"))
    }
}

/// A process with all its children, ended together.
struct KillGroup(Child);

impl KillGroup {
    fn spawn(command: &mut Command) -> KillGroup {
        KillGroup(command.process_group(0).spawn().expect("it is installed"))
    }

    fn first_line(&mut self) -> String {
        let mut line = Vec::new();
        let mut byte = [0];
        let stdout = self.0.stdout.as_mut().expect("a pipe");
        while stdout.read(&mut byte).is_ok_and(|len| len == 1) && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).expect("ASCII")
    }

    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(pid, signal);
    }

    fn end(&mut self) {
        self.signal(Signal::TERM);
        is_soon(PATIENCE, || !matches!(self.0.try_wait(), Ok(None)));
    }
}

impl Drop for KillGroup {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Races

/// Each lock is synced and each connection looked up, which takes milliseconds. So the usual run
/// has few clients and rounds: with 200 and 1 000, rarer orders of their steps are met.
fn client_count() -> usize {
    amount(12, 200)
}

/// Lets clients ask for one device at the same time, again and again; each time exactly one is to
/// get it. `prepare` is called before each round.
fn race(clients: Vec<Client>, own: &Path, prepare: impl Fn() + Sync) {
    let holders: Vec<Alive> = clients.iter().map(|_| Alive::new()).collect();
    let pids: Vec<u32> = holders.iter().map(Alive::pid).collect();
    let (ready, done) = (Barrier::new(clients.len()), Barrier::new(clients.len()));
    let winners = Arc::new(Mutex::new(Vec::new()));
    let path = own.join("LCK..lfpd-race");
    thread::scope(|scope| {
        for (mut client, pid) in clients.into_iter().zip(pids) {
            let (ready, done, winners) = (&ready, &done, Arc::clone(&winners));
            let (prepare, path) = (&prepare, &path);
            scope.spawn(move || {
                for round in 0..amount(80, 1000) {
                    if ready.wait() {
                        winners.lock().unwrap().clear();
                        prepare();
                    }
                    ready.wait();
                    let reply = ask(&mut client, &format!("lock /dev/lfpd-race {pid}"));
                    match reply.as_str() {
                        OKAY => winners.lock().unwrap().push(pid),
                        BUSY => {}
                        other => panic!("{other}"),
                    }
                    done.wait();
                    let won = winners.lock().unwrap().clone();
                    assert_eq!(won.len(), 1, "round {round}");
                    if won[0] == pid {
                        let content = fs::read_to_string(path).expect("a lock file");
                        assert_eq!(content, format!("{pid:10}\n"));
                        let reply = ask(&mut client, &format!("unlock /dev/lfpd-race {pid}"));
                        assert_eq!(reply, OKAY);
                    }
                    done.wait();
                }
            });
        }
    });
    assert!(names_in(own).is_empty(), "{:?}", names_in(own));
}

fn clients_of_one_server(server: &Lfpd) -> Vec<Client> {
    (0..client_count()).map(|_| server.connect()).collect()
}

#[test]
fn of_many_clients_of_one_server_one_gets_a_free_device() {
    let _alone = alone();
    let server = Lfpd::start(&["--max-connections", "1000"]);
    race(clients_of_one_server(&server), &server.lock_file(""), || {});
}

#[test]
fn of_many_clients_of_one_server_one_takes_over_a_stale_lock() {
    let _alone = alone();
    let server = Lfpd::start(&["--max-connections", "1000"]);
    let stale = format!("{:10}\n", dead_pid());
    race(
        clients_of_one_server(&server),
        &server.lock_file(""),
        || {
            fs::write(server.lock_file("LCK..lfpd-race"), &stale).expect("written");
        },
    );
}

/// A server for each client, as inetd starts them.
fn race_of_servers(content: Option<String>) {
    let _alone = alone();
    let dirs = lock_dirs();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..client_count() {
        clients.push(Client::tcp(addr));
        let (ours, _) = listener.accept().expect("accept");
        servers.push(spawn_on(command(dirs.path()), ours));
    }
    clients.iter_mut().for_each(greeted);
    let own = dirs.path().join("own");
    race(clients, &own, || {
        if let Some(content) = &content {
            fs::write(own.join("LCK..lfpd-race"), content).expect("written");
        }
    });
    for mut server in servers {
        // Its client has gone.
        let _ = server.wait();
    }
}

#[test]
fn of_many_servers_one_gives_a_free_device() {
    race_of_servers(None);
}

#[test]
fn of_many_servers_one_takes_over_a_stale_lock() {
    race_of_servers(Some(format!("{:10}\n", dead_pid())));
}
