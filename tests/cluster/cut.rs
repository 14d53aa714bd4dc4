//! Two hosts, as network namespaces, and a link between them that goes down without a word to
//! either end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::house::{renew, TAKE_OVER, TTL};
use crate::support::limited::{behind, with_surroundings_of};
use crate::support::needs::{needs, skipped};
use crate::support::{eventually, Client, Daemon, Event, Signal, PATIENCE};

/// A child that is killed when dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A host with a network of its own. It ends with what runs on it.
struct Host(Ended);

impl Host {
    /// `None` if the system allows no network namespace.
    fn new() -> Option<Host> {
        let network = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let own = network(std::process::id());
        let mut sleeping = Command::new("unshare");
        let sleeping = sleeping.args(["-n", "sleep", "600"]).stderr(Stdio::null());
        let mut host = Host(Ended(sleeping.spawn().expect("it is installed")));
        eventually(PATIENCE, "the host is there, or refused", || {
            let has_ended = host.0 .0.try_wait().expect("a child").is_some();
            has_ended || network(host.0 .0.id()).is_some_and(|its| Some(its) != own)
        });
        let has_ended = host.0 .0.try_wait().expect("a child").is_some();
        (!has_ended).then_some(host)
    }

    fn pid(&self) -> String {
        self.0 .0.id().to_string()
    }

    /// A command on this host.
    fn command(&self, command: &Command) -> Command {
        behind(&["nsenter", "-t", &self.pid(), "-n"], command)
    }

    fn ip(&self, arguments: &str) {
        let mut ip = Command::new("ip");
        let status = self.command(ip.args(arguments.split(' '))).status();
        assert!(status.expect("it is installed").success(), "ip {arguments}");
    }
}

/// The near host has one member of etcd and the first server, the far one has the other two members
/// and the second server.
struct House {
    near: Host,
    far: Host,
    _members: Vec<Ended>,
    directory: TempDir,
}

const NEAR: &str = "10.9.8.1";
const FAR: &str = "10.9.8.2";

/// A server, and its Unix socket: that is reached from every host.
struct Server {
    daemon: Daemon,
    socket: PathBuf,
}

impl Server {
    fn connect(&self) -> Client {
        Client::unix(&self.socket)
    }
}

impl House {
    /// `None` if the system allows no network namespace.
    fn new() -> Option<House> {
        let (Some(near), Some(far)) = (Host::new(), Host::new()) else {
            skipped(&["network namespace"]);
            return None;
        };
        near.ip(&format!(
            "link add near type veth peer name far netns {}",
            far.pid()
        ));
        for (host, name, address) in [(&near, "near", NEAR), (&far, "far", FAR)] {
            host.ip("link set lo up");
            host.ip(&format!("addr add {address}/30 dev {name}"));
            host.ip(&format!("link set {name} up"));
        }
        let directory = TempDir::new().expect("there is room");
        let places = [(&near, NEAR, 2379), (&far, FAR, 2379), (&far, FAR, 2479)];
        let names = places.iter().enumerate();
        let all: Vec<String> = names
            .map(|(at, (_, address, port))| format!("m{at}=http://{address}:{}", port + 1))
            .collect();
        let member = |(at, (host, address, port)): (usize, &(&Host, &str, u16))| {
            let data = directory.path().join(at.to_string());
            start_member(host, at, &data, (address, *port), &all.join(","))
        };
        let members = places.iter().enumerate().map(member).collect();
        Some(House {
            near,
            far,
            _members: members,
            directory,
        })
    }

    /// Starts a server beside the member that it uses, or beside another one.
    fn server(&self, address: &str, endpoint: &str, fault: Option<&str>) -> Server {
        let host = match address {
            NEAR => &self.near,
            _ => &self.far,
        };
        let socket = self.directory.path().join(address);
        let mut command = Daemon::command();
        command
            .args(["--host", "0.0.0.0", "--port", "6388", "--unix"])
            .arg(&socket)
            .args(["--advertise", &format!("{address}:6388")])
            .args(["--etcd", &format!("{endpoint}:2379")])
            .args(["--etcd-ttl", &TTL.as_secs().to_string()]);
        let mut on_host = with_surroundings_of(&Daemon::command(), host.command(&command));
        if let Some(fault) = fault {
            on_host.env("LATCHD_PLANTED_FAULT", fault);
        }
        let daemon = Daemon::from_command(on_host);
        daemon.wait_for_log("listening", TAKE_OVER);
        Server { daemon, socket }
    }

