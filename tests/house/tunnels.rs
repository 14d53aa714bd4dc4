//! The tunnels of latchd-security(7) work as they are written there.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::support::needs::needs;
use crate::support::tunnel::Tunnel;
use crate::support::{Client, Daemon, Event, PATIENCE};

/// The configurations of the manual page, the server's first.
fn recipes() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("man/latchd-security.7");
    let page = fs::read_to_string(page).expect("it is part of the source");
    let (_, tunnels) = page.split_once("\n.Sh TUNNELS\n").expect("there is one");
    let tunnels = tunnels.split("\n.Sh ").next().unwrap_or_default();
    let displays = tunnels.split(".Bd -literal -offset indent\n").skip(1);
    displays
        .map(|display| display.split("\n.Ed").next().unwrap_or_default().to_owned())
        .collect()
}

/// The recipe with other places in it; each must be there.
fn with(recipe: &str, places: &[(&str, &str)]) -> String {
    places.iter().fold(recipe.to_owned(), |recipe, (old, new)| {
        assert!(recipe.contains(old), "no {old} in {recipe}");
        recipe.replace(old, new)
    })
}

#[test]
fn the_tunnel_of_the_manual_encrypts_and_checks_the_server() {
    let [stunnel, openssl] = needs!("stunnel", "openssl");
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let made = openssl
        .command()
        .args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "9"])
        .args(["-pkeyopt", "ec_paramgen_curve:prime256v1"])
        .args([
            "-subj",
            "/CN=server",
            "-addext",
            "subjectAltName=DNS:server",
        ])
        .args(["-keyout", &path("latchd.pem"), "-out", &path("ca.pem")])
        .stderr(Stdio::null())
        .status()
        .expect("it is installed");
    assert!(made.success());
    let both = [path("latchd.pem"), path("ca.pem")].map(|file| fs::read(file).expect("it is ours"));
    fs::write(path("latchd.pem"), both.concat()).expect("there is room");

    let daemon = Daemon::start(&[]);
    let recipes = recipes();
    let [on_server, on_client] = &recipes[..] else {
        panic!("{recipes:?}");
    };
    let server = Tunnel::start(
        &stunnel,
        &with(
            on_server,
            &[
                ("accept = 6389", "accept = 127.0.0.1:0"),
                ("127.0.0.1:6388", &daemon.addr().to_string()),
                ("/etc/stunnel/latchd.pem", &path("latchd.pem")),
            ],
        ),
    );
    let places = [
        ("accept = 127.0.0.1:6388", "accept = 127.0.0.1:0"),
        ("server:6389", &server.addr().to_string()),
        ("/etc/stunnel/ca.pem", &path("ca.pem")),
    ];
    let client = Tunnel::start(&stunnel, &with(on_client, &places));
    let mut held = Client::tcp(client.addr());
    let grant = held.acquire("k", 0);
    assert_eq!(held.request("r", "k", &grant.token), "ok");
    // The end of a connection passes through both tunnels.
    held.acquire("k", 0);
    drop(held);
    Client::tcp(client.addr()).acquire("k", 5);

    let mut plain = Client::tcp(server.addr());
    plain.send("l\nk\n0\n");
    let answered = plain.next_event(PATIENCE);
    assert!(!matches!(&answered, Event::Line(line) if line.starts_with(b"ok")));
    let other = places.map(|(old, new)| (old, new));
    let wrong = with(on_client, &other).replace("checkHost = server", "checkHost = other");
    let wrong = Tunnel::start(&stunnel, &wrong);
    let refused = Client::tcp(wrong.addr()).next_event(PATIENCE);
    assert!(matches!(refused, Event::Eof | Event::Reset), "{refused:?}");
}
