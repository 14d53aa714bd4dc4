//! Members of etcd, and servers that share one service on it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{kill_process, waitpid, Pid, WaitOptions};
use tempfile::TempDir;

use super::needs::{programs, Program};
use super::silent::free_port;
use super::{eventually, Client, Daemon, Grant, Signal};

/// How long a server may be silent in these tests, in seconds: the least that is allowed.
pub const TTL: Duration = Duration::from_secs(5);

/// How long a take-over may take: an expiry may be late, and the machine be busy.
pub const TAKE_OVER: Duration = Duration::from_secs(40);

/// One member of etcd.
pub struct Member {
    program: Program,
    arguments: Vec<String>,
    process: Option<Child>,
    pub client_port: u16,
}

impl Member {
    fn start(&mut self) {
        let child = self
            .program
            .command()
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.process = Some(child.expect("etcd starts"));
    }

    /// Kills the member, so that nothing is flushed.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it again, with what it has on disk.
    pub fn restart(&mut self) {
        self.kill();
        self.start();
    }

    /// Sends it a signal. A member that is to stop has stopped when this returns: the last of its
    /// threads may take a while.
    pub fn signal(&self, signal: Signal) {
        let process = Pid::from_child(self.process.as_ref().expect("it runs"));
        kill_process(process, signal).expect("it is a child of ours");
        if signal == Signal::STOP {
            let stopped = waitpid(Some(process), WaitOptions::UNTRACED);
            stopped.expect("it is a child of ours");
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An etcd of one or more members on the loopback interface.
pub struct Etcd {
    pub members: Vec<Member>,
    etcdctl: Program,
    /// What clients speak: `http` or `https`.
    scheme: &'static str,
    /// Further arguments of etcdctl.
    access: Vec<String>,
    _directory: TempDir,
}

impl Etcd {
    /// Starts members with the programs etcd and etcdctl.
    pub fn start(programs: &[Program; 2], count: usize) -> Etcd {
        Etcd::start_with(programs, count, &[])
    }

    /// Starts members with further arguments.
    pub fn start_with(programs: &[Program; 2], count: usize, further: &[&str]) -> Etcd {
        Etcd::start_speaking(programs, "http", count, further, &[])
    }

    /// Starts a member that speaks TLS with clients and asks for their certificates. The directory
    /// has `ca.pem`, `etcd.pem` and `etcd.key`.
    pub fn start_secured(programs: &[Program; 2], directory: &Path) -> Etcd {
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let [ca, certificate, key] = ["ca.pem", "etcd.pem", "etcd.key"].map(path);
        let (cert_flag, key_flag) = ("--cert-file", "--key-file");
        let further = [cert_flag, &certificate, key_flag, &key];
        let clients = ["--client-cert-auth", "--trusted-ca-file", &ca];
        let access = ["--cacert", &ca, "--cert", &certificate, "--key", &key];
        Etcd::start_speaking(
            programs,
            "https",
            1,
            &[&further[..], &clients].concat(),
            &access,
        )
    }

    fn start_speaking(
        [etcd, etcdctl]: &[Program; 2],
        scheme: &'static str,
        count: usize,
        further: &[&str],
        access: &[&str],
    ) -> Etcd {
        let directory = TempDir::new_in(data_home()).expect("there is room");
        let ports: Vec<(u16, u16)> = (0..count).map(|_| (free_port(), free_port())).collect();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let all: Vec<String> = (0..count)
            .map(|at| format!("m{at}={}", url(ports[at].1)))
            .collect();
        let member = |at: usize| {
            let client = format!("{scheme}://127.0.0.1:{}", ports[at].0);
            let peer = url(ports[at].1);
            let data = directory.path().join(at.to_string());
            let pairs = [
                ("--name", format!("m{at}")),
                ("--data-dir", data.to_string_lossy().into_owned()),
                ("--listen-client-urls", client.clone()),
                ("--advertise-client-urls", client),
                ("--listen-peer-urls", peer.clone()),
                ("--initial-advertise-peer-urls", peer),
                ("--initial-cluster", all.join(",")),
                ("--initial-cluster-token", format!("t{}", ports[0].0)),
            ];
            let flags = pairs.into_iter();
            let further = further.iter().map(|argument| argument.to_string());
            let mut member = Member {
                program: etcd.clone(),
                arguments: flags
                    .flat_map(|(flag, value)| [flag.into(), value])
                    .chain(further)
                    .collect(),
                process: None,
                client_port: ports[at].0,
            };
            member.start();
            member
        };
        let etcd = Etcd {
            members: (0..count).map(member).collect(),
            etcdctl: etcdctl.clone(),
            scheme,
            access: access.iter().map(|it| it.to_string()).collect(),
            _directory: directory,
        };
        etcd.wait_until_healthy();
        etcd
    }

    pub fn wait_until_healthy(&self) {
        eventually(Duration::from_secs(60), "etcd answers", || {
            self.ctl(&["put", "health", "y"]).is_some()
        });
    }

    /// The client addresses of all members.
    pub fn endpoints(&self) -> String {
        let members = self.members.iter();
        let scheme = match self.scheme {
            "http" => String::new(),
            other => format!("{other}://"),
        };
        let addresses: Vec<String> = members
            .map(|member| format!("{scheme}127.0.0.1:{}", member.client_port))
            .collect();
        addresses.join(",")
    }

    /// Runs etcdctl, and returns what it prints; `None` if it fails.
    pub fn ctl(&self, arguments: &[&str]) -> Option<String> {
        let output = self
            .etcdctl
            .command()
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.endpoints()])
            .args(&self.access)
            .args(["--dial-timeout", "1s", "--command-timeout", "2s"])
            .args(arguments)
            .output()
            .expect("etcdctl starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    }

    /// How many holders are in the journal. The count is that of all, whatever the limit.
    pub fn holder_count(&self, prefix: &str) -> usize {
        let first = format!("{prefix}/h/");
        let counted = self.ctl(&["get", "--prefix", &first, "--limit", "1", "-w", "fields"]);
        let counted = counted.expect("etcd answers");
        let count = counted
            .lines()
            .find_map(|line| line.strip_prefix("\"Count\" : "));
        count.expect("a count").parse().expect("a number")
    }

    /// The fences of the holders in the journal, with their keys, sorted.
    pub fn holders(&self, prefix: &str) -> Vec<String> {
        let listed = self.ctl(&["get", "--prefix", &format!("{prefix}/h/")]);
        let listed = listed.expect("etcd answers");
        let lines: Vec<&str> = listed.lines().collect();
        let pairs = lines.chunks(2);
        let described = |pair: &[&str]| {
            let fence = pair[0].rsplit('/').next().unwrap_or_default();
            let key = pair[1].splitn(5, ' ').last().unwrap_or_default();
            format!("{fence} {key}")
        };
        pairs.map(described).collect()
    }
}

/// Where members of etcd keep their data: in memory if there is plenty of it. On a busy disk, a
/// write to the journal can take seconds.
fn data_home() -> PathBuf {
    // A member takes some 150 MB, and up to 24 run at a time.
    const PLENTY: u64 = 4 << 30;
    let memory = Path::new("/dev/shm");
    let space = rustix::fs::statvfs(memory).map(|shm| shm.f_bavail * shm.f_frsize);
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = meminfo.lines().find_map(|line| {
        let rest = line.strip_prefix("MemAvailable:")?;
        rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    let is_plenty = space.is_ok_and(|free| free > PLENTY)
        && available.is_some_and(|free| free > PLENTY >> 10)
        && TempDir::new_in(memory).is_ok();
    if is_plenty {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    }
}

/// A server that is one of several.
pub struct Server {
    pub daemon: Daemon,
    pub port: u16,
}

impl Server {
    /// Starts a server with the prefix `latchd`. It listens when this returns.
    pub fn start(endpoints: &str, arguments: &[&str]) -> Server {
        Server::start_at(free_port(), endpoints, arguments, None)
    }

    /// Starts a server at a port, perhaps with a fault.
    pub fn start_at(port: u16, endpoints: &str, arguments: &[&str], fault: Option<&str>) -> Server {
        let mut command = Daemon::command();
        command
            .args(["--port", &port.to_string(), "--etcd", endpoints])
            .args(["--advertise", &format!("127.0.0.1:{port}")])
            .args(arguments);
        if !arguments.contains(&"--etcd-ttl") {
            command.args(["--etcd-ttl", &TTL.as_secs().to_string()]);
        }
        if let Some(fault) = fault {
            command.env("LATCHD_PLANTED_FAULT", fault);
        }
        let server = Server {
            daemon: Daemon::from_command(command),
            port,
        };
        server.daemon.wait_for_log("listening", TAKE_OVER);
        server
    }

    /// Starts a server, and waits until it is active.
    pub fn active(endpoints: &str, arguments: &[&str]) -> Server {
        let server = Server::start(endpoints, arguments);
        server.wait_until_active(1);
        server
    }

    pub fn connect(&self) -> Client {
        Client::tcp(SocketAddr::from(([127, 0, 0, 1], self.port)))
    }

    /// Waits until the server has become active for the `times`-th time.
    pub fn wait_until_active(&self, times: usize) {
        self.wait_for("INFO active epoch=", times);
    }

    /// Waits until a text is in the log so many times.
    pub fn wait_for(&self, text: &str, times: usize) {
        self.daemon.wait_for_logs(text, times, TAKE_OVER);
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&self) {
        self.daemon.signal(Signal::KILL);
        self.daemon.wait_exit(TAKE_OVER).expect("it was killed");
    }
}

/// Renews a lock by its token.
pub fn renew(client: &mut Client, key: &str, grant: &Grant) -> String {
    client.request("n", key, &format!("{} {}", grant.token, grant.lease))
}

/// Whether the daemons of this test target are each one of several servers. Without etcd, all are
/// servers of their own.
pub fn is_member() -> bool {
    ["cluster", "standby"].contains(&env!("CARGO_CRATE_NAME")) && shared_etcd().is_some()
}

/// How much later a reply may come that a journal has to be written for, with all the daemons of
/// this test target on one disk.
pub fn journal_time() -> Duration {
    if is_member() {
        Duration::from_secs(2)
    } else {
        Duration::ZERO
    }
}

/// Options that do not go with a journal.
const ALONE: &[&str] = &["--fence-state-file", "--idle-exit", "--inetd", "--port"];

/// Has a daemon that any test starts journal to an etcd that all of them share, in the test targets
/// `cluster` and `standby`: returns the port that it will listen on. `None` in other targets.
pub fn journal(command: &mut Command, arguments: &[&str]) -> Option<u16> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let is_alone = |argument: &&str| ALONE.iter().any(|alone| argument.starts_with(alone));
    if !is_member() || arguments.iter().any(is_alone) {
        return None;
    }
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    join(command, &format!("shared-{number}"))
}

/// The command of a standby beside a daemon that journals, and its port, in the test target
/// `standby`. `None` in other targets.
pub fn standby(active: &Daemon, arguments: &[&str]) -> Option<(Command, u16)> {
    if env!("CARGO_CRATE_NAME") != "standby" {
        return None;
    }
    let active = std::fs::read_to_string(format!("/proc/{}/cmdline", active.pid()));
    let active = active.expect("it runs");
    let mut words = active
        .split('\0')
        .skip_while(|word| *word != "--etcd-prefix");
    // One that does not journal is alone.
    let prefix = words.nth(1)?;
    let mut command = Daemon::command();
    let port = join(&mut command, prefix)?;
    // A Unix socket is that of the active server: one path is one server's.
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match *argument {
            "--unix" => drop(arguments.next()),
            other => drop(command.arg(other)),
        }
    }
    Some((command, port))
}

/// Makes a daemon one of those with this prefix on the shared etcd; returns its port.
fn join(command: &mut Command, prefix: &str) -> Option<u16> {
    let (endpoint, port) = (shared_etcd()?, free_port());
    command
        .args(["--port", &port.to_string(), "--etcd", endpoint])
        .args(["--etcd-prefix", prefix])
        .args(["--advertise", &format!("127.0.0.1:{port}")]);
    Some(port)
}

/// The client address of an etcd that ends with this process; `None` if there is no etcd.
fn shared_etcd() -> Option<&'static str> {
    // The shell outlives this process by a moment, and cleans up after it.
    const SCRIPT: &str = r#"
        directory=$(mktemp -d "$3/latchd-XXXXXX") && cd "$directory" || exit
        "$4" --data-dir data --listen-client-urls "$1" --advertise-client-urls "$1" \
            --listen-peer-urls "$2" --initial-advertise-peer-urls "$2" \
            --initial-cluster "default=$2" >etcd.log 2>&1 &
        cat >/dev/null
        kill -9 $!
        wait
        rm -rf "$directory"
    "#;
    static SHARED: OnceLock<Option<(Child, String)>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| {
        let [etcd, etcdctl] = programs(["etcd", "etcdctl"])?;
        let [client, peer] = [free_port(), free_port()];
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh", &url(client), &url(peer)])
            .arg(data_home())
            .arg(&etcd)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        let endpoint = format!("127.0.0.1:{client}");
        eventually(Duration::from_secs(60), "etcd answers", || {
            let health = ["--endpoints", &endpoint, "put", "health", "y"];
            let answer = etcdctl
                .command()
                .env("ETCDCTL_API", "3")
                .args(health)
                .output();
            answer.is_ok_and(|answer| answer.status.success())
        });
        Some((shell, endpoint))
    });
    shared.as_ref().map(|(_, endpoint)| endpoint.as_str())
}
