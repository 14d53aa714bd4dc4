//! The paths of listening Unix sockets: taken over from a dead server, never from a living one.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::warn;
use rustix::fs::{chown, lstat, FileType, Gid, Mode};
use rustix::io::Errno;
use rustix::net::{
    connect, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::sys::directory::{lock_within, Directory, FileId};
use crate::text::Escaped;

use super::listener::{Listener, BACKLOG};

/// How long another process may have the directory locked before we go on without the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The path of a socket that this process has bound.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    /// Another server may have put its own socket there since.
    identity: FileId,
}

/// Listens on `path`; `mode` and `group` say who may connect. The socket of a dead server is
/// replaced; a living server makes it fail with [`io::ErrorKind::AddrInUse`], any other file with
/// [`io::ErrorKind::AlreadyExists`]. Changes the umask for a moment, so no other thread may be
/// making files.
pub fn bind(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Listener> {
    // Two servers that both find a dead server's socket must not remove each other's. The one that
    // locks the directory looks, removes and listens before the other looks. But whoever may read
    // the directory can keep it locked, and must not keep a server from its start.
    let directory = Directory::of(path)?;
    match lock_within(&directory, LOCK_PATIENCE) {
        Ok(true) => {}
        Ok(false) => warn!("cannot-lock-directory socket={}", Escaped::path(path)),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(error) => return Err(error),
    }
    remove_dead_socket(path)?;
    // No client can connect before the owner and the mode are right.
    let umask = rustix::process::umask(Mode::RWXU | Mode::RWXG | Mode::RWXO);
    let bound = UnixListener::bind(path);
    rustix::process::umask(umask);
    let listener = bound?;
    let made = BoundPath {
        path: path.to_owned(),
        identity: FileId::from(&lstat(path)?),
    };
    let open = || {
        if let Some(group) = group {
            chown(path, None, Some(Gid::from_raw(group)))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        // std listens with a shorter backlog; to listen again changes only that.
        listen(&listener, BACKLOG).map_err(io::Error::from)
    };
    open().inspect_err(|_| made.remove())?;
    Listener::adopt_unix(listener, Some(made))
}

impl BoundPath {
    /// Removes the socket, unless another one has taken its place.
    pub(super) fn remove(&self) {
        if lstat(&self.path).is_ok_and(|found| FileId::from(&found) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket of a dead server, and nothing else.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    let found = match lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that is not a socket is in the way",
        ));
    }
    // The probe does not block, since the backlog of a living server may be full.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        // A server that accepts, a full backlog, or a socket that this process may not connect to.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}
