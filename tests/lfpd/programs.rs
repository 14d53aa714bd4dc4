//! `lfpd` among the programs that real hosts run: those that start it, those that talk to it, and
//! those that lock serial devices without it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::lfp::{ask, greeted, lock_dirs, names_in, Alive, Lfpd, Rxtx, BUSY, OKAY};
use crate::support::needs::{needs, skipped, Program};
use crate::support::{children_of, eventually, is_soon, program, wait_for_exit, Client, PATIENCE};
use rustix::process::{kill_process, Pid, Signal};

fn support_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/lfpd")
        .join(name)
}

// ---- those that lock by themselves -----------------------------------------------------------

/// In a mount namespace of its own, with a pseudo-terminal for a device. The first two answers are
/// to our LOCK and UNLOCK, while the program has been refused; the third is to our LOCK while it
/// has the device; two come when it has ended, and two when it was killed.
#[test]
fn minicom_cu_kermit_and_mgetty_respect_our_locks_and_we_theirs() {
    needs!(root);
    let [python, ..] = needs!("python3", "minicom", "cu", "kermit", "mgetty");
    let namespace = ["--mount", "--propagation", "private"];
    if !can_unshare(&namespace) {
        return skipped(&["mount namespace"]);
    }
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new("timeout")
        .args(["-k", "5", "55", "unshare"])
        .args(namespace)
        .arg("sh")
        .arg(support_file("serial_host.sh"))
        .arg(directory.path())
        .arg(&python)
        .arg(support_file("serial_programs.py"))
        .arg(program("lfpd"))
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("RUST_LOG", "warn")
        .output()
        .expect("timeout");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "minicom respects our lock, 200 200 450 200 200 200 200\n\
         cu respects our lock, 200 200 450 200 200 200 200\n\
         kermit respects our lock, 200 200 450 200 200 200 200\n\
         mgetty respects our lock, 200 200 450 200 200 200 200\n",
        "{said}"
    );
}

