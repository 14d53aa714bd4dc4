//! What a standby passes on, and when it does not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::{Address, Client as Guards};

use crate::house::{Etcd, Server, TAKE_OVER, TTL};
use crate::stopping::acquire_as_adopter;
use crate::support::latch::{output, wait, Latch};
use crate::support::needs::{needs, Program};
use crate::support::silent::free_port;
use crate::support::{eventually, program, Client, Daemon, Event, Signal, PATIENCE};

/// One member of etcd, an active server and a standby.
fn pair(programs: &[Program; 2], arguments: &[&str]) -> (Etcd, Server, Server) {
    let etcd = Etcd::start(programs, 1);
    let active = Server::active(&etcd.endpoints(), arguments);
    let standby = Server::start(&etcd.endpoints(), arguments);
    standby.wait_for("standby active=", 1);
    (etcd, active, standby)
}

fn address(server: &Server) -> String {
    format!("127.0.0.1:{}", server.port)
}

/// The epoch of the active server, by its own word.
fn epoch(active: &Server) -> String {
    let role = active.connect().request("cluster", "_", "_");
    let words: Vec<&str> = role.split(' ').collect();
    assert_eq!(words[..2], ["ok", "active"], "{role}");
    words[2].to_owned()
}

/// A command line of `latch` for a server.
fn latch(server: &Server) -> Command {
    let mut command = Command::new(program("latch"));
    command
        .env("LATCH_SERVER", address(server))
        .env_remove("LATCH_AUTH_TOKEN_FILE")
        .stdin(Stdio::null());
    command
}

fn ends(client: &mut Client, within: Duration) -> bool {
    matches!(client.next_event(within), Event::Eof | Event::Reset)
}

#[test]
fn each_server_tells_its_role() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let epoch = epoch(&active);
    let expected = [
        (&active, format!("ok active {epoch} {}", address(&active))),
        (&standby, format!("ok standby {epoch} {}", address(&active))),
    ];
    for (server, role) in &expected {
        let mut client = server.connect();
        // The key and the argument do not matter.
        assert_eq!(client.request("cluster", "_", "_"), *role);
        assert_eq!(client.request("cluster", "", "any thing"), *role);
        assert_eq!(client.request("ping", "_", "_"), "ok");
        // From here on the client talks to the active server.
        assert_eq!(client.request("cluster", "_", "_"), expected[0].1);
    }
    let mut telnet = standby.connect();
    telnet.send("cluster\r\n\r\n\r\n");
    telnet.expect(&expected[1].1);
    let mut slow = standby.connect();
    for piece in ["clus", "ter\n_", "\n_\ncluster\n_\n_\nping\n_\n_\n"] {
        slow.send(piece);
        // Without a pause, the server would read the pieces as one.
        thread::sleep(Duration::from_millis(100));
    }
    for line in [&expected[1].1, &expected[1].1, "ok"] {
        slow.expect(line);
    }
    let alone = Server::start("127.0.0.1:9", &[]);
    let role = alone.connect().request("cluster", "_", "_");
    assert_eq!(role, "ok standby 0 -");
}

#[test]
fn the_role_is_told_before_auth_and_is_no_word_of_others() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &["--auth-token", "secret"]);
    for (server, role) in [(&active, "ok active "), (&standby, "ok standby ")] {
        let told = server.connect().request("cluster", "_", "_");
        assert!(told.starts_with(role), "{told}");
        let mut client = server.connect();
        assert_eq!(client.request("auth", "_", "secret"), "ok");
        assert_eq!(client.request("ping", "_", "_"), "ok");
        let refused = server.connect().request("ping", "_", "_");
        assert_eq!(refused, "error_auth");
    }
    let mut alone = Daemon::command();
    let port = free_port().to_string();
    alone.args(["--port", &port, "--print-port"]);
    let alone = Daemon::from_command(alone);
    let mut client = alone.connect();
    for word in ["cluster", "relay"] {
        assert_eq!(client.request(word, "1", "_"), "error");
    }
    let stats = alone.connect().request("stats", "_", "_");
    assert!(stats.ends_with("\"idle_semaphores\":[]}"), "{stats}");
}

