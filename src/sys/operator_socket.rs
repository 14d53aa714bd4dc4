//! The path of a server's operator socket, for the server and for the operator who looks for it.

use std::env;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::trusted::is_own;

/// The directory that an init script creates for a server that does not run as root.
const OF_SERVICE: &str = "/run/latchd";

/// The directory of root's server.
const OF_ROOT: &str = "/run";

/// The runtime directories of logged-in users, by number.
const OF_USERS: &str = "/run/user";

/// The socket created by the packaged systemd unit, and the port of the same server.
const OF_UNIT: (&str, u16) = ("/run/latchd.sock", 6388);

/// The path at which this process, serving `port`, binds its socket: in $XDG_RUNTIME_DIR, in
/// /run/latchd if that belongs to its user, or in /run.
pub fn path_to_bind(port: u16) -> PathBuf {
    let directory = match of_user() {
        Some(directory) => directory,
        None if ours(Path::new(OF_SERVICE)).is_some() => OF_SERVICE.into(),
        None => OF_ROOT.into(),
    };
    directory.join(name(port))
}

/// Paths at which the server on `port` of this host may have its socket, for a user who may use it.
///
/// Only root, the service and this user can create a socket there. Another user may listen on the
/// port at another address and pretend to be the server; the operator would send it the secret, and
/// believe that the grant was broken.
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

/// The file at this path (a link is not followed), if it belongs to this process's user.
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
