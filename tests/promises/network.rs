//! What clients wait for: no delays of our own making.

use std::time::{Duration, Instant};

use crate::support::stalls::fairly;
use crate::support::{parse_grant, Client, Daemon};

/// A watch for hang-ups that looks every 50 ms would take half a minute for these.
#[test]
fn six_hundred_handovers_take_no_fixed_delay() {
    let daemon = Daemon::start(&[]);
    let (mut one, mut other) = (daemon.connect(), daemon.connect());
    fairly(|| {
        let began = Instant::now();
        let mut held = one.acquire("k", 5);
        for _ in 0..300 {
            held = pass_on(&mut one, &held.token, &mut other);
            held = pass_on(&mut other, &held.token, &mut one);
        }
        assert_eq!(one.request("r", "k", &held.token), "ok");
        println!("600 handovers took {:?}", began.elapsed());
        if began.elapsed() < Duration::from_secs(6) {
            Ok(())
        } else {
            Err(began.elapsed())
        }
    })
    .expect("handovers are slow");
}

fn pass_on(from: &mut Client, token: &str, to: &mut Client) -> crate::support::Grant {
    to.send("l\nk\n5\n");
    assert_eq!(from.request("r", "k", token), "ok");
    parse_grant(&to.line(), "ok").expect("its turn")
}

#[test]
fn a_wrong_token_takes_as_long_at_every_door() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let path = socket.display().to_string();
    let daemon = Daemon::start(&["--unix", &path, "--auth-token", "secret"]);
    for mut guesser in [daemon.connect(), Client::unix(&socket)] {
        let asked = Instant::now();
        guesser.send("auth\n_\nwrong\n");
        guesser.expect("error_auth");
        guesser.expect_eof();
        let took = asked.elapsed();
        assert!(took >= Duration::from_millis(100), "{took:?}");
    }
}
