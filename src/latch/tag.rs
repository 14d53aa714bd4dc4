//! What a command tells the server of itself: the tag.

use std::ffi::OsStr;
use std::path::Path;
use std::process;

use rustix::system::uname;

use crate::text::Plain;

/// The tag that `--tag` gives, or the name of the command with the host and this process.
pub(super) fn tag_of(given: Option<&str>, command: &OsStr) -> String {
    if let Some(tag) = given {
        return tag.to_owned();
    }
    let name = Path::new(command).file_name().unwrap_or(command);
    let (name, uname) = (Plain(name.as_encoded_bytes()), uname());
    let host = Plain(uname.nodename().to_bytes());
    format!("{name}@{host} pid {}", process::id())
}
