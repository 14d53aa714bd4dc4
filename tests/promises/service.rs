//! The servers of a chaos run: one alone, or two that are one service.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{getrlimit, Resource};

use crate::clients::ADMIN_TOKEN;
use crate::place::Place;
#[cfg(feature = "cluster")]
use crate::support::cluster::{self, Etcd};
use crate::support::footprint::Footprint;
use crate::support::history::Instant;
use crate::support::limited::limit_to;
#[cfg(feature = "cluster")]
use crate::support::silent::free_port;
use crate::support::{eventually, is_soon, Client, Daemon, Scheme, PATIENCE};

/// How long holders may take after SIGTERM; leases are shorter.
pub const SHUTDOWN: Duration = Duration::from_secs(3);

/// What a chaos run is about.
pub enum House {
    /// One server, whose clients speak this over the network.
    Alone(Scheme),
    /// One server, half of whose clients speak HTTP.
    WithHttp,
    /// Two servers on this etcd, one of which passes its clients on to the other.
    #[cfg(feature = "cluster")]
    Cluster(Etcd),
}

pub struct Service {
    directory: PathBuf,
    way: Way,
    servers: Vec<Server>,
    /// How many servers were started.
    run_count: u32,
    /// When a server was told to end or killed.
    pub ends: Vec<Instant>,
}

/// How to start a server.
enum Way {
    Alone {
        scheme: Scheme,
        has_http: bool,
    },
    #[cfg(feature = "cluster")]
    Cluster(Etcd),
}

struct Server {
    daemon: Daemon,
    place: Place,
    /// What it takes with no client.
    calm: Footprint,
}

impl Service {
    pub fn start(house: House, directory: &Path) -> Service {
        fs::write(directory.join("admin"), ADMIN_TOKEN).expect("there is room");
        let (way, count) = match house {
            House::Alone(scheme) => {
                let has_http = false;
                (Way::Alone { scheme, has_http }, 1)
            }
            House::WithHttp => {
                let (scheme, has_http) = (Scheme::Plain, true);
                (Way::Alone { scheme, has_http }, 1)
            }
            #[cfg(feature = "cluster")]
            House::Cluster(etcd) => (Way::Cluster(etcd), 2),
        };
        let mut service = Service {
            directory: directory.to_owned(),
            way,
            servers: Vec::new(),
            run_count: 0,
            ends: Vec::new(),
        };
        for index in 0..count {
            let server = service.start_server(index);
            service.servers.push(server);
        }
        service.announce();
        service
    }

    /// How many servers there are.
    pub fn server_count(&self) -> u64 {
        self.servers.len() as u64
    }

    /// The servers are one service, so the grants of one live on in the other.
    /// Whether clients can also ask over HTTP.
    pub fn has_http(&self) -> bool {
        matches!(self.way, Way::Alone { has_http: true, .. })
    }

    pub fn is_cluster(&self) -> bool {
        self.servers.len() > 1
    }

    pub fn daemon(&self, index: usize) -> &Daemon {
        &self.servers[index].daemon
    }

    /// Starts a server anew that has ended.
    pub fn restart(&mut self, index: usize) {
        self.servers[index] = self.start_server(index);
        self.announce();
    }

    fn announce(&self) {
        let places = self.servers.iter().map(|server| server.place.clone());
        Place::announce(&self.directory, &places.collect::<Vec<Place>>());
    }