#[test]
fn relayed_clients_count_as_strangers_at_the_active_server_alone() {
    let programs = needs!("etcd", "etcdctl");
    let options = ["--auth-token", "secret", "--max-connections", "40"];
    let (_etcd, active, standby) = pair(&programs, &options);
    let enter = |server: &Server, command: &str, argument: &str| {
        let mut client = server.connect();
        let reply = client.request(command, "_", argument);
        assert!(reply.starts_with("ok"), "{reply}");
        client
    };
    let authenticated = |server| enter(server, "auth", "secret");
    let mut clients: Vec<Client> = (0..20).map(|_| authenticated(&standby)).collect();
    let mut strangers: Vec<Client> = (0..12).map(|_| enter(&standby, "cluster", "_")).collect();
    for stranger in &mut strangers {
        // The standby relays from the first complete line on.
        stranger.send("auth\n");
    }
    // The last of these is one too many at the active server, where only the relayed strangers can
    // give way.
    clients.extend((0..9).map(|_| authenticated(&active)));
    eventually(PATIENCE, "the active server turns strangers away", || {
        active
            .daemon
            .log()
            .contains("max-connections-without-token")
    });
    for client in &mut clients {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    assert!(!standby.daemon.log().contains("turned-away"));
}

#[test]
fn a_relay_must_know_the_epoch_and_come_first() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let epoch = epoch(&active);
    let relayed = |server: &Server, epoch: &str| {
        let mut client = server.connect();
        client.send(&format!("relay\n{epoch}\n_\n"));
        client
    };
    let mut client = relayed(&active, &epoch);
    assert_eq!(client.request("ping", "_", "_"), "ok");
    assert_eq!(client.request("relay", &epoch, "_"), "error");
    // Another standby between them changes nothing, and words typed by hand still count.
    let mut client = relayed(&active, &epoch);
    client.send("help\n");
    assert!(client.line().starts_with("ok commands"));
    for wrong in ["0", "1", "", "x", &format!("{epoch}0")] {
        assert!(ends(&mut relayed(&active, wrong), PATIENCE), "{wrong:?}");
    }
    // A standby is no active server.
    assert!(ends(&mut relayed(&standby, &epoch), PATIENCE));
}

#[test]
fn a_unix_socket_of_a_standby_leads_to_the_active_server() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let active = Server::active(&etcd.endpoints(), &[]);
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let unix = ["--unix", socket.to_str().expect("text")];
    let standby = Server::start(&etcd.endpoints(), &unix);
    standby.wait_for("standby active=", 1);
    let mut client = Client::unix(&socket);
    let grant = client.acquire_for("k", 0, 60);
    // The active server cannot see that this is an operator.
    assert_eq!(client.request("break", "k", "_"), "error_auth");
    assert_eq!(active.connect().request("r", "k", &grant.token), "ok");
}

#[test]
fn statistics_say_how_the_journal_fares() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let mut holder = standby.connect();
    holder.acquire_for("k", 0, 600);
    let stats = holder.stats();
    let figures = &stats["cluster"];
    assert_eq!(figures["role"], "active");
    assert_eq!(figures["epoch"].to_string(), epoch(&active));
    assert_eq!(figures["orphans"], 0);
    assert!(figures["journal_ms"].as_f64().is_some_and(|ms| ms > 0.0));
    active.kill();
    standby.wait_until_active(1);
    let stats = standby.connect().stats();
    assert_eq!(stats["cluster"]["orphans"], 1);
    assert_eq!(stats["locks"][0]["owner_conn_id"], 0);
}

#[test]
fn everything_passes_through_in_both_directions() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, _active, standby) = pair(&programs, &[]);
    let mut client = standby.connect();
    let mut writer = client.writer();
    const COUNT: usize = 100_000;
    let writing = thread::spawn(move || {
        let text = "ping\n_\n_\n".repeat(COUNT);
        writer.write_all(text.as_bytes()).expect("a reader");
    });
    for _ in 0..COUNT {
        client.expect("ok");
    }
    writing.join().expect("no panic");
    // A half-close passes through, and the replies still come.
    client.send("ping\n_\n_\nping\n_\n_\n");
    client.half_close();
    client.expect("ok");
    client.expect("ok");
    client.expect_eof();
}