    /// Starts the active server on the near host, with the member at `endpoint` and perhaps a
    /// fault, and a standby on the far one.
    fn servers(&self, endpoint: &str, fault: Option<&str>) -> (Server, Server) {
        let first = self.server(NEAR, endpoint, fault);
        first.daemon.wait_for_log("INFO active epoch=", TAKE_OVER);
        let second = self.server(FAR, FAR, None);
        second.daemon.wait_for_log("standby active=", TAKE_OVER);
        (first, second)
    }

    /// Takes the link down, or puts it up.
    fn set_link(&self, state: &str) {
        self.near.ip(&format!("link set near {state}"));
    }
}

fn start_member(
    host: &Host,
    at: usize,
    data: &Path,
    (address, port): (&str, u16),
    all: &str,
) -> Ended {
    let client = format!("http://{address}:{port}");
    let peer = format!("http://{address}:{}", port + 1);
    let mut etcd = Command::new("etcd");
    etcd.args(["--name", &format!("m{at}"), "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &client])
        .args(["--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", all]);
    let mut etcd = host.command(&etcd);
    let etcd = etcd.stdin(Stdio::null()).stdout(Stdio::null());
    Ended(etcd.stderr(Stdio::null()).spawn().expect("it is installed"))
}

#[test]
fn a_link_that_goes_down_costs_the_leadership_and_no_lock() {
    needs!(root);
    needs!("etcd", "ip");
    let Some(house) = House::new() else {
        return;
    };
    let (first, second) = house.servers(FAR, None);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 120);
    let mut relayed = second.connect();
    let other = relayed.acquire_for("other", 0, 120);
    house.set_link("down");
    holder.send(&format!("n\nk\n{} 120\n", grant.token));
    for client in [&mut holder, &mut relayed] {
        let end = client.next_event(TAKE_OVER);
        assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    }
    first.daemon.wait_for_log("deposed", TAKE_OVER);
    second.daemon.wait_for_log("INFO active epoch=", TAKE_OVER);
    let mut client = second.connect();
    assert_eq!(renew(&mut client, "k", &grant), "ok 120");
    assert_eq!(renew(&mut client, "other", &other), "ok 120");
    house.set_link("up");
    first.daemon.wait_for_log("standby active=", TAKE_OVER);
    assert_eq!(renew(&mut first.connect(), "k", &grant), "ok 120");
}

/// Cuts off a server together with the member that it asks, and stops it until another one is
/// active. Returns what it says to a holder afterwards.
fn word_from_beside_a_lonely_member(house: &House, fault: Option<&str>) -> Event {
    let (first, second) = house.servers(NEAR, fault);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 120);
    house.set_link("down");
    first.daemon.signal(Signal::STOP);
    second.daemon.wait_for_log("INFO active epoch=", TAKE_OVER);
    holder.send(&format!("n\nk\n{} 120\n", grant.token));
    first.daemon.signal(Signal::CONT);
    holder.next_event(TAKE_OVER)
}

#[test]
fn a_member_without_a_majority_confirms_nothing() {
    needs!(root);
    needs!("etcd", "ip");
    let Some(house) = House::new() else {
        return;
    };
    let word = word_from_beside_a_lonely_member(&house, None);
    assert!(matches!(word, Event::Eof | Event::Reset), "{word:?}");
}

#[test]
fn a_question_without_an_operation_is_found() {
    needs!(root);
    needs!("etcd", "ip");
    let Some(house) = House::new() else {
        return;
    };
    // Faults are planted only in builds for tests.
    if cfg!(debug_assertions) {
        let fault = Some("question-without-range");
        let word = word_from_beside_a_lonely_member(&house, fault);
        assert_eq!(word, Event::Line(b"ok 120".to_vec()));
    }
}
