//! What a user of `latch` sees in a shell: plays the transcripts in `tests/latch/conversations/`.

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::support::transcript::{transcripts, Folder};
use crate::support::{Daemon, Scheme};

const FOLDER: Folder = Folder {
    path: "tests/latch/conversations",
    scheme: Scheme::Plain,
    start,
    other: || None,
};

/// A server with a state file has a Unix socket alone, so that the next one is where it was.
fn start(options: &[&str], directory: &Path) -> Daemon {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/latch/latches.sh");
    // The next server of a section finds it there.
    let _ = symlink(script, directory.join("latches"));
    if options.contains(&"--state-file") {
        Daemon::start_unix(&directory.join("socket"), options)
    } else {
        Daemon::start(options)
    }
}

transcripts! {
    FOLDER;
    auth
    history
    keeping
    nested
    operators
    run
    settling
    statuses
    usage
    waiting
}