#[test]
fn a_client_that_leaves_frees_what_it_held_and_its_place() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let mut holder = standby.connect();
    holder.acquire_for("k", 0, 600);
    let mut waiter = standby.connect();
    waiter.send("l\nk\n600\n");
    let mut next = active.connect();
    eventually(PATIENCE, "it waits", || {
        next.stats()["locks"][0]["waiters"] == 1
    });
    waiter.reset();
    eventually(PATIENCE, "its place is free", || {
        next.stats()["locks"][0]["waiters"] == 0
    });
    drop(holder);
    next.acquire("k", 10);
}

#[test]
fn a_client_that_sends_nothing_is_turned_away_in_time() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, _active, standby) = pair(&programs, &["--read-timeout", "1"]);
    for sent in ["", "clu", "cluster\n_\n"] {
        let began = Instant::now();
        let mut client = standby.connect();
        client.send(sent);
        let event = client.next_event(PATIENCE);
        let took = began.elapsed();
        let expected = match sent {
            "cluster\n_\n" => Event::Eof,
            _ => Event::Line(b"error".to_vec()),
        };
        assert!(event == expected || event == Event::Reset, "{event:?}");
        let time = Duration::from_millis(900)..Duration::from_secs(5);
        assert!(time.contains(&took), "{sent:?}: {took:?}");
    }
}

#[test]
fn a_client_that_never_reads_goes_after_the_write_timeout() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let short = ["--write-timeout", "1"];
    let active = Server::active(&etcd.endpoints(), &short);
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let unix = ["--unix", socket.to_str().expect("text")];
    let patient = ["--shutdown-timeout", "0"];
    let standby = Server::start(&etcd.endpoints(), &[&short[..], &unix, &patient].concat());
    standby.wait_for("standby active=", 1);
    let mut holder = active.connect();
    const KEYS: usize = 100;
    let requests = (0..KEYS).map(|number| format!("l\n{number:0>250}\n0 600\n"));
    holder.send(&requests.collect::<String>());
    for _ in 0..KEYS {
        assert!(holder.line().starts_with("ok "));
    }
    // The active server has read all of this when it closes: no reset tells the standby so.
    let mut deaf = Client::unix(&socket);
    assert_eq!(deaf.request("ping", "_", "_"), "ok");
    deaf.send(&"stats\nholders\n_\n".repeat(60));
    // It ends when the last connection has.
    standby.daemon.signal(Signal::TERM);
    assert!(standby.daemon.wait_exit(PATIENCE).is_some());
    drop(deaf);
}

#[test]
fn a_standby_that_stops_leaves_locks_to_clients_that_adopt() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let mut adopter = standby.connect();
    let held = acquire_as_adopter(&mut adopter, "held");
    let mut waiting_adopter = standby.connect();
    let also_held = acquire_as_adopter(&mut waiting_adopter, "also-held");
    waiting_adopter.send("l\nheld\n60 60\n");
    let mut other = standby.connect();
    let others = other.acquire_for("others", 0, 60);
    standby.daemon.signal(Signal::TERM);
    for client in [&mut adopter, &mut waiting_adopter] {
        assert_eq!(client.next_event(PATIENCE), Event::Reset);
    }
    // The others may finish.
    let mut direct = active.connect();
    assert_eq!(direct.request("l", "others", "0"), "timeout");
    assert_eq!(other.request("n", "others", &others.token), "ok 33");
    for (key, grant) in [("held", &held), ("also-held", &also_held)] {
        assert_eq!(direct.request("l", key, "0"), "timeout");
        let adopt = format!("{} 60", grant.token);
        assert_eq!(direct.request("adopt", key, &adopt), "ok 60");
    }
    drop(other);
    direct.acquire("others", 10);
    let status = standby.daemon.wait_exit(PATIENCE);
    assert!(status.is_some_and(|status| status.success()));
}

