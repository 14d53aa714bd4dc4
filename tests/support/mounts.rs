//! File systems mounted for a test, unmounted at its end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use super::needs::{Admin, Program};

/// The smallest image that `mkntfs` and `mkfs.ext4` take, with room to spare.
const IMAGE_LEN: u64 = 8 << 20;

/// A mounted directory, and what is below it.
pub struct Mount {
    scratch: TempDir,
    /// The directory that the mount shows; empty if it shows an image.
    pub below: PathBuf,
    pub path: PathBuf,
}

impl Mount {
    fn new(mount: impl FnOnce(&Mount)) -> Mount {
        let scratch = tempfile::tempdir().expect("a directory");
        let [below, path] = ["below", "mount"].map(|name| scratch.path().join(name));
        for directory in [&below, &path] {
            fs::create_dir(directory).expect("a directory");
        }
        let made = Mount {
            scratch,
            below,
            path,
        };
        mount(&made);
        made
    }

    /// Another view of a directory, in user space.
    pub fn bindfs(_: Admin, bindfs: &Program) -> Mount {
        Mount::new(|mount| run(bindfs.command().args([&mount.below, &mount.path])))
    }

    /// A file system of its own, in user space.
    pub fn ntfs_3g(_: Admin, mkntfs: &Program, ntfs_3g: &Program) -> Mount {
        Mount::new(|mount| {
            let image = mount.scratch.path().join("image");
            let file = fs::File::create(&image).expect("a file");
            file.set_len(IMAGE_LEN).expect("room");
            run(mkntfs.command().args(["-F", "-Q", "-q"]).arg(&image));
            run(ntfs_3g.command().args([&image, &mount.path]));
        })
    }

    /// A file system in memory, of this size.
    pub fn tmpfs(_: Admin, size: &str) -> Mount {
        Mount::new(|mount| {
            let mut command = Command::new("mount");
            command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]);
            run(command.arg(&mount.path));
        })
    }

    /// An ext4 of its own.
    pub fn ext4(_: Admin, mkfs: &Program) -> Mount {
        Mount::new(|mount| {
            let image = mount.scratch.path().join("image");
            let file = fs::File::create(&image).expect("a file");
            file.set_len(IMAGE_LEN).expect("room");
            run(mkfs.command().args(["-q", "-F"]).arg(&image));
            let mut command = Command::new("mount");
            run(command.args(["-o", "loop"]).args([&image, &mount.path]));
        })
    }

    /// A view of a directory through an overlay, whose upper directory it is.
    pub fn overlay(_: Admin) -> Mount {
        Mount::new(|mount| {
            let path = |name: &str| {
                let path = mount.scratch.path().join(name);
                fs::create_dir(&path).expect("a directory");
                path.display().to_string()
            };
            let (lower, work) = (path("lower"), path("work"));
            let upper = mount.below.display();
            let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
            let mut command = Command::new("mount");
            command.args(["-t", "overlay", "-o", &options, "none"]);
            run(command.arg(&mount.path));
        })
    }

    /// One file under another path.
    pub fn of_file(_: Admin, file: &Path, path: &Path) -> Mount {
        let mount = Mount {
            scratch: tempfile::tempdir().expect("a directory"),
            below: PathBuf::new(),
            path: path.to_owned(),
        };
        run(Command::new("mount").arg("--bind").args([file, path]));
        mount
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

fn run(command: &mut Command) {
    let Output { status, stderr, .. } = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {said}");
}
