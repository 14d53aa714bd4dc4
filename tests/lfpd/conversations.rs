//! What lfpd says over its sockets: plays the transcripts in `tests/lfpd/conversations/`.

use std::fs;
use std::path::Path;

use crate::lfp::command;
use crate::support::transcript::{transcripts, Folder};
use crate::support::{Daemon, Scheme};

const FOLDER: Folder = Folder {
    path: "tests/lfpd/conversations",
    scheme: Scheme::Plain,
    start,
    other: || None,
};

fn start(options: &[&str], directory: &Path) -> Daemon {
    for name in ["own", "other"] {
        fs::create_dir_all(directory.join(name)).expect("there is room");
    }
    let mut command = command(directory);
    command.args(["--listen", "127.0.0.1:0", "--print-port"]);
    command.args(options);
    Daemon::from_command(command)
}

transcripts! {
    FOLDER;
    files
    lines
}