#[test]
fn a_standby_that_stops_says_nothing_to_its_clients() {
    let programs = needs!("etcd", "etcdctl");
    let (etcd, active, _) = pair(&programs, &[]);
    let standby = Server::start(&etcd.endpoints(), &["--shutdown-timeout", "1"]);
    standby.wait_for("standby active=", 1);
    let mut holder = active.connect();
    holder.acquire_for("k", 0, 60);
    let mut waiter = standby.connect();
    waiter.send("l\nk\n60\n");
    let mut late = standby.connect();
    assert_eq!(late.request("ping", "_", "_"), "ok");
    standby.daemon.signal(Signal::TERM);
    standby.wait_for("draining", 1);
    // It says what it can do when the standby stops already.
    late.send("hello\n_\nadopt\n");
    // The reply to that is the active server's, and may be on its way.
    while late.next_event(PATIENCE) != Event::Reset {}
    assert_eq!(waiter.next_event(PATIENCE), Event::Reset);
    let status = standby.daemon.wait_exit(PATIENCE);
    assert!(status.is_some_and(|status| status.success()));
}

#[test]
fn an_adopter_that_closes_frees_its_lock_at_once() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let mut adopter = standby.connect();
    acquire_as_adopter(&mut adopter, "k");
    drop(adopter);
    active.connect().acquire("k", 10);
}

#[test]
fn connections_end_when_another_server_is_active() {
    let programs = needs!("etcd", "etcdctl");
    let (etcd, active, standby) = pair(&programs, &[]);
    let other = Server::start(&etcd.endpoints(), &[]);
    other.wait_for("standby active=", 1);
    let mut clients = [standby.connect(), other.connect()];
    for client in &mut clients {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    // It keeps its sockets, and says nothing more.
    active.daemon.signal(Signal::STOP);
    eventually(TAKE_OVER, "one of the two is active", || {
        [&standby, &other]
            .iter()
            .any(|server| server.daemon.log().contains("INFO active epoch="))
    });
    for client in &mut clients {
        assert!(ends(client, PATIENCE));
    }
    active.daemon.signal(Signal::CONT);
}

#[test]
fn connections_last_while_etcd_is_silent() {
    let programs = needs!("etcd", "etcdctl");
    let (etcd, _active, standby) = pair(&programs, &["--etcd-ttl", "15"]);
    let mut client = standby.connect();
    assert_eq!(client.request("ping", "_", "_"), "ok");
    etcd.members[0].signal(Signal::STOP);
    // A standby asks etcd at least every third of the TTL, and a request takes a second.
    client.nothing_within(Duration::from_secs(8));
    assert_eq!(client.request("ping", "_", "_"), "ok");
    etcd.members[0].signal(Signal::CONT);
    assert_eq!(client.request("ping", "_", "_"), "ok");
}

/// The journal is slow, so the standby stops between the grant and the reply.
#[test]
fn a_standby_that_stops_leaves_no_grant_that_no_client_knows() {
    let programs = needs!("etcd", "etcdctl");
    let (etcd, active, standby) = pair(&programs, &["--log-grants"]);
    let mut holder = active.connect();
    let grant = holder.acquire("k", 0);
    let mut waiter = standby.connect();
    assert!(waiter.request("hello", "_", "adopt").starts_with("ok "));
    waiter.send("l\nk\n60 60\n");
    let waits = || active.connect().stats()["locks"][0]["waiters"] == 1;
    eventually(PATIENCE, "it waits", waits);
    etcd.members[0].signal(Signal::STOP);
    holder.send(&format!("r\nk\n{}\n", grant.token));
    active.wait_for("granted key=k", 2);
    standby.daemon.signal(Signal::TERM);
    assert!(ends(&mut waiter, PATIENCE));
    etcd.members[0].signal(Signal::CONT);
    holder.expect("ok");
    holder.acquire("k", 10);
}

#[test]
fn a_client_waits_for_an_active_server_but_not_for_ever() {
    let programs = needs!("etcd", "etcdctl");
    let dead = format!("127.0.0.1:{}", free_port());
    let alone = Server::start(&dead, &[]);
    let began = Instant::now();
    let mut client = alone.connect();
    client.send("ping\n_\n_\n");
    assert!(ends(&mut client, TTL * 3 + PATIENCE));
    assert!(began.elapsed() >= TTL * 3 - Duration::from_secs(1));
    // One that has left is not waited with.
    let mut client = alone.connect();
    client.send("ping\n_\n_\n");
    client.half_close();
    assert!(ends(&mut client, TTL * 2));

    let etcd = Etcd::start(&programs, 1);
    etcd.members[0].signal(Signal::STOP);
    let server = Server::start(&etcd.endpoints(), &[]);
    let mut client = server.connect();
    client.send("ping\n_\n_\n");
    client.nothing_within(Duration::from_secs(1));
    etcd.members[0].signal(Signal::CONT);
    // It becomes active itself.
    client.expect("ok");
}

#[test]
fn a_client_waits_while_a_successor_takes_over() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let slow = Some("slow-takeover");
    let successor = Server::start_at(free_port(), &etcd.endpoints(), &[], slow);
    successor.wait_for("standby active=", 1);
    first.kill();
    let is_elected = || {
        let leader = etcd.ctl(&["get", "latchd/leader"]);
        leader.is_some_and(|leader| leader.contains(&address(&successor)))
    };
    eventually(TAKE_OVER, "it is elected", is_elected);
    // The other standby hears of the new term before the successor serves.
    let third = Server::start(&etcd.endpoints(), &[]);
    third.wait_for("standby active=", 1);
    let mut clients: Vec<Client> = Vec::new();
    while !successor.daemon.log().contains("active epoch=") {
        let mut client = third.connect();
        client.send("ping\n_\n_\n");
        clients.push(client);
        thread::sleep(Duration::from_millis(200));
    }
    for mut client in clients {
        assert_eq!(client.next_event(PATIENCE), Event::Line(b"ok".to_vec()));
    }
}

