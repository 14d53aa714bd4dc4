//! A client whose own link to the server goes down, in network namespaces of the test.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::latch::{ended, latch, number_in, output, text, Latch};
use crate::support::limited::limited;
use crate::support::needs::{needs, Program};
use crate::support::{eventually, Daemon, PATIENCE};

/// The server in one network namespace, its client in another, and a link between them.
struct Link {
    ip: Program,
    daemon: Daemon,
    /// Keeps the client's namespace.
    far: Latch,
    directory: tempfile::TempDir,
}

impl Link {
    fn new(ip: Program, options: &[&str]) -> Link {
        let mut command = limited(&["unshare", "-n"]);
        command.args(["--host", "0.0.0.0"]).args(options);
        let link = Link {
            ip,
            daemon: Daemon::from_command(command),
            far: Latch::start(Command::new("unshare").args(["-n", "sleep", "600"])),
            directory: tempfile::tempdir().expect("there is room"),
        };
        let (server, client) = (link.daemon.pid(), link.far.id());
        for process in [server, client] {
            let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
            let is_own = || network(&process.to_string()) != network("self");
            eventually(PATIENCE, "it is in a namespace of its own", is_own);
        }
        let pair = format!("link add near type veth peer name far netns {client}");
        link.ip(server, &pair);
        for (process, device, addr) in [(server, "near", 1), (client, "far", 2)] {
            link.ip(process, &format!("addr add 10.9.8.{addr}/30 dev {device}"));
            link.ip(process, &format!("link set {device} up"));
        }
        link
    }

    fn ip(&self, process: u32, arguments: &str) {
        let mut command = inside(process);
        command.arg(&self.ip).args(arguments.split(' '));
        let status = command.status();
        assert!(status.expect("it is installed").success(), "{arguments}");
    }

    fn set(&self, state: &str) {
        self.ip(self.far.id(), &format!("link set far {state}"));
    }

    /// A `latch` in the client's namespace.
    fn latch(&self, arguments: &[&str]) -> Command {
        let mut command = latch(&self.daemon, arguments);
        let server = format!("10.9.8.1:{}", self.daemon.port());
        let mut inside = inside(self.far.id());
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.env("LATCH_SERVER", server).get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdin(Stdio::null()).stderr(Stdio::piped());
        inside
    }

    /// A job that runs under the lock of `key` until [`Link::end`], and then exits with 7.
    fn job(&self, key: &str, options: &[&str]) -> Latch {
        let path = |end: &str| self.directory.path().join(format!("{key}.{end}"));
        let (started, over) = (path("started"), path("over"));
        let script = format!(
            "echo $$ > {0}.new; mv {0}.new {0}; until [ -e {1} ]; do sleep 0.05; done; exit 7",
            started.display(),
            over.display()
        );
        let arguments = [&["run", key], options, &["--", "sh", "-c", &script]].concat();
        let job = Latch::start(&mut self.latch(&arguments));
        eventually(PATIENCE, "the job runs", || number_in(&started).is_some());
        job
    }

    fn end(&self, key: &str) {
        let over = self.directory.path().join(format!("{key}.over"));
        fs::write(over, "").expect("there is room");
    }
}

fn inside(process: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["-t", &process.to_string(), "-n"]);
    command
}

#[test]
fn a_job_that_ends_without_its_link_says_when_the_key_is_free() {
    needs!(admin);
    let link = Link::new(needs!("ip"), &[]);
    let long = ["--lease", "600"];
    let mut released = link.job("released", &long);
    let mut kept = link.job("kept", &[&long[..], &["--at-least", "1h", "-q"]].concat());
    link.set("down");
    link.end("released");
    link.end("kept");
    for (job, request) in [
        (&mut released, "the release"),
        (&mut kept, "the request to keep the lock"),
    ] {
        let (status, said) = ended(job);
        assert_eq!(status, Some(7), "{said}");
        let expected = format!("no server answers {request}: the key is free in 10 m; latch break");
        assert!(said.contains(&expected), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_release_reaches_the_server_when_the_link_is_back() {
    needs!(admin);
    let link = Link::new(needs!("ip"), &[]);
    let mut job = link.job("k", &["--lease", "600"]);
    link.set("down");
    link.end("k");
    // Longer than a release takes at a server that answers.
    thread::sleep(Duration::from_secs(4));
    link.set("up");
    assert_eq!(ended(&mut job), (Some(7), String::new()));
    let status = link.latch(&["status", "k"]).stdout(Stdio::null()).status();
    assert_eq!(status.expect("it runs").code(), Some(0));
}

/// The kernel ends a silent connection after half a minute, and from then on says that the network
/// is unreachable. Both kinds of server keep the lock meanwhile.
#[test]
#[ignore = "takes a minute"]
fn a_link_that_is_down_for_a_minute_ends_no_job() {
    needs!(admin);
    let ip = needs!("ip");
    let links = [&[][..], &["--no-auto-release-on-disconnect"]];
    let links = links.map(|options| Link::new(ip.clone(), options));
    let began = Instant::now();
    let mut jobs = links.each_ref().map(|link| {
        let job = link.job("k", &["--lease", "600"]);
        link.set("down");
        job
    });
    while began.elapsed() < Duration::from_secs(60) {
        thread::sleep(Duration::from_secs(1));
        for job in &mut jobs {
            assert_eq!(job.try_wait().expect("a child"), None);
        }
    }
    for (link, mut job) in links.iter().zip(jobs) {
        link.set("up");
        let holder = || text(&output(&mut link.latch(&["status", "k"])).stdout);
        eventually(PATIENCE, "the job comes back", || {
            holder().contains("holder: 10.9.8.2:")
        });
        link.end("k");
        assert_eq!(ended(&mut job), (Some(7), String::new()));
        assert!(holder().contains("held: false"));
    }
}
