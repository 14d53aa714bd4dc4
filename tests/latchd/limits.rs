//! Caps are exact, however many race for them, and what the system refuses is no disaster.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::at_the_end::AtTheEnd;
use crate::support::barrier::Barrier;
use crate::support::limited::{is_served, limited, raise_our_own_limit, with_processes};
use crate::support::needs::needs;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, parse_grant, processor_time, Client, Daemon, Scheme, PATIENCE};

// ---- caps of our own -------------------------------------------------------------------------

#[test]
fn by_default_neither_one_client_nor_kept_grants_take_all_keys() {
    let daemon = Daemon::start(&["--max-locks", "300"]);
    let mut greedy = daemon.connect();
    for number in 0..75 {
        greedy.acquire(&format!("k{number}"), 0);
    }
    assert_eq!(greedy.request("l", "k75", "0"), "error_max_locks");
    let mut keeper = daemon.connect();
    let keep = |keeper: &mut Client, key: &str| {
        let token = keeper.acquire(key, 0).token;
        keeper.request("keep", key, &format!("{token} 100"))
    };
    for number in 0..150 {
        assert_eq!(keep(&mut keeper, &format!("kept{number}")), "ok 100");
    }
    assert_eq!(keep(&mut keeper, "kept150"), "error_max_locks");
    daemon.connect().acquire("another", 0);
}

#[test]
fn racing_clients_never_hold_more_keys_than_max_locks() {
    const CAP: i64 = 8;
    let daemon = Daemon::start(&["--max-locks", "8"]);
    let held = AtomicI64::new(0);
    let race = || {
        race(&daemon, 16, |client, number, round| {
            let key = format!("k{}", (number * 7 + round * 13) % 64);
            let reply = client.request("l", &key, "0");
            let Some(grant) = parse_grant(&reply, "ok") else {
                assert!(
                    matches!(reply.as_str(), "timeout" | "error_max_locks"),
                    "{reply}"
                );
                return usize::from(reply == "error_max_locks");
            };
            // Counted after the grant and until before the release, so never more than there are.
            let now_held = held.fetch_add(1, Ordering::SeqCst) + 1;
            assert!(now_held <= CAP, "{now_held} keys are held");
            thread::sleep(Duration::from_millis(2)); // so that many hold at a time
            held.fetch_sub(1, Ordering::SeqCst);
            assert_eq!(client.request("r", &key, &grant.token), "ok");
            0
        })
    };
    // On a busy machine, a second may see few of them at a time.
    let refused_count = (0..30).map(|_| race()).find(|count| *count > 0);
    println!("{refused_count:?} were refused");
    assert!(
        refused_count.is_some(),
        "the cap was never reached, so nothing was shown"
    );
}

#[test]
fn exactly_max_slots_are_held_by_clients_that_race_for_them() {
    let daemon = Daemon::start(&["--max-slots", "100"]);
    let mut clients: Vec<Client> = (0..16).map(|_| daemon.connect()).collect();
    for round in 0..20 {
        let grants = at_once(&mut clients, |client| {
            let replies = (0..10).map(|_| client.request("sl", "k", "0 1048576"));
            let grants = replies.filter_map(|reply| {
                assert!(
                    reply == "error_max_locks" || reply.starts_with("ok "),
                    "{reply}"
                );
                parse_grant(&reply, "ok")
            });
            grants.collect::<Vec<_>>()
        });
        let grant_count = grants.iter().map(Vec::len).sum::<usize>();
        assert_eq!(grant_count, 100, "in round {round}");
        let releases = grants
            .iter()
            .flatten()
            .map(|grant| format!("sr\nk\n{}\n", grant.token));
        clients[0].send(&releases.collect::<String>());
        (0..grant_count).for_each(|_| clients[0].expect("ok"));
    }
}

#[test]
fn exactly_max_connections_of_racing_clients_are_served() {
    const RACERS: usize = 24;
    let daemon = Daemon::start_directly(Scheme::Plain, &["--max-connections", "9"]);
    let mut monitor = daemon.connect(); // takes one place itself
    monitor.stats();
    let descriptors = format!("/proc/{}/fd", daemon.pid());
    let descriptor_count = || std::fs::read_dir(&descriptors).expect("it runs").count();
    let at_rest = descriptor_count();
    for round in 0..20 {
        // A place is free when the descriptor is closed, a moment after the statistics say so.
        eventually(PATIENCE, "the last round has gone", || {
            monitor.stats()["connections"] == 1 && descriptor_count() == at_rest
        });
        // They are kept until all have tried.
        let mut clients: Vec<Option<Client>> = (0..RACERS).map(|_| None).collect();
        let served = at_once(&mut clients, |place| {
            is_served(place.insert(daemon.connect()))
        });
        let served_count = served.iter().filter(|&&served| served).count();
        assert_eq!(served_count, 8, "in round {round}");
    }
}