#[test]
fn two_standbys_make_no_loop() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    // The leader key names a standby.
    let port = free_port();
    let lease = etcd.ctl(&["lease", "grant", "600"]).expect("etcd answers");
    let lease = lease.split(' ').nth(1).expect("a number").to_owned();
    let address = format!("127.0.0.1:{port}");
    etcd.ctl(&["put", "latchd/leader", &address, "--lease", &lease])
        .expect("etcd answers");
    let one = Server::start(&etcd.endpoints(), &[]);
    one.wait_for(&format!("standby active={address}"), 1);
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
    // A server that is taken for the active one, and passes on to the standby in its turn.
    let back = SocketAddr::from(([127, 0, 0, 1], one.port));
    let passing = thread::spawn(move || {
        let (mut asked, _) = listener.accept().expect("the standby");
        let mut first = [0; 6];
        asked.read_exact(&mut first).expect("a word");
        assert_eq!(&first, b"relay\n");
        let mut again = TcpStream::connect(back).expect("it listens");
        // In one piece: the standby may close the connection once it has read the word.
        let relayed = [&first[..], b"1\n_\nping\n_\n_\n"].concat();
        again.write_all(&relayed).expect("a reader");
        let mut said = Vec::new();
        let _ = again.read_to_end(&mut said);
        said
    });
    let mut client = one.connect();
    client.send("ping\n_\n_\n");
    assert_eq!(passing.join().expect("no panic"), b"");
    assert!(ends(&mut client, PATIENCE));
}

#[test]
fn a_guard_lives_on_when_its_server_dies() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    for door in [
        format!("{}|{}", address(&active), address(&standby)),
        address(&standby),
    ] {
        let server: Address = door.parse().expect("an address");
        let client = Guards::new([server]);
        let key = format!("key-{}", door.len());
        let lock = client.lock(&key).lease(Duration::from_secs(60));
        let guard = lock.tag("a tag").acquire().expect("free");
        if !standby.daemon.log().contains("INFO active epoch=") {
            active.kill();
            standby.wait_until_active(1);
        }
        eventually(TAKE_OVER, "it is held again", || guard.is_held());
        assert_eq!(guard.loss(), None);
        let mut other = standby.connect();
        assert_eq!(other.request("l", &key, "0"), "timeout");
        let holders = other.request("stats", "holders", &key);
        assert!(holders.contains("a tag"), "{holders}");
        guard.release().expect("held");
        assert!(other.request("l", &key, "0").starts_with("ok "));
    }
}

