//! Two hosts with a network between them: namespaces of the network, with a link that a test takes
//! down. The host's own network is not touched.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};

use super::needs::Program;
use super::{eventually, PATIENCE};

/// The host of the servers and that of the clients.
pub struct Hosts {
    pub near: Host,
    pub far: Host,
}

/// A network namespace. It lives as long as the process in it.
pub struct Host {
    process: Child,
    ip: Program,
    interface: &'static str,
    pub address: Ipv4Addr,
}

impl Hosts {
    pub fn new(ip: &Program) -> Hosts {
        let host = |interface, last| Host::new(ip, interface, Ipv4Addr::new(10, 9, 8, last));
        let hosts = Hosts {
            near: host("near", 1),
            far: host("far", 2),
        };
        let peer = hosts.far.process.id();
        let pair = format!("link add near type veth peer name far netns {peer}");
        hosts.near.ip(&pair);
        for host in [&hosts.near, &hosts.far] {
            let Host {
                interface, address, ..
            } = host;
            host.ip("link set lo up");
            host.ip(&format!("addr add {address}/30 dev {interface}"));
            host.link("up");
        }
        hosts
    }
}

impl Host {
    fn new(ip: &Program, interface: &'static str, address: Ipv4Addr) -> Host {
        let mut sleep = Command::new("unshare");
        sleep.args(["-n", "sleep", "600"]).stdin(Stdio::null());
        let host = Host {
            process: sleep.spawn().expect("it is installed"),
            ip: ip.clone(),
            interface,
            address,
        };
        let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let process = host.process.id().to_string();
        let is_own = || network(&process) != network("self");
        eventually(PATIENCE, "it is in a namespace of its own", is_own);
        host
    }

    /// The words before a command that is to run on this host.
    pub fn entry(&self) -> [String; 2] {
        ["nsenter".to_owned(), format!("--net={}", self.namespace())]
    }

    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.process.id())
    }

    /// A command that becomes `program` on this host.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let [nsenter, network] = self.entry();
        let mut command = Command::new(nsenter);
        command.arg(network).arg(program);
        command
    }

    /// Does this on a thread that is on this host. Sockets that it makes stay there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let on_host = scope.spawn(|| {
                let namespace = File::open(self.namespace()).expect("the process lives");
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind).expect("the right to do so");
                work()
            });
            on_host.join().expect("no panic")
        })
    }

    /// A port of this host.
    pub fn port(&self, port: u16) -> SocketAddr {
        (self.address, port).into()
    }

    /// Takes the link of this host up or down.
    pub fn link(&self, state: &str) {
        self.ip(&format!("link set {} {state}", self.interface));
    }

    /// Runs ip(8) on this host.
    pub fn ip(&self, command: &str) {
        let mut ip = self.command(&self.ip);
        let status = ip.args(command.split(' ')).status();
        assert!(status.expect("it is installed").success(), "{command}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
