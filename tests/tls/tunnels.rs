//! Clients that speak TLS, with stunnel in front of a server that does not, and the other way
//! round.

use std::process::Command;

use crate::support::needs::needs;
use crate::support::tls::common;
use crate::support::tunnel::Tunnel;
use crate::support::{program, Client, Daemon, Scheme};

#[test]
fn latch_reaches_a_plain_server_behind_stunnel() {
    let [stunnel, _openssl] = needs!("stunnel", "openssl");
    let daemon = Daemon::start(&[]);
    let tunnel = Tunnel::start(
        &stunnel,
        &format!(
            "[latchd]\naccept = 127.0.0.1:0\nconnect = {}\ncert = {}\nkey = {}\n",
            daemon.addr(),
            common().certificate().display(),
            common().key().display(),
        ),
    );
    let mut latch = Command::new(program("latch"));
    latch.args(["run", "k", "--tls-ca"]).arg(common().ca());
    latch.arg(format!("--server={}", tunnel.addr()));
    let output = latch.args(["--", "echo", "done"]).output();
    let output = output.expect("it was built by cargo");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"done\n", "{said}");
}

#[test]
fn a_plain_client_reaches_tls_through_stunnel() {
    let [stunnel, _openssl] = needs!("stunnel", "openssl");
    let daemon = Daemon::start_over(Scheme::Tls, &[]);
    let tunnel = Tunnel::start(
        &stunnel,
        &format!(
            "[latchd]\nclient = yes\naccept = 127.0.0.1:0\nconnect = {}\nCAfile = {}\n\
         verifyChain = yes\ncheckHost = localhost\n",
            daemon.addr(),
            common().ca().display(),
        ),
    );
    let mut client = Client::tcp(tunnel.addr());
    let grant = client.acquire("k", 0);
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    let mut other = Client::tcp(tunnel.addr());
    other.acquire("k", 0);
    // The end of the client's connection reaches the server through the tunnel.
    drop(other);
    daemon.connect().acquire("k", 5);
}
