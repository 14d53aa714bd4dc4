//! The file of the running program, for starting a second instance.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::param::linux_execfn;

use crate::text::{reason, Plain};

/// The running program. The path stays valid if an upgrade replaces the file, which can happen
/// during a wait of several days.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The file of the running program.
#[derive(Debug)]
pub struct ProgramFile {
    path: PathBuf,
    /// The device and inode of the file if /proc is not mounted. The file may then be replaced.
    id: Option<(u64, u64)>,
}

impl ProgramFile {
    /// Finds the file. Call this before a wait for a lock, and before the working directory
    /// changes. Fails if the file is not known, or if the program was started through the dynamic
    /// loader, because a second instance would then be the loader.
    pub fn find() -> Result<ProgramFile, String> {
        let (found, name) = match fs::read_link(THIS_PROGRAM) {
            Ok(name) => {
                let path = THIS_PROGRAM.into();
                (ProgramFile { path, id: None }, name)
            }
            Err(error) => {
                // The kernel's own record of the file that it was told to start. Neither argv[0]
                // nor a search of PATH would do, because they may name another program.
                let name = Path::new(OsStr::from_bytes(linux_execfn().to_bytes()));
                let found = env::current_dir().and_then(|directory| {
                    let path = directory.join(name);
                    let id = Some(id(&path)?);
                    Ok(ProgramFile { path, id })
                });
                let unknown = |_| format!("{THIS_PROGRAM}: {}", reason(&error));
                (found.map_err(unknown)?, name.to_owned())
            }
        };
        let file_name = name.file_name().unwrap_or_default();
        if file_name.as_bytes().windows(3).any(|part| part == b".so") {
            Err(format!(
                "{} runs this program; start it without the dynamic loader",
                Plain(name.as_os_str().as_bytes())
            ))
        } else {
            Ok(found)
        }
    }

    /// The path to start. Fails if the file was replaced and /proc is not mounted.
    pub(super) fn path(&self) -> io::Result<&Path> {
        match self.id {
            Some(known) if id(&self.path)? != known => Err(io::Error::other(
                "the program was replaced, and /proc is not mounted",
            )),
            _ => Ok(&self.path),
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}
