//! What a test needs beside Rust, a C compiler and the base system. A test asks for it, and gets a
//! value that starts or loads it:
//!
//! ```ignore
//! let strace = needs!("strace");
//! let [etcd, etcdctl] = needs!("etcd", "etcdctl");
//! let root = needs!(root);
//! let admin = needs!(admin);
//! let own = needs!(own_programs);
//! ```
//!
//! Without it, the test ends early and leaves a note. The target `zz_summary` reads the notes at
//! the end of `cargo test`. With `LATCHD_TEST_ALL` set, such a test fails.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The folder of the programs to test, in place of those that cargo has built.
pub static GIVEN_PROGRAMS: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let folder = std::env::var("LATCHD_TEST_PROGRAMS").ok()?;
    let absolute = fs::canonicalize(&folder);
    Some(absolute.unwrap_or_else(|error| panic!("{folder}: {error}")))
});

/// The programs and libraries, each with its Debian package.
pub const LIST: &str = include_str!("../packages.txt");

/// What the tests use of programs that come with more or less.
const BUSYBOX_APPLETS: &[&str] = &[
    "ash",
    "chmod",
    "chown",
    "grep",
    "mkdir",
    "nc",
    "rm",
    "setsid",
    "sh",
    "sleep",
    "start-stop-daemon",
    "tail",
];
const PERL_MODULES: &[&str] = &["IO::Socket::INET", "POSIX", "Socket"];
const PYTHON_MODULES: &[&str] = &[
    "ctypes",
    "fcntl",
    "json",
    "select",
    "socket",
    "subprocess",
    "termios",
    "threading",
];

/// A program of the list that this machine has. Only [`needs`] makes one.
#[derive(Clone, Debug)]
pub struct Program(PathBuf);

impl Program {
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn command(&self) -> Command {
        Command::new(&self.0)
    }
}

impl AsRef<OsStr> for Program {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

/// Says that this process is root's.
#[derive(Clone, Copy, Debug)]
pub struct Root(());

/// Says that this process may mount file systems and make namespaces. The root of a container often
/// may not.
#[derive(Clone, Copy, Debug)]
pub struct Admin(());

/// Says that the programs to test are those that cargo has built, so that a test can look into
/// them. Others may be static, stripped or for another processor: they load no library, their
/// functions have no names, and their system calls other ones.
#[derive(Clone, Copy, Debug)]
pub struct OwnPrograms(());

/// Gives the programs that are named, [`Root`], [`Admin`] or [`OwnPrograms`], or ends the test. A
/// name that is not in the list does not compile.
macro_rules! needs {
    (root) => {
        match $crate::support::needs::root() {
            Some(root) => root,
            None => return,
        }
    };
    (admin) => {
        match $crate::support::needs::admin() {
            Some(admin) => admin,
            None => return,
        }
    };
    (own_programs) => {
        match $crate::support::needs::own_programs() {
            Some(own) => own,
            None => return,
        }
    };
    ($name:literal) => {{
        let [program] = $crate::support::needs::needs!($name,);
        program
    }};
    ($($name:literal),+ $(,)?) => {{
        $(const { assert!($crate::support::needs::is_listed($name), "not in packages.txt") };)+
        match $crate::support::needs::programs([$($name),+]) {
            Some(programs) => programs,
            None => return,
        }
    }};
}
pub(crate) use needs;

/// All of these programs, or `None` and a note. Those that look into the programs to test are for
/// [`OwnPrograms`] alone.
pub fn programs<const N: usize>(names: [&str; N]) -> Option<[Program; N]> {
    let looks_inside = |name: &str| name.contains(".so.") || ["strace", "valgrind"].contains(&name);
    if names.into_iter().any(looks_inside) {
        own_programs()?;
    }
    let found = names.map(find);
    let missing = found.iter().filter_map(|it| it.as_ref().err());
    let missing: Vec<&str> = missing.map(String::as_str).collect();
    if !missing.is_empty() {
        skipped(&missing);
        return None;
    }
    Some(found.map(|program| program.expect("none is missing")))
}

/// The proof that this process is root's, or `None` and a note.
pub fn root() -> Option<Root> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped(&["root"]);
    }
    is_root.then_some(Root(()))
}

/// The proof that this process may mount file systems and make namespaces, or `None` and a note.
/// Tries it, since a container or a security module may refuse what the capabilities allow.
pub fn admin() -> Option<Admin> {
    static MAY: LazyLock<bool> = LazyLock::new(|| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--uts", "--net", "--pid", "--fork"]);
        let tried = unshare
            .args(["mount", "-t", "tmpfs", "none", "/tmp"])
            .output();
        rustix::process::geteuid().is_root() && tried.is_ok_and(|it| it.status.success())
    });
    if !*MAY {
        skipped(&["right to mount and to make namespaces"]);
    }
    MAY.then_some(Admin(()))
}

/// The proof that cargo has built the programs to test, or `None` and a note.
pub fn own_programs() -> Option<OwnPrograms> {
    let are_own = GIVEN_PROGRAMS.is_none();
    if !are_own {
        skipped(&["programs that cargo has built"]);
    }
    are_own.then_some(OwnPrograms(()))
}

/// Whether the kernel can tell at once that a file has changed. If not, our programs look again and
/// again.
pub fn has_inotify() -> bool {
    rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).is_ok()
}