    fn start_server(&mut self, index: usize) -> Server {
        self.run_count += 1;
        let path = |name: String| self.directory.join(name).display().to_string();
        let socket = path(format!("socket-{index}-{}", self.run_count));
        let (fences, admin) = (path("fences".to_owned()), path("admin".to_owned()));
        let shutdown = SHUTDOWN.as_secs().to_string();
        let common = [
            "--unix",
            &socket,
            "--admin-token-file",
            &admin,
            "--read-timeout",
            "5",
            "--write-timeout",
            "2",
            "--gc-max-idle",
            "1",
            "--shutdown-timeout",
            &shutdown,
        ];
        let place = |term, addr| Place {
            term,
            addr,
            socket: socket.clone().into(),
            ca: None,
            http: None,
        };
        match &self.way {
            Way::Alone { scheme, has_http } => {
                let mut own = [&common[..], &["--fence-state-file", &fences]].concat();
                if *has_http {
                    own.extend(["--http", "127.0.0.1:0", "--http-grants"]);
                }
                let daemon = Daemon::start_over(*scheme, &own);
                let mut place = place(Some(self.run_count), daemon.addr());
                place.ca = ca_of(*scheme);
                place.http = has_http.then(|| door_of(&daemon));
                Server::new(daemon, place)
            }
            #[cfg(feature = "cluster")]
            Way::Cluster(etcd) => {
                let before = self.servers.get(index);
                let port = before.map_or_else(free_port, |server| server.place.addr.port());
                let server = cluster::Server::start_at(port, &etcd.endpoints(), &common, None);
                let place = place(None, ([127, 0, 0, 1], port).into());
                match before {
                    Some(before) => Server {
                        daemon: server.daemon,
                        place,
                        calm: before.calm,
                    },
                    None => Server::new(server.daemon, place),
                }
            }
        }
    }

    /// All clients have gone: so has all that the servers had for them.
    pub fn expect_nothing_left(&self) {
        let first = &self.servers[0];
        eventually(4 * PATIENCE, "no key is held or waited for", || {
            let stats = self.connect(first).stats();
            let is_empty = |list: &str| stats[list].as_array().is_some_and(Vec::is_empty);
            is_empty("locks") && is_empty("semaphores") && stats["connections"] == 1
        });
        // A server may have another part than at its start.
        let most = |of: fn(&Footprint) -> usize| {
            let figures = self.servers.iter().map(|server| of(&server.calm));
            figures.max().expect("there is a server")
        };
        let (descriptors, threads) = (most(|calm| calm.descriptors), most(|calm| calm.threads));
        // Threads wait for the next client for a while.
        for server in &self.servers {
            let pid = server.daemon.pid();
            let is_calm = || {
                let left = Footprint::of(pid);
                left.descriptors <= descriptors && left.threads <= threads
            };
            assert!(
                is_soon(3 * PATIENCE, is_calm),
                "{:?} and then {}",
                server.calm,
                held_by(pid)
            );
        }
    }

    fn connect(&self, server: &Server) -> Client {
        connect(&server.place)
    }
}

impl Server {
    /// A server that has no clients yet.
    fn new(daemon: Daemon, place: Place) -> Server {
        let pid = daemon.pid();
        // What the server opens once to count its memory is there from the start.
        let usual = getrlimit(Resource::As);
        limit_to(pid, Resource::As, Some(1 << 46));
        connect(&place).stats();
        limit_to(pid, Resource::As, usual.current);
        eventually(PATIENCE, "only this test is connected", || {
            connect(&place).stats()["connections"] == 1
        });
        let calm = Footprint::of(pid);
        Server {
            daemon,
            place,
            calm,
        }
    }
}

fn connect(place: &Place) -> Client {
    let scheme = match place.ca {
        None => Scheme::Plain,
        #[cfg(feature = "tls")]
        Some(_) => Scheme::Tls,
        #[cfg(not(feature = "tls"))]
        Some(_) => unreachable!("this build has no TLS"),
    };
    Client::open(scheme, place.addr)
}

/// Where a server speaks HTTP.
fn door_of(daemon: &Daemon) -> SocketAddr {
    daemon.wait_for_log("listening http=", PATIENCE);
    let log = daemon.log();
    let door = log.split("listening http=").nth(1).expect("it is there");
    let door = door.lines().next().expect("a line");
    door.parse().expect("an address")
}

fn ca_of(scheme: Scheme) -> Option<PathBuf> {
    match scheme {
        Scheme::Plain => None,
        #[cfg(feature = "tls")]
        Scheme::Tls => Some(crate::support::tls::common().ca()),
    }
}

/// The threads and descriptors of a process.
fn held_by(pid: u32) -> String {
    let entries = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).expect("it runs");
    let names = entries("task").flatten().map(|task| {
        let name = fs::read_to_string(task.path().join("comm"));
        name.unwrap_or_default().trim().to_owned()
    });
    let links = entries("fd").flatten().map(|fd| {
        let target = fs::read_link(fd.path());
        target.unwrap_or_default().display().to_string()
    });
    names.chain(links).collect::<Vec<String>>().join(", ")
}
