//! The device that a path leads to, and the names of its lock files. The device itself is never
//! opened: that may have an effect, such as hanging up a modem.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{major, minor};

use super::names::{numbered_names, DevicePath};

/// The longest walk along links: 40, as many as the kernel follows, and the parts of the longest
/// path.
const MAX_STEPS: usize = 40 + 128;

/// A device, under all names by which it is or may be locked.
#[derive(Debug, PartialEq, Eq)]
pub struct Device {
    /// The names of our own lock files, each once, in an order that all lockers share.
    pub written: Vec<OsString>,
    /// Those of `written` that have all parts of a path, first of the one that was looked up. Other
    /// devices may share the rest.
    pub full: Vec<OsString>,
    /// All names that count, those of `written` included.
    pub known: Vec<OsString>,
}

impl Device {
    /// Looks up the device at `path`, with /dev at `root`; `None` if that leads out of /dev, or to
    /// something that is not a character device. A device that is not plugged in counts, since a
    /// lock on it does no harm.
    pub fn look_up(path: &DevicePath, root: &Path) -> Option<Device> {
        let target = target_of(path, root)?;
        let numbers = match fs::metadata(path.in_root(root)) {
            Ok(node) if node.file_type().is_char_device() => {
                numbered_names(major(node.dev()), major(node.rdev()), minor(node.rdev()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Ok(_) | Err(_) => return None,
        };
        Some(Device::new(&[path, &target], numbers))
    }

    /// Looks up the names under which `path` may have been locked, even if it leads elsewhere now.
    pub fn look_up_to_unlock(path: &DevicePath, root: &Path) -> Device {
        match target_of(path, root) {
            Some(target) => Device::new(&[path, &target], Vec::new()),
            None => Device::new(&[path], Vec::new()),
        }
    }

    fn new(paths: &[&DevicePath], numbers: Vec<OsString>) -> Device {
        let names = |of: fn(&DevicePath) -> Vec<OsString>| {
            let mut names: Vec<OsString> = paths.iter().flat_map(|path| of(path)).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        let mut known = names(DevicePath::known_names);
        known.extend(numbers);
        Device {
            written: names(DevicePath::written_names),
            full: paths.iter().map(|path| path.full_name()).collect(),
            known,
        }
    }
}

/// Where the path ends once all links in it are followed.
fn target_of(path: &DevicePath, root: &Path) -> Option<DevicePath> {
    let root = fs::canonicalize(root).ok()?;
    let path = path.in_root(&root);
    let target = match fs::canonicalize(&path) {
        Ok(target) => target,
        Err(error) if error.kind() == io::ErrorKind::NotFound => follow_to_nothing(path)?,
        Err(_) => return None,
    };
    let rest = target.strip_prefix(&root).ok()?;
    DevicePath::below(rest.as_os_str().as_bytes())
}

/// Follows the links in a path that leads to nothing.
fn follow_to_nothing(mut path: PathBuf) -> Option<PathBuf> {
    let mut behind: Vec<OsString> = Vec::new();
    for _ in 0..MAX_STEPS {
        let (parent, name) = path.parent().zip(path.file_name())?;
        let parent = match fs::canonicalize(parent) {
            Ok(parent) => parent,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                behind.push(name.to_owned());
                path = parent.to_owned();
                continue;
            }
            Err(_) => return None,
        };
        match fs::read_link(parent.join(name)) {
            Ok(target) => path = without_detours(&parent.join(target)),
            Err(_) => {
                path = parent.join(name);
                path.extend(behind.iter().rev());
                return Some(path);
            }
        }
    }
    None
}

/// The path with `.` and `..` taken out, as text.
fn without_detours(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn look_up(root: &Path, path: &str) -> Option<Vec<String>> {
        let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
        let names = Device::look_up(&path, root)?.written;
        Some(
            names
                .into_iter()
                .map(|name| name.into_string().expect("UTF-8"))
                .collect(),
        )
    }

    #[test]
    fn a_node_that_does_not_exist_can_be_locked() {
        let root = tempfile::tempdir().expect("a directory");
        let names = look_up(root.path(), "/dev/ttyS1").expect("a device");
        assert_eq!(names, ["LCK..ttyS1"]);
        let names = look_up(root.path(), "/dev/usb/0").expect("a device");
        assert_eq!(names, ["LCK..0", "LCK..usb_0"]);
    }

    #[test]
    fn a_link_is_locked_with_what_it_leads_to() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("serial/by-id")).expect("a directory");
        symlink("ttyUSB0", at("modem")).expect("a link");
        symlink("modem", at("fax")).expect("a link");
        symlink("../../ttyUSB0", at("serial/by-id/x")).expect("a link");
        assert_eq!(
            look_up(root.path(), "/dev/modem").expect("a device"),
            ["LCK..modem", "LCK..ttyUSB0"]
        );
        assert_eq!(
            look_up(root.path(), "/dev/fax").expect("a device"),
            ["LCK..fax", "LCK..ttyUSB0"]
        );
        assert_eq!(
            look_up(root.path(), "/dev/serial/by-id/x").expect("a device"),
            ["LCK..serial_by-id_x", "LCK..ttyUSB0", "LCK..x"]
        );
    }

    #[test]
    fn links_out_of_dev_and_in_circles_are_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        symlink("/etc/passwd", at("out")).expect("a link");
        symlink("/nonexistent/tty", at("nowhere")).expect("a link");
        symlink("../x", at("up")).expect("a link");
        symlink("circle", at("circle")).expect("a link");
        symlink("/dev/null", at("elsewhere")).expect("a link");
        for name in ["out", "nowhere", "up", "circle", "elsewhere"] {
            let path = format!("/dev/{name}");
            assert_eq!(look_up(root.path(), &path), None, "{name}");
        }
        // A path through a link that leads out of /dev is out of it, too, whether it exists or not.
        for path in [
            "/dev/nowhere/x",
            "/dev/nowhere/x/y",
            "/dev/up/x",
            "/dev/out/x",
        ] {
            assert_eq!(look_up(root.path(), path), None, "{path}");
        }
        symlink("missing/../endless/x", at("endless")).expect("a link");
        let names = look_up(root.path(), "/dev/endless");
        assert_eq!(names, None);
        symlink("missing", at("inside")).expect("a link");
        assert_eq!(
            look_up(root.path(), "/dev/inside/0").expect("a device"),
            ["LCK..0", "LCK..inside_0", "LCK..missing_0"]
        );
    }

    #[test]
    fn only_a_character_device_is_one() {
        assert!(look_up(Path::new("/dev"), "/dev/null").is_some());
        for path in ["/dev/shm", "/dev/null/x"] {
            assert_eq!(look_up(Path::new("/dev"), path), None, "{path}");
        }
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("file"), "").expect("a file");
        assert_eq!(look_up(root.path(), "/dev/file"), None);
    }

    #[test]
    fn the_numbers_of_a_device_are_looked_for() {
        let path = DevicePath::parse(b"/dev/null").expect("below /dev");
        let device = Device::look_up(&path, Path::new("/dev")).expect("a device");
        let has_numbers = |name: &OsString| {
            let name = name.to_string_lossy();
            name.starts_with("LK.") && name.ends_with(".001.003")
        };
        assert!(device.known.iter().any(has_numbers), "{device:?}");
    }
}