#[test]
fn over_max_connections_the_stream_ends_without_a_byte() {
    fair_test(|| {
        let daemon = Daemon::start(&["--max-connections", "3"]);
        let mut served: Vec<Client> = (0..3).map(|_| daemon.connect()).collect();
        assert!(served.iter_mut().all(is_served));
        for _ in 0..10 {
            daemon.connect().expect_eof();
            drop(served.pop());
            let left_at = Instant::now();
            eventually(PATIENCE, "the place is free again", || {
                let mut client = daemon.connect();
                let fits = is_served(&mut client);
                served.extend(fits.then_some(client));
                fits
            });
            // Within 100 ms, with tenfold slack for a machine that is shared.
            in_time!(left_at.elapsed() < Duration::from_secs(1));
        }
        assert!(
            served.iter_mut().all(is_served),
            "the others were disturbed"
        );
    });
}

#[test]
fn strangers_who_send_no_token_leave_the_places_to_clients() {
    let options = ["--auth-token", "secret", "--max-connections", "40"];
    let daemon = Daemon::start_directly(Scheme::Plain, &options);
    let authenticated = |mut client: Client| {
        assert_eq!(client.request("auth", "_", "secret"), "ok");
        client
    };
    // Clients that come at once, and have no time to send the token, keep their places.
    let at_once: Vec<Client> = (0..40).map(|_| daemon.connect()).collect();
    let mut clients: Vec<Client> = at_once.into_iter().map(authenticated).collect();
    clients.truncate(30);
    eventually(PATIENCE, "ten have left", || {
        clients[0].stats()["connections"] == 30
    });
    let mut strangers: Vec<Client> = (0..10).map(|_| daemon.connect()).collect();
    // If the server is full, each client displaces a stranger, and so does each stranger.
    strangers.push(daemon.connect());
    strangers.remove(0).expect_eof();
    for mut stranger in strangers {
        clients.push(authenticated(daemon.connect()));
        stranger.expect_eof();
    }
    assert!(clients.iter_mut().all(is_served));
    let line = "WARN turned-away reason=max-connections-without-token ";
    daemon.wait_for_log(line, PATIENCE);
    daemon.connect().expect_eof();
    let counters = clients[0].request("stats", "counters", "");
    assert!(counters.contains(r#","turned_away":12,"#), "{counters}");
    assert_eq!(clients[0].stats()["turned_away"], 12);
}

#[test]
fn one_address_gets_no_more_than_its_connections() {
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let socket = directory.path().join("sock");
    let unix = format!("--unix={}", socket.display());
    let daemon = Daemon::start_directly(Scheme::Plain, &["--max-connections-per-ip=2", &unix]);
    let mut served = [daemon.connect(), daemon.connect()];
    assert!(served.iter_mut().all(is_served));
    for _ in 0..10 {
        daemon.connect().expect_eof();
    }
    let line = "turned-away reason=max-connections-per-ip source=127.0.0.1 ";
    daemon.wait_for_log(line, PATIENCE);
    // Another address, and a Unix socket, are not concerned.
    let mut others = [(); 3].map(|()| Client::unix(&socket));
    assert!(others.iter_mut().all(is_served));
    assert!(is_served(&mut Client::tcp_from(
        [127, 0, 0, 2],
        daemon.addr()
    )));
    let [first, mut second] = served;
    drop(first);
    eventually(PATIENCE, "the place is free again", || {
        is_served(&mut daemon.connect())
    });
    assert!(is_served(&mut second));
}

// ---- what the system refuses -----------------------------------------------------------------

#[test]
fn out_of_descriptors_the_server_serves_on_without_spinning() {
    fair_test(|| {
        // The cap is far beyond the descriptors: the system says no, not the server.
        let mut command = limited(&["prlimit", "--nofile=64"]);
        command.args(["--max-connections", "1000"]);
        survives_a_crowd(&Daemon::from_command(command));
    });
}

#[test]
fn the_default_cap_on_connections_fits_the_descriptors() {
    fair_test(|| {
        let command = limited(&["prlimit", "--nofile=64"]);
        let daemon = Daemon::from_command(command);
        survives_a_crowd(&daemon);
        eventually(PATIENCE, "the crowd has left", || {
            // It is refused while the rest of the crowd is at the cap.
            let mut client = daemon.connect();
            is_served(&mut client) && client.stats()["connections"] == 1
        });

        // Over a cap of its own it hangs up, so nobody is left to wonder in the backlog.
        let mut crowd: Vec<Client> = (0..100).map(|_| daemon.connect()).collect();
        let served_count = crowd
            .iter_mut()
            .map(is_served)
            .filter(|&served| served)
            .count();
        println!("{served_count} of 100 served with 64 descriptors");
        assert!((16..64).contains(&served_count), "{served_count} served");
    });
}

#[test]
fn a_cap_beyond_what_the_machine_allows_is_told_or_lowered() {
    let log_of = |limit: &str, cap: &str| {
        let mut command = limited(&["prlimit", limit]);
        command.args(["--max-connections", cap]);
        let daemon = Daemon::from_command(command);
        daemon.wait_for_log("listening ", PATIENCE);
        daemon.log()
    };
    let log = log_of("--nofile=200:200", "1000");
    let told = "WARN few-descriptors max_connections=1000 allowed=136\n";
    assert!(log.contains(told), "{log}");
    assert!(log.contains(" max_connections=1000\n"), "{log}");
    let log = log_of("--nofile=200:200", "100");
    assert!(!log.contains("few-descriptors"), "{log}");
    assert!(!log.contains("high-caps"), "{log}");
    let daemon = Daemon::start(&["--max-slots", "4294967295"]);
    daemon.wait_for_log("WARN high-caps worst_case_mb=23", PATIENCE);
    // Stacks get half of the address space.
    let log = log_of("--as=600000000", "1000000");
    let cap = log.split(" max_connections=").nth(1).expect("it starts");
    let cap = cap.split_whitespace().next().map(str::parse::<u32>);
    assert!(matches!(cap, Some(Ok(1..100_000))), "{log}");
}

#[test]
fn a_refused_thread_costs_one_client_its_connection() {
    needs!(root);
    let Some((_program, daemon)) = with_processes(12) else {
        return;
    };
    let mut crowd: Vec<Client> = (0..40).map(|_| daemon.connect()).collect();
    let mut served: Vec<Client> = Vec::new();
    let mut refused_count = 0;
    for mut client in crowd.drain(..) {
        if is_served(&mut client) {
            served.push(client);
        } else {
            refused_count += 1;
        }
    }
    println!("{} served, {refused_count} refused", served.len());
    assert!(!served.is_empty() && refused_count > 0);
    assert!(
        served.iter_mut().all(is_served),
        "those who have a thread were disturbed"
    );

    let count_before = served.len();
    drop(served);
    let mut again = Vec::new();
    eventually(PATIENCE, "as many are served as before", || {
        let mut client = daemon.connect();
        if is_served(&mut client) {
            again.push(client);
        }
        again.len() == count_before
    });
    assert!(daemon.wait_exit(Duration::ZERO).is_none());
}

// ---- helpers ---------------------------------------------------------------------------------

/// Lets `count` clients do `act` over and over for a second, each with its number and its round.
/// Gives the sum of what they return.
fn race(
    daemon: &Daemon,
    count: usize,
    act: impl Fn(&mut Client, usize, usize) -> usize + Sync,
) -> usize {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = AtTheEnd(&stop);
        let threads: Vec<_> = (0..count)
            .map(|number| {
                let mut client = daemon.connect();
                let (stop, act) = (&stop, &act);
                scope.spawn(move || {
                    let rounds = (0..).take_while(|_| !stop.load(Ordering::Relaxed));
                    rounds
                        .map(|round| act(&mut client, number, round))
                        .sum::<usize>()
                })
            })
            .collect();
        thread::sleep(Duration::from_secs(1));
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    })
}

