//! The path of a server's operator socket. The server binds it, and the operator's program looks
//! for it.

use std::env;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::trusted::is_own;

/// The directory that an init script creates for a server that does not run as root.
const OF_SERVICE: &str = "/run/latchd";

/// The directory for a server that runs as root.
const OF_ROOT: &str = "/run";

/// The directory of the runtime directories of logged-in users, each named after the user's number.
const OF_USERS: &str = "/run/user";

/// The path of the socket that the packaged systemd unit creates, and the port of its server.
const OF_UNIT: (&str, u16) = ("/run/latchd.sock", 6388);

/// The path at which a server on `port` binds its operator socket: in $XDG_RUNTIME_DIR if that is
/// set, else in /run/latchd if that belongs to this user, else in /run.
pub fn path_to_bind(port: u16) -> PathBuf {
    let directory = match of_user() {
        Some(directory) => directory,
        None if ours(Path::new(OF_SERVICE)).is_some() => OF_SERVICE.into(),
        None => OF_ROOT.into(),
    };
    directory.join(name(port))
}

/// The paths at which the server on `port` of this host may have bound its operator socket.
///
/// Only root, the service's user and this user can create sockets at these paths. Connecting to the
/// port would be less safe: another user may listen on it at another address and pretend to be the
/// server. The operator would send the secret to that user, and believe that the grant was broken.
pub fn paths_to_try(port: u16) -> Vec<PathBuf> {
    let of_login = Path::new(OF_USERS).join(geteuid().as_raw().to_string());
    let of_this_user = of_user().into_iter().chain([of_login]);
    let of_this_user = of_this_user.filter(|it| ours(it).is_some_and(|it| it.is_dir()));
    let of_system = [OF_SERVICE, OF_ROOT].map(PathBuf::from);
    let mut paths: Vec<PathBuf> = Vec::new();
    for path in of_this_user.chain(of_system).map(|it| it.join(name(port))) {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    if port == OF_UNIT.1 {
        paths.push(OF_UNIT.0.into());
    }
    paths
}

/// The metadata of the file at this path, if the file belongs to the user of this process. Does not
/// follow a link.
fn ours(path: &Path) -> Option<Metadata> {
    let found = fs::symlink_metadata(path).ok();
    found.filter(|it| is_own(it.uid()))
}

fn of_user() -> Option<PathBuf> {
    let directory = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    directory.filter(|directory| directory.is_absolute())
}

fn name(port: u16) -> String {
    format!("latchd-{port}.sock")
}