/// Whether the kernel can tell at once that a process has ended.
pub fn has_pidfds() -> bool {
    use rustix::process::{getpid, pidfd_open, PidfdFlags};
    pidfd_open(getpid(), PidfdFlags::empty()).is_ok()
}

/// Notes that a test, or a part of one, is skipped for want of `missing`: programs, or other things
/// in words. Panics if `LATCHD_TEST_ALL` is set.
pub fn skipped(missing: &[&str]) {
    assert!(
        std::env::var_os("LATCHD_TEST_ALL").is_none(),
        "LATCHD_TEST_ALL is set, and there is no {}",
        missing.join(", no ")
    );
    println!("skipped: no {}", missing.join(", no "));
    note("skipped", missing);
}

/// Leaves a note for the target `zz_summary`.
pub fn note(verb: &str, words: &[&str]) {
    let name = env!("CARGO_CRATE_NAME");
    let note = format!("{verb}\t{name}\t{}\n", words.join("\t"));
    // Another user may run the tests, who cannot write here. The caller has printed it.
    let _ = fs::create_dir_all(env!("CARGO_TARGET_TMPDIR"));
    if let Ok(mut file) = File::options().append(true).create(true).open(notes()) {
        let _ = file.write_all(note.as_bytes());
    }
}

/// The notes of all tests that the same `cargo` runs.
pub fn notes() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("notes-{}", parent_id()))
}

/// The program or library, or what is missing: it, or a part of it that the tests use.
fn find(name: &str) -> Result<Program, String> {
    let path = std::env::var("PATH").unwrap_or_default();
    // Not all of these are in the PATH of a user.
    let places = path.split(':').chain(["/usr/sbin", "/sbin"]);
    let mut paths = places.map(|place| Path::new(place).join(name));
    let program = if name.contains(".so.") {
        library(name)
    } else {
        paths.find(|path| path.is_file())
    };
    let program = Program(program.ok_or(name)?);
    match missing_part(name, &program) {
        Some(part) => Err(format!("{name} with {part}")),
        None => Ok(program),
    }
}

fn missing_part(name: &str, program: &Program) -> Option<String> {
    let works = |part: &str, works: bool| (!works).then(|| part.to_owned());
    match name {
        // A container may forbid it.
        "strace" => works(
            "the right to trace",
            output_of(program, &["sh", "-c", "echo traced"]).contains("traced"),
        ),
        // There are several, with other options.
        "nc" => works(
            "the options of OpenBSD",
            output_of(program, &["-h"]).contains("OpenBSD"),
        ),
        "busybox" => {
            let applets = output_of(program, &["--list"]);
            let has = |applet: &&&str| applets.lines().any(|line| line == **applet);
            let missing = BUSYBOX_APPLETS.iter().find(|applet| !has(applet));
            missing.map(|applet| (*applet).to_owned())
        }
        // Debian's perl-base lacks most modules of perl, its python3-minimal most of the library.
        "perl" => {
            let missing = "for (@ARGV) { eval \"require $_\" or print \"$_\\n\" }";
            let arguments = [&["-e", missing], PERL_MODULES].concat();
            output_of(program, &arguments)
                .lines()
                .next()
                .map(str::to_owned)
        }
        "python3" => {
            let missing = "import importlib.util, sys\n\
                           for name in sys.argv[1:]:\n    \
                           if not importlib.util.find_spec(name): print(name)";
            let arguments = [&["-c", missing], PYTHON_MODULES].concat();
            output_of(program, &arguments)
                .lines()
                .next()
                .map(str::to_owned)
        }
        // That of Debian takes them from getrandom(2) alone, which a sandbox may refuse.
        "openssl" => works(
            "random numbers",
            output_of(program, &["rand", "-hex", "1"]).trim().len() == 2,
        ),
        // A container may have no file systems in user space.
        "bindfs" | "ntfs-3g" => works("/dev/fuse", File::open("/dev/fuse").is_ok()),
        _ => None,
    }
}

/// A library that is in a directory of its own, below that of the machine's libraries.
fn library(name: &str) -> Option<PathBuf> {
    let folders = |of: &Path| {
        let entries = fs::read_dir(of).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let machines = folders(Path::new("/usr/lib")).into_iter();
    let mut files = machines.flat_map(|machine| folders(&machine));
    files.find_map(|folder| Some(folder.join(name)).filter(|file| file.is_file()))
}

/// What the program prints, if it runs.
fn output_of(program: &Program, arguments: &[&str]) -> String {
    let output = program.command().args(arguments).output();
    output.map_or(String::new(), |output| {
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).into_owned()
    })
}

/// The Debian package that brings a program or library, or the part of it that is missing.
pub fn package_of(missing: &str) -> Option<&'static str> {
    let (name, _) = missing.split_once(" with ").unwrap_or((missing, ""));
    let rows = LIST.lines().filter_map(|line| line.split_once(' '));
    let mut packages = rows.filter(|(listed, _)| *listed == name);
    packages.next().map(|(_, package)| package)
}

/// Whether a line of the list begins with `name` and a blank.
pub const fn is_listed(name: &str) -> bool {
    let (list, name) = (LIST.as_bytes(), name.as_bytes());
    let (mut start, mut at) = (0, 0);
    while at < list.len() {
        if list[at] == b'\n' {
            start = at + 1;
        } else if list[at] == b' ' && at - start == name.len() {
            let mut same = 0;
            while same < name.len() && list[start + same] == name[same] {
                same += 1;
            }
            if same == name.len() {
                return true;
            }
        }
        at += 1;
    }
    false
}