/// Lets each of `clients` do `act` in a thread of its own, all at the same moment.
fn at_once<C: Send, R: Send>(clients: &mut [C], act: impl Fn(&mut C) -> R + Sync) -> Vec<R> {
    let start = Barrier::new(clients.len());
    thread::scope(|scope| {
        let (start, act) = (&start, &act);
        let one = |client| {
            scope.spawn(move || {
                start.wait();
                act(client)
            })
        };
        let threads: Vec<_> = clients.iter_mut().map(one).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Two hundred connect where there is room for fewer than sixty-four; then they leave.
fn survives_a_crowd(daemon: &Daemon) {
    raise_our_own_limit();
    let mut early: Vec<Client> = (0..10).map(|_| daemon.connect()).collect();
    assert!(early.iter_mut().all(is_served));
    let crowd: Vec<Client> = (0..200).map(|_| daemon.connect()).collect();

    let before = processor_time(daemon.pid());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        for client in &mut early {
            let asked = Instant::now();
            assert!(
                is_served(client),
                "a client that was there before lost its connection"
            );
            in_time!(
                asked.elapsed() < Duration::from_millis(500),
                "and had to wait {:?}",
                asked.elapsed()
            );
        }
        thread::sleep(Duration::from_millis(100));
    }
    let spent = processor_time(daemon.pid()) - before;
    println!("{spent:?} of processor time in a second out of descriptors");
    in_time!(
        spent < Duration::from_millis(200),
        "{spent:?} of processor time in a second: it spins"
    );

    drop(crowd);
    drop(early);
    eventually(
        PATIENCE,
        "a new client is served once the others have left",
        || is_served(&mut daemon.connect()),
    );
    assert!(
        daemon.wait_exit(Duration::ZERO).is_none(),
        "the daemon died"
    );
}
