//! What a server alone says over its sockets, its HTTP door and its log: plays the transcripts in
//! `tests/latchd/conversations/`.

use std::path::Path;

use crate::support::transcript::{transcripts, Folder};
use crate::support::{Daemon, Scheme};

const FOLDER: Folder = Folder {
    path: "tests/latchd/conversations",
    scheme: Scheme::Plain,
    start,
    other: || None,
};

/// A server with a state file has a Unix socket alone, so that the next one is where it was.
fn start(options: &[&str], directory: &Path) -> Daemon {
    if options.contains(&"--state-file") {
        Daemon::start_unix(&directory.join("socket"), options)
    } else {
        Daemon::start_alone(options)
    }
}

transcripts! {
    FOLDER;
    breaking
    crashes
    history
    http
    http_clients
    http_locks
    log_grants
    restarts
    rights
    secrets
}
