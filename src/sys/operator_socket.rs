//! Where a server puts the socket of its operator, and where an operator looks for it.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// The directory that an init script gives to a server that does not run as root.
const OF_SERVICE: &str = "/run/latchd";

/// The directory of root's server.
const OF_ROOT: &str = "/run";

/// The directories of users who have logged in, by their numbers.
const OF_USERS: &str = "/run/user";

/// The socket that the packaged unit for systemd makes, whatever its port is.
const OF_UNIT: &str = "/run/latchd.sock";

/// The state of a listening socket in /proc/net/tcp.
const LISTENING: &str = "0A";

/// Where the server on `port` that this process is puts its socket: in $XDG_RUNTIME_DIR, in
/// /run/latchd if that belongs to its user, or in /run.
pub fn path_to_bind(port: u16) -> PathBuf {
    let is_ours = |it: &fs::Metadata| it.uid() == geteuid().as_raw();
    let of_service = || fs::symlink_metadata(OF_SERVICE).is_ok_and(|it| is_ours(&it));
    let directory = match of_user() {
        Some(directory) => directory,
        None if of_service() => OF_SERVICE.into(),
        None => OF_ROOT.into(),
    };
    directory.join(name(port))
}

/// Where the socket of the server on `port` of this host may be, for a user who may use it.
pub fn paths_to_try(port: u16) -> Vec<PathBuf> {
    let mut owners = vec![geteuid().as_raw()];
    if owners == [0] {
        owners.extend(owners_of_port(port));
    }
    let of_users = owners
        .iter()
        .map(|uid| Path::new(OF_USERS).join(uid.to_string()));
    let of_system = [OF_SERVICE, OF_ROOT].map(PathBuf::from);
    let directories = of_user().into_iter().chain(of_users).chain(of_system);
    let mut paths: Vec<PathBuf> = Vec::new();
    for path in directories.map(|directory| directory.join(name(port))) {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    paths.push(OF_UNIT.into());
    paths
}

fn of_user() -> Option<PathBuf> {
    let directory = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    directory.filter(|directory| directory.is_absolute())
}

fn name(port: u16) -> String {
    format!("latchd-{port}.sock")
}

/// The users whose processes listen on `port`.
fn owners_of_port(port: u16) -> Vec<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables = tables.map(|table| fs::read_to_string(table).unwrap_or_default());
    let rows = tables.iter().flat_map(|table| table.lines());
    rows.filter_map(|row| owner_in(row, port)).collect()
}

/// The user in a row of /proc/net/tcp, if that is of a socket that listens on `port`.
fn owner_in(row: &str, port: u16) -> Option<u32> {
    let fields: Vec<&str> = row.split_whitespace().collect();
    let [_, local, _, LISTENING, _, _, _, uid, ..] = fields[..] else {
        return None;
    };
    let (_, local_port) = local.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local_port, 16) == Ok(port);
    is_it.then(|| uid.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_port_is_in_the_row_that_listens_there() {
        let row =
            "0: 0100007F:18F4 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  \
                   0 4711 1 0000000000000000 100 0 0 10 0";
        assert_eq!(owner_in(row, 6388), Some(1000));
        assert_eq!(owner_in(row, 6389), None);
        assert_eq!(owner_in(&row.replace(" 0A ", " 01 "), 6388), None);
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt";
        assert_eq!(owner_in(head, 6388), None);
    }
}