#[test]
fn latch_run_keeps_its_lock_over_a_failover() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let directory = tempfile::tempdir().expect("there is room");
    let (began, end) = (directory.path().join("began"), directory.path().join("end"));
    let script = "echo $LATCH_TOKEN >\"$1\"; until test -e \"$2\"; do sleep 0.1; done";
    let mut command = latch(&standby);
    command
        .args(["run", "k", "--lease", "60", "--"])
        .args(["sh", "-c", script, "sh"])
        .args([&began, &end]);
    let mut running = Latch::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    eventually(PATIENCE, "the command runs", || began.exists());
    active.kill();
    standby.wait_until_active(1);
    let mut other = standby.connect();
    assert_eq!(other.request("l", "k", "0"), "timeout");
    std::fs::write(&end, "").expect("there is room");
    assert_eq!(wait(&mut running), Some(0));
    eventually(PATIENCE, "the lock is free", || {
        other.request("l", "k", "0").starts_with("ok ")
    });
    assert!(output(latch(&standby).args(["stats", "--json"]))
        .status
        .success());
}

#[test]
fn a_command_that_ends_in_a_failover_keeps_its_status() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let directory = tempfile::tempdir().expect("there is room");
    let (began, end) = (directory.path().join("began"), directory.path().join("end"));
    let script = "echo >\"$1\"; until test -e \"$2\"; do sleep 0.1; done; exit 3";
    let mut command = latch(&active);
    let servers = format!("{}|{}", address(&active), address(&standby));
    command
        .args(["run", "k", "--server", &servers, "--lease", "60", "--"])
        .args(["sh", "-c", script, "sh"])
        .args([&began, &end]);
    let mut running = Latch::start(command.stdout(Stdio::null()));
    eventually(PATIENCE, "the command runs", || began.exists());
    active.kill();
    std::fs::write(&end, "").expect("there is room");
    assert_eq!(wait(&mut running), Some(3));
}

#[test]
fn a_close_behind_a_standby_frees_and_a_reset_does_not() {
    let programs = needs!("etcd", "etcdctl");
    let (_etcd, active, standby) = pair(&programs, &[]);
    let mut next = active.connect();
    for round in 0..20 {
        let mut holder = standby.connect();
        holder.send("l\nclosed\n0 600\n");
        if round % 2 == 0 {
            holder.line();
        }
        holder.half_close();
        drop(holder);
        let grant = next.acquire("closed", 5);
        assert_eq!(next.request("r", "closed", &grant.token), "ok");
    }
    let mut holder = standby.connect();
    let asked = Instant::now();
    holder.acquire_for("reset", 0, 3);
    holder.reset();
    next.acquire("reset", 60);
    assert!(asked.elapsed() >= Duration::from_secs(3));
}

/// A client that knows no `adopt` loses its connection, too, but nobody else gets its lock before
/// the end of the lease that it was told.
#[test]
fn locks_outlive_the_death_of_their_relay() {
    let programs = needs!("etcd", "etcdctl");
    let (etcd, active, standby) = pair(&programs, &[]);
    let later = free_port();
    let server: Address = format!("{}|127.0.0.1:{later}", address(&standby))
        .parse()
        .expect("two addresses");
    let other = Server::start_at(later, &etcd.endpoints(), &[], None);
    other.wait_for("standby active=", 1);
    let guard = Guards::new([server]).lock("k").acquire().expect("free");
    let mut next = active.connect();
    let mut connection_of_guard = || {
        let reply = next.request("stats", "holders", "k");
        let json: serde_json::Value = serde_json::from_str(&reply[3..]).expect("JSON");
        json["keys"][0]["holders"][0]["conn_id"].as_u64()
    };
    let before = connection_of_guard();
    let mut bound = standby.connect();
    let asked = Instant::now();
    bound.acquire_for("bound", 0, 3);
    standby.kill();
    assert!(ends(&mut bound, PATIENCE));
    eventually(TAKE_OVER, "the guard is back", || {
        let now = connection_of_guard();
        now > Some(0) && now != before
    });
    eventually(PATIENCE, "it knows", || guard.is_held());
    next.acquire("bound", 60);
    assert!(asked.elapsed() >= Duration::from_secs(3));
    assert_eq!(next.request("l", "k", "0"), "timeout");
    guard.release().expect("it is held");
    next.acquire("k", 10);
}