fn can_unshare(namespace: &[&str]) -> bool {
    let mut unshare = Command::new("unshare");
    let status = unshare
        .args(namespace)
        .args(["mount", "-t", "tmpfs", "none", "/mnt"])
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// As these programs write them, and where: for hosts on which they cannot run.
#[test]
fn live_locks_of_other_programs_are_respected() {
    let server = Lfpd::start(&[]);
    let mut client = server.connect();
    let holder = Alive::new();
    let pid = holder.pid();
    let text = format!("{pid:10}\n").into_bytes();
    let binary = i32::try_from(pid).expect("a number").to_ne_bytes().to_vec();
    let own = std::process::id();
    for (program, device, file, content) in [
        ("minicom", "lfpd-a", "LCK..lfpd-a", &text),
        ("minicom", "usb/tts/0", "LCK..usb_tts_0", &text),
        ("kermit", "usb/tts/0", "LCK..0", &text),
        ("liblockdev", "usb/tts/0", "LCK..usb:tts:0", &text),
        ("cu, as of old", "lfpd-a", "LCK..lfpd-a", &binary),
        (
            "minicom, in words",
            "lfpd-a",
            "LCK..lfpd-a",
            &format!("{pid:10} minicom root\n").into_bytes(),
        ),
    ] {
        let path = server.lock_file(file);
        fs::write(&path, content).expect("written");
        let lock = format!("lock /dev/{device} {own}");
        assert_eq!(ask(&mut client, &lock), BUSY, "{program}");
        assert_eq!(&fs::read(&path).expect("untouched"), content, "{program}");
        fs::remove_file(&path).expect("removed");
        assert_eq!(ask(&mut client, &lock), OKAY, "{program}");
        let unlock = format!("unlock /dev/{device} {own}");
        assert_eq!(ask(&mut client, &unlock), OKAY, "{program}");
    }
}

/// A program with a terminal that it locks without a lock file, ended when dropped.
struct TerminalLocker {
    child: Child,
    output: BufReader<ChildStdout>,
    terminal: String,
}

impl TerminalLocker {
    fn start(python: &Program) -> TerminalLocker {
        let mut child = python
            .command()
            .arg(support_file("terminal_locks.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut output = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let terminal = line_of(&mut output);
        TerminalLocker {
            child,
            output,
            terminal,
        }
    }

    fn lock(&mut self, how: &str) {
        let stdin = self.child.stdin.as_mut().expect("it is a pipe");
        writeln!(stdin, "{how}").expect("it reads");
        assert_eq!(line_of(&mut self.output), how);
    }
}

impl Drop for TerminalLocker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line_of(output: &mut impl BufRead) -> String {
    let mut line = String::new();
    output.read_line(&mut line).expect("text");
    line.trim_end().to_owned()
}

#[test]
fn a_terminal_that_another_program_has_locked_is_busy() {
    let python = needs!("python3");
    let mut program = TerminalLocker::start(&python);
    let server = Lfpd::start(&[]);
    let mut client = server.connect();
    let (own, programs) = (std::process::id(), program.child.id());
    for (how, for_us, for_it) in [
        ("flock", BUSY, OKAY),
        ("shared flock", BUSY, OKAY),
        ("posix", BUSY, OKAY),
        // The kernel does not tell which process has this one.
        ("ofd", BUSY, BUSY),
        ("none", OKAY, OKAY),
    ] {
        program.lock(how);
        for (pid, reply) in [(own, for_us), (programs, for_it)] {
            let target = format!("{} {pid}", program.terminal);
            assert_eq!(ask(&mut client, &format!("lock {target}")), reply, "{how}");
            assert_eq!(server.files().is_empty(), reply == BUSY, "{how}");
            // What is locked by lfpd can be given back, whoever has the terminal.
            let unlocked = ask(&mut client, &format!("unlock {target}"));
            assert_eq!(unlocked, reply, "{how}");
        }
        program.lock("none");
    }
}

// ---- those that start it ---------------------------------------------------------------------

/// A real inetd with one service, ended when dropped together with all that it has started.
struct Inetd {
    inetd: Child,
    addr: SocketAddr,
    dirs: tempfile::TempDir,
    _port: Reserved,
}

impl Inetd {
    fn start(inetd: &Program, patience: &str) -> Inetd {
        let port = Reserved::new();
        let addr = port.addr;
        let dirs = lock_dirs();
        let within = |name: &str| dirs.path().join(name).display().to_string();
        // A line cannot quote a path with a blank.
        let link = dirs.path().join("lfpd");
        std::os::unix::fs::symlink(program("lfpd"), &link).expect("a link");
        let user = Command::new("id").arg("-un").output().expect("id").stdout;
        let line = format!(
            "{addr} stream tcp {patience} {} {program} lfpd --inetd --lock-dir {} \
             --search-dirs {}\n",
            String::from_utf8_lossy(&user).trim(),
            within("own"),
            within("other"),
            program = link.display(),
        );
        let config = dirs.path().join("inetd.conf");
        fs::write(&config, line).expect("written");
        let inetd = inetd
            .command()
            .arg("-d")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it is installed");
        let inetd = Inetd {
            inetd,
            addr,
            dirs,
            _port: port,
        };
        // A connection would start a server, so the test looks at the list of sockets instead.
        eventually(PATIENCE, "inetd listens", || is_listened_on(addr));
        inetd
    }

    fn files(&self) -> Vec<String> {
        names_in(&self.dirs.path().join("own"))
    }
}

impl Drop for Inetd {
    fn drop(&mut self) {
        let inetd = Pid::from_child(&self.inetd);
        // While inetd is stopped it reaps no child, so every number still means the same process.
        let _ = kill_process(inetd, Signal::STOP);
        for child in children_of(self.inetd.id()) {
            let _ = kill_process(child, Signal::KILL);
        }
        let _ = kill_process(inetd, Signal::CONT);
        let _ = self.inetd.kill();
        let _ = self.inetd.wait();
    }
}

/// A port for a program that cannot pick one. It is bound here and not listened on, so that the
/// program can bind it too, as servers do, and no other process gets it by chance.
struct Reserved {
    addr: SocketAddr,
    _socket: OwnedFd,
}

impl Reserved {
    fn new() -> Reserved {
        use rustix::net::{bind, getsockname, socket, sockopt, AddressFamily, SocketType};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        sockopt::set_socket_reuseaddr(&socket, true).expect("an option");
        bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port");
        let addr = getsockname(&socket).expect("its address");
        Reserved {
            addr: addr.try_into().expect("an IP address"),
            _socket: socket,
        }
    }
}

fn is_listened_on(addr: SocketAddr) -> bool {
    const LISTEN: &str = "0A";
    let local = format!("0100007F:{:04X}", addr.port());
    let table = fs::read_to_string("/proc/net/tcp").expect("it is Linux");
    table.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some(&local) && words.nth(1) == Some(LISTEN)
    })
}

#[test]
fn under_inetd_rxtx_locks_and_unlocks_with_wait_and_nowait() {
    let inetd = needs!("inetd");
    for patience in ["nowait.10000", "wait.10000"] {
        let inetd = Inetd::start(&inetd, patience);
        let rxtx = Rxtx { server: inetd.addr };
        let own = std::process::id();
        for round in 0..25 {
            let locked = rxtx.lock("/dev/lfpd-rxtx", own).expect("a server");
            assert!(locked.succeeded, "{patience}: refused in round {round}");
            assert_eq!(inetd.files(), ["LCK..lfpd-rxtx"], "{patience}");
            let unlocked = rxtx.unlock("/dev/lfpd-rxtx", own).expect("a server");
            assert!(unlocked.succeeded, "{patience}: round {round}");
            // A process that starts for each connection may be late.
            eventually(PATIENCE, "the file is gone", || inetd.files().is_empty());
        }
        let servers = children_of(inetd.inetd.id()).len();
        assert!(
            patience.starts_with("nowait") || servers == 1,
            "{servers} servers"
        );
    }
}

#[test]
fn under_inetd_clients_are_served_side_by_side() {
    let inetd = needs!("inetd");
    let inetd = Inetd::start(&inetd, "nowait.10000");
    let mut idle = Client::tcp(inetd.addr);
    greeted(&mut idle);
    let mut busy = Client::tcp(inetd.addr);
    greeted(&mut busy);
    let own = std::process::id();
    assert_eq!(ask(&mut busy, &format!("lock /dev/lfpd-a {own}")), OKAY);
    assert_eq!(ask(&mut idle, &format!("lock /dev/lfpd-a {own}")), BUSY);
    assert_eq!(ask(&mut busy, &format!("unlock /dev/lfpd-a {own}")), OKAY);
}

/// A program that serves a port, ended when dropped.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `program` until it listens on the address, and locks and unlocks there.
fn serves(mut program: Command, addr: SocketAddr, dirs: &Path) {
    let said = format!("{program:?}");
    let spawned = program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _serving = Serving(spawned.expect("it is installed"));
    eventually(PATIENCE, &said, || is_listened_on(addr));
    let rxtx = Rxtx { server: addr };
    let own = std::process::id();
    let locked = rxtx.lock("/dev/lfpd-a", own).expect("a server");
    assert!(locked.succeeded, "{said}");
    assert_eq!(names_in(&dirs.join("own")), ["LCK..lfpd-a"], "{said}");
    assert!(
        rxtx.unlock("/dev/lfpd-a", own).expect("a server").succeeded,
        "{said}"
    );
    eventually(PATIENCE, "the file is gone", || {
        names_in(&dirs.join("own")).is_empty()
    });
}

#[test]
fn behind_socat_and_on_sockets_of_systemd_it_serves() {
    let [socat, activate] = needs!("socat", "systemd-socket-activate");
    let dirs = lock_dirs();
    let lfpd = [
        "lfpd".to_owned(),
        "--inetd".to_owned(),
        format!("--lock-dir={}", dirs.path().join("own").display()),
        format!("--search-dirs={}", dirs.path().join("other").display()),
    ];

    let port = Reserved::new();
    let mut socat = socat.command();
    socat
        .arg(format!(
            "TCP-LISTEN:{},bind=127.0.0.1,fork,reuseaddr",
            port.addr.port()
        ))
        .arg(format!("EXEC:{}", lfpd.join(" ")));
    serves(socat, port.addr, dirs.path());

    for mode in [&["--inetd", "-a"][..], &[]] {
        let port = Reserved::new();
        let mut systemd = activate.command();
        systemd
            .arg("-l")
            .arg(port.addr.to_string())
            .args(mode)
            .args(&lfpd);
        serves(systemd, port.addr, dirs.path());
    }
}

// ---- a person --------------------------------------------------------------------------------

/// The lines that the server has sent, among all that telnet shows.
fn replies_in(text: &str) -> Vec<&str> {
    let lines = text.split_inclusive('\n');
    lines
        .filter(|line| line.ends_with('\n'))
        .map(str::trim)
        .filter(|line| line.starts_with(['2', '4', '5']))
        .collect()
}

/// The scenario at the end of the memo, with a number that no process has.
#[test]
fn a_person_at_a_telnet_locks_unlocks_and_quits() {
    let [socat, telnet] = needs!("socat", "telnet");
    let server = Lfpd::start(&[]);
    let pid = crate::lfp::dead_pid();
    let port = server.addr().port();
    let program = telnet.path().display();
    let mut telnet = socat
        .command()
        .arg("STDIO")
        .arg(format!(
            "EXEC:{program} 127.0.0.1 {port},pty,setsid,ctty,stderr"
        ))
        .env("TERM", "dumb")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("socat");
    let mut stdin = telnet.stdin.take().expect("it is a pipe");
    let mut stdout = telnet.stdout.take().expect("it is a pipe");
    let shown = Arc::new(Mutex::new(Vec::new()));
    let screen = Arc::clone(&shown);
    let reading = thread::spawn(move || {
        let mut some = [0; 1024];
        while let Ok(len @ 1..) = stdout.read(&mut some) {
            screen.lock().expect("no panic").extend(&some[..len]);
        }
    });
    let text = || String::from_utf8_lossy(&shown.lock().expect("no panic")).into_owned();
    // A person reads before typing; what is typed while telnet starts may be thrown away.
    for (count, line) in [
        format!("lock /dev/ttyLFP9 {pid}\n"),
        format!("unlock /dev/ttyLFP9 {pid}\n"),
        "quit\n".to_owned(),
    ]
    .into_iter()
    .enumerate()
    {
        let is_shown = is_soon(2 * PATIENCE, || replies_in(&text()).len() > count);
        assert!(is_shown, "{count}: {}", text());
        stdin.write_all(line.as_bytes()).expect("it reads");
        stdin.flush().expect("it reads");
    }
    wait_for_exit(&mut telnet, 2 * PATIENCE);
    reading.join().expect("no panic");
    let text = text();
    let replies = replies_in(&text);
    assert_eq!(replies.len(), 4, "{text}");
    assert!(replies[0].starts_with("220 "), "{text}");
    assert_eq!(replies[1..3], ["200 Command okay."; 2], "{text}");
    let goodbye = "221 Thank you for using the Lock File service on ";
    assert!(replies[3].starts_with(goodbye), "{text}");
    assert!(
        text.contains("Connection closed by foreign host."),
        "{text}"
    );
    assert!(server.files().is_empty());
}
