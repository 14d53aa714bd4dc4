//! The examples of README.md, of the manual pages and below examples/ do what they say.
//!
//! The blocks of the README are pasted into one shell, and that for each kind of shell. The blocks
//! of a manual page after a comment `pasted` are pasted into bash; a comment `prints` is before
//! what they print. A last line of a block that starts a server is for a terminal of its own. The
//! sessions of latch-protocol(7) begin with `$ nc localhost 6388`, then three typed lines and one
//! reply take turns.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;

use rustix::process::geteuid;

use crate::support::group::{is_empty, Group};
use crate::support::hosts::Hosts;
use crate::support::needs::{needs, programs};
use crate::support::silent::free_addr;
use crate::support::{eventually, poll_for, Daemon, PATIENCE};

const CONVERSATION: &str = "$ nc localhost 6388";

/// Ends the servers that earlier blocks have left running, in any shell.
const STOP_JOBS: &str = "sh -c 'for child in $(cat /proc/$PPID/task/$PPID/children); do \
                         [ $child = $$ ] || kill $child 2>/dev/null; done'; wait";

/// The shells of readers. The last ones may not be installed.
const SHELLS: [&[&str]; 5] = [
    BASH,
    &["dash"],
    &["busybox", "ash"],
    &["zsh", "-f"],
    &["fish", "--no-config"],
];
const BASH: &[&str] = &["bash", "--norc"];

#[test]
fn the_readme_can_be_pasted() {
    needs!("nc");
    let readme = readme_section(&read("README.md"));
    assert!(readme.blocks.len() >= 8, "{} blocks", readme.blocks.len());
    let user = geteuid();
    let is_there = |shell: &&&[&str]| {
        let name = shell[0];
        ["bash", "dash"].contains(&name) || programs([name]).is_some()
    };
    for shell in SHELLS.iter().filter(is_there) {
        // A plain user may have no runtime directory. Root's operator socket would be in /run.
        let bare: &[&str] = &["env", "-u", "XDG_RUNTIME_DIR"];
        let words = if user.is_root() { &[] } else { bare };
        paste(&[words, shell].concat(), &readme);
    }
    // The servers of a plain user have made it, and another one of this user may be in it.
    let _ = fs::remove_dir(format!("/tmp/latchd-{}", user.as_raw()));
}

/// The server, and the command that breaks a lock, on the host db1; what else follows the copy of
/// the secret, on another one. Nothing but the host's name and that copy is out of sight.
#[test]
fn the_readme_works_on_two_hosts() {
    needs!("nc");
    needs!(admin);
    let hosts = Hosts::new(&needs!("ip"));
    let mut readme = readme_section(&read("README.md"));
    let mut variables = None;
    for (script, _) in &mut readme.blocks {
        if variables.is_none() {
            let exported: Vec<&str> = script
                .lines()
                .filter(|line| line.starts_with("export "))
                .collect();
            if exported.is_empty() {
                continue;
            }
            variables = Some(exported.join("\n"));
        }
        let variables = variables.as_deref().expect("just now");
        *script = if script.contains("latch break") {
            format!("{variables}\n{script}")
        } else {
            format!("in_far_shell <<'END OF FAR'\n{variables}\n{script}\nEND OF FAR")
        };
    }
    assert!(variables.is_some(), "no block is for the other hosts");
    let names = format!("127.0.0.1 localhost\n{} db1", hosts.near.address);
    let enter = hosts.far.entry().join(" ");
    let prepare = format!(
        "echo '{names}' >hosts; mount --bind hosts /etc/hosts; mkdir far; \
         in_far_shell() {{ cp latch.token far; (cd far; {enter} bash --norc) }}"
    );
    readme.blocks.insert(0, (prepare, String::new()));
    let mut shell = in_our_path(hosts.near.command("unshare"));
    shell.args(["--mount", "bash", "--norc"]);
    paste_into(shell, "$?", &readme, &[]);
}

#[test]
fn the_readme_shows_what_commands_print() {
    needs!("nc");
    let readme = read("README.md");
    let sessions = readme.split("\n```console\n").skip(1);
    let sessions = sessions.map(|rest| rest.split_once("\n```").expect("it ends").0);
    let daemon = Daemon::start(&[]);
    let server = format!("127.0.0.1:{}", daemon.port());
    let latch = |script: &str| {
        let mut shell = shell();
        shell.args(["-c", script]).env("LATCH_SERVER", &server);
        shell
    };
    let _pool = Group::spawn(&mut latch(
        "exec latch run pool --limit 2 --tag worker-1 -- sleep 60",
    ));
    let _holder = Group::spawn(&mut latch(
        "exec latch run nightly --tag 'backup.sh@db1 pid 4711' -- sleep 60",
    ));
    eventually(PATIENCE, "both are held", || {
        let stats = daemon.stats().to_string();
        ["nightly", "pool"].iter().all(|key| stats.contains(key))
    });
    let _waiter = Group::spawn(&mut latch("exec latch run nightly -- sleep 60"));
    daemon.wait_for_waiters("nightly", 1);
    for command in sessions.flat_map(|session| session.split("$ ").skip(1)) {
        let (command, shown) = command.split_once('\n').expect("it prints a line");
        let command = command.replace("6388", &daemon.port().to_string());
        let printed = end_of(&mut latch(&command), "").printed;
        assert_eq!(comparable(&printed), comparable(shown), "{command}");
    }
}

#[test]
fn no_section_of_the_readme_is_longer_than_a_screen() {
    let text = read("README.md");
    // Pieces inside of a fence and outside of one take turns.
    let prose: String = text.split("\n```").step_by(2).collect();
    for section in prose.split("\n## ") {
        let count = section.split_whitespace().count();
        let title = section.lines().next().unwrap_or_default();
        assert!(count <= 200, "{title}: {count} words, of at most 200");
    }
}

#[test]
fn the_readme_shows_rust_that_the_library_tries() {
    let readme = read("README.md");
    let (_, rust) = readme.split_once("\n```rust\n").expect("an example");
    let (rust, _) = rust.split_once("\n```").expect("it ends");
    let library = read("src/client/mod.rs");
    for line in rust.lines() {
        let tried = format!("//! {line}\n");
        assert!(line.is_empty() || library.contains(&tried), "{line}");
    }
}

#[test]
fn the_examples_of_a_manual_page_can_be_pasted() {
    needs!("nc", "systemd-socket-activate", "curl");
    let sections: Vec<Section> = pages().iter().map(|page| manual_section(page)).collect();
    let count: usize = sections.iter().map(|section| section.blocks.len()).sum();
    assert!(count >= 12, "only {count} examples found in man/");
    paste_all(&sections);
}

#[test]
fn the_sessions_of_the_protocol_page_go_as_it_shows() {
    needs!("nc");
    let page = "man/latch-protocol.7";
    let sessions = sessions(page, &read(page));
    assert!(sessions.len() >= 9, "only {} sessions", sessions.len());
    thread::scope(|scope| {
        for session in &sessions {
            scope.spawn(|| converse(session));
        }
    });
}

#[test]
fn no_command_of_latch_is_shown_without_being_tried() {
    let readme = read("README.md");
    assert!(
        !readme.lines().any(|line| line.starts_with("    latch ")),
        "use a block that runs"
    );
    let page = read("man/latch.1");
    let (_, examples) = page
        .split_once("\n.Sh EXAMPLES\n")
        .expect("there are examples");
    let (examples, _) = examples
        .split_once("\n.Sh ")
        .expect("it is not the last section");
    let pasted = manual_section("man/latch.1").blocks;
    let prints = examples.matches("\n.\\\" prints\n").count();
    let shown = examples.matches("\n.Bd -literal").count();
    assert_eq!(pasted.len() + prints, shown);
    for line in examples
        .lines()
        .filter_map(|line| line.strip_prefix(".Dl "))
    {
        let line = unescaped(line);
        let command = line.strip_prefix("*/10 * * * * ").unwrap_or(&line);
        let (options, _) = command.split_once(" -- ").expect("latch run");
        let is_tried = pasted.iter().any(|(script, _)| script.contains(options));
        assert!(is_tried, "no test tries {line:?}");
    }
}

#[test]
fn the_shell_examples_parse() {
    for script in files_in("examples")
        .iter()
        .filter(|path| path.ends_with(".sh"))
    {
        let output = shell()
            .args(["-n", script])
            .output()
            .expect("there is a sh");
        assert!(
            output.status.success(),
            "{script}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn raw_nc_holds_renews_and_releases_a_lock() {
    needs!("nc");
    let daemon = Daemon::start(&[]);
    let script = format!("exec sh examples/raw_nc.sh localhost {}", daemon.port());
    let printed = run_script(&script, Path::new(env!("CARGO_MANIFEST_DIR")));
    assert_eq!(
        printed,
        "holding raw-nc-demo\nrenewed: ok 10\nreleased: ok\n"
    );
}

#[test]
fn the_readme_names_the_commands_and_ci_runs_the_tests() {
    let (readme, ci) = (read("README.md"), read(".ci/run"));
    for command in [
        "\ncargo install --locked --path .\n",
        "    cargo run --release\n",
        "    cargo test --no-fail-fast\n",
    ] {
        assert!(
            readme.contains(command),
            "README.md lacks {command:?} as a line of its own"
        );
    }
    assert!(ci.contains("cargo test --no-fail-fast"), "{ci}");
    assert!(
        read("Cargo.toml").contains("default-run = \"latchd\""),
        "`cargo run` starts latchd"
    );
}

#[test]
fn ci_installs_what_tests_need_and_allows_no_skip() {
    let ci = read(".ci/run");
    assert!(ci.contains("tests/packages.txt"), "{ci}");
    assert!(ci.contains("LATCHD_TEST_ALL=1 tests\n"), "{ci}");
}

#[test]
fn the_files_that_the_readme_names_exist() {
    let readme = read("README.md");
    let starts = [
        "src/",
        "man/",
        "tests/",
        "examples/",
        "completions/",
        ".ci/",
    ];
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c));
    for word in readme
        .split(is_end)
        .filter(|word| starts.iter().any(|s| word.starts_with(s)))
    {
        let path = word.trim_end_matches('.');
        assert!(
            root().join(path).exists(),
            "README.md names {path}, which does not exist"
        );
    }
}

// ---------------------------------------------------------------------------------------------
// Pasting

struct Section {
    title: String,
    /// Scripts, each with what it prints.
    blocks: Vec<(String, String)>,
}

fn paste_all(sections: &[Section]) {
    thread::scope(|scope| {
        for section in sections {
            scope.spawn(|| paste(BASH, section));
        }
    });
}

/// Pastes the blocks into one shell in an empty directory, one after the other: a command that
/// reads its input would swallow the rest. At the end no process may be left.
fn paste(words: &[&str], section: &Section) {
    let [port, http_port] = [(); 2].map(|()| free_addr().port().to_string());
    let mut shell = in_our_path(Command::new(words[0]));
    shell.args(&words[1..]);
    shell.env("LATCHD_PORT", &port);
    shell.env("LATCH_SERVER", format!("127.0.0.1:{port}"));
    // The host of the server is this one, and it listens on the loopback alone.
    let places = [
        ("6388", &*port),
        ("6389", &*http_port),
        ("0.0.0.0", "127.0.0.1"),
        ("db1", "127.0.0.1"),
    ];
    let status = if words.contains(&"fish") {
        "$status"
    } else {
        "$?"
    };
    paste_into(shell, status, section, &places);
}

/// Pastes them into this shell, in which `status` is that of the last command. In both what is
/// pasted and what it prints, the second of each of these pairs takes the place of the first.
fn paste_into(mut shell: Command, status: &str, section: &Section, places: &[(&str, &str)]) {
    const MARK: &str = "# end of block, status";
    let placed = |text: &str| {
        let replace = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
        places.iter().fold(text.to_owned(), replace)
    };
    let mut input = String::new();
    for (script, _) in &section.blocks {
        let script = placed(script);
        input += &format!("{script}\necho '{MARK}' {status}\n");
    }
    input += &format!("{STOP_JOBS}\n");
    let dir = tempfile::tempdir().expect("there is room for a directory");
    // The operator's socket of its servers is in that directory, too.
    shell
        .current_dir(dir.path())
        .env("XDG_RUNTIME_DIR", dir.path());
    let ended = end_of(&mut shell, &input);
    let printed = &ended.printed;
    let title = format!("{} in {shell:?}", section.title);
    let mut rest = printed.as_str();
    for (script, prints) in &section.blocks {
        let (block, after) = rest
            .split_once(MARK)
            .unwrap_or_else(|| panic!("{title}: not done: {script}\n{printed}"));
        // Whether bash tells of a job that was killed depends on when it looks.
        let is_told = |line: &&str| !(line.starts_with("bash: line ") && line.contains(" Killed "));
        let block: Vec<&str> = block.lines().filter(is_told).collect();
        let block = block.join("\n");
        let prints = placed(prints);
        assert_eq!(comparable(&block), comparable(&prints), "{title}: {script}");
        let (status, after) = after.split_once('\n').expect("echo ends its line");
        assert_eq!(status, " 0", "{title}: {script}\n{printed}");
        rest = after;
    }
    assert!(!ended.left_over, "{title}: a process is left");
}

// ---------------------------------------------------------------------------------------------
// Typing

/// Three typed lines and one reply, and so on.
struct Session {
    origin: String,
    /// The arguments of its server.
    options: Vec<String>,
    lines: Vec<String>,
}

/// Types three lines into nc and reads one, as a person would.
fn converse(session: &Session) {
    let Session {
        origin,
        options,
        lines,
    } = session;
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let daemon = Daemon::start(&options);
    let port = daemon.port().to_string();
    let command = lines[0].trim_start_matches("$ ").replace("6388", &port);
    let mut nc = Group::spawn(
        shell()
            .args(["-c", &command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped()),
    );
    let mut typed = nc.0.stdin.take().expect("stdin is a pipe");
    let replies = lines_of(nc.0.stdout.take().expect("stdout is a pipe"));
    let mut tokens: HashMap<String, String> = HashMap::new();
    assert_eq!(
        lines[1..].len() % 4,
        0,
        "{origin}: three typed lines and one reply take turns"
    );
    for exchange in lines[1..].chunks(4) {
        let request: String = exchange[..3]
            .iter()
            .map(|line| format!("{line}\n"))
            .collect();
        let request = tokens
            .iter()
            .fold(request, |text, (shown, real)| text.replace(shown, real));
        typed.write_all(request.as_bytes()).expect("nc reads");
        let reply = replies
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("{origin}: no reply to {exchange:?}"));
        assert_eq!(
            comparable(&reply),
            comparable(&exchange[3]),
            "{origin}: {exchange:?}"
        );
        tokens.extend(tokens_in(&exchange[3]).into_iter().zip(tokens_in(&reply)));
    }
}

/// Runs `script` in `dir` and gives what it printed, if it ended well and in time.
fn run_script(script: &str, dir: &Path) -> String {
    let ended = end_of(shell().args(["-c", script]).current_dir(dir), "");
    let printed = ended.printed;
    let status = ended
        .status
        .unwrap_or_else(|| panic!("not done in {PATIENCE:?}: {script}\n{printed}"));
    assert!(status.success(), "{status}: {script}\n{printed}");
    printed
}

struct Ended {
    /// Nothing if it was not done in time, and was killed.
    status: Option<ExitStatus>,
    /// Both streams, in the order of the writes.
    printed: String,
    /// Whether a process that it started is still there.
    left_over: bool,
}

/// Runs a command that reads `input`, which fits into a pipe.
fn end_of(command: &mut Command, input: &str) -> Ended {
    let mut output = tempfile::tempfile().expect("there is room for a file");
    let handle = || output.try_clone().expect("descriptors are left");
    command
        .stdin(Stdio::piped())
        .stdout(handle())
        .stderr(handle());
    let mut group = Group::spawn(command);
    let mut stdin = group.0.stdin.take().expect("stdin is a pipe");
    stdin
        .write_all(input.as_bytes())
        .expect("it has just started");
    drop(stdin);
    let status = poll_for(PATIENCE, || group.0.try_wait().expect("it is our child"));
    let left_over = !is_empty(group.pid());
    drop(group);
    output.rewind().expect("it is a file");
    let mut printed = String::new();
    output
        .read_to_string(&mut printed)
        .expect("the output is UTF-8");
    Ended {
        status,
        printed,
        left_over,
    }
}

/// A plain shell, see [`in_our_path`].
fn shell() -> Command {
    in_our_path(Command::new("sh"))
}

/// The command, which finds latchd and hears nothing of the environment of the test.
fn in_our_path(mut command: Command) -> Command {
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .current_dir(root());
    command
}

fn lines_of(stdout: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

// ---------------------------------------------------------------------------------------------
// Comparing

/// `text` without what differs from run to run: tokens are numbered in the order in which they
/// appear, so that two that differ still do; counts, times, fences, addresses and the width of
/// columns are blanked.
fn comparable(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().lines().map(blanked).collect();
    let mut text = lines.join("\n");
    let mut seen: Vec<String> = Vec::new();
    for token in tokens_in(&text) {
        if !seen.contains(&token) {
            text = text.replace(&token, &format!("<token {}>", seen.len() + 1));
            seen.push(token);
        }
    }
    for member in [
        "connections",
        "owner_conn_id",
        "lease_expires_in_s",
        "idle_s",
    ] {
        let name = format!("\"{member}\":");
        let mut parts = text.split(&name);
        let first = parts.next().unwrap_or_default().to_owned();
        let is_number = |c: char| c.is_ascii_digit() || c == '.';
        text = parts.fold(first, |sum, part| {
            format!("{sum}{name}#{}", part.trim_start_matches(is_number))
        });
    }
    text
}

fn blanked(line: &str) -> String {
    let is_number = |word: &str| word.parse::<f64>().is_ok();
    let mut words: Vec<&str> = Vec::new();
    for word in line.split_whitespace() {
        let before = words.last().copied().unwrap_or_default();
        match word.trim_end_matches(',') {
            "ms" | "s" | "m" | "h" if is_number(before) => {
                words.pop();
                words.push("<time>");
            }
            address if address.starts_with("127.0.0.1:") => words.push("<address>"),
            _ if before == "fence" => words.push("<fence>"),
            _ => words.push(word),
        }
    }
    words.join(" ")
}

fn tokens_in(text: &str) -> Vec<String> {
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    words
        .filter(|word| word.len() == 32 && word.chars().all(is_digit))
        .map(str::to_owned)
        .collect()
}

// ---------------------------------------------------------------------------------------------
// Finding

/// The blocks of shell of the README, and what each of these prints.
fn readme_section(text: &str) -> Section {
    let mut blocks: Vec<(String, String)> = Vec::new();
    // Pieces inside of a fence and outside of one take turns.
    for fenced in text.split("\n```").skip(1).step_by(2) {
        match fenced.split_once('\n') {
            Some(("sh", script)) => blocks.push((with_servers_ready(script), String::new())),
            Some(("text", prints)) => {
                blocks.last_mut().expect("a script prints this").1 = prints.to_owned();
            }
            Some(("console" | "rust", _)) => {}
            _ => panic!("no test for {fenced:?}"),
        }
    }
    Section {
        title: "README.md".to_owned(),
        blocks,
    }
}

/// The literal displays of a page after a comment `pasted`, and what each of them prints.
fn manual_section(page: &str) -> Section {
    let mut blocks: Vec<(String, String)> = Vec::new();
    for (kind, display) in displays(page, &["pasted", "prints"]) {
        match kind {
            "pasted" => blocks.push((with_servers_ready(&display), String::new())),
            _ => blocks.last_mut().expect("a script prints this").1 = display,
        }
    }
    Section {
        title: page.to_owned(),
        blocks,
    }
}

/// The script with each server that it starts as a reader would have it: those of earlier scripts
/// have ended, and clients can connect before the next line is typed. A server in the last line is
/// for another terminal. The programs are installed.
fn with_servers_ready(script: &str) -> String {
    let script = script.trim_start_matches("cargo install --locked --path .\n");
    let is_server = |line: &str| line.split(' ').next() == Some("latchd");
    if !script.lines().any(is_server) {
        return script.to_owned();
    }
    let count = script.lines().count();
    let lines = script.lines().enumerate().map(|(index, line)| {
        if !is_server(line) {
            return line.to_owned();
        }
        let apart = format!("{line} 2>server.log &");
        let line = if index + 1 == count { &apart } else { line };
        let log = line
            .split_once(" 2>")
            .map(|(_, rest)| rest.split(' ').next());
        match log.flatten() {
            Some(log) if line.ends_with(" &") => format!(
                "rm -f {log}\n{}\n\
                 timeout 10 sh -c 'until grep -qs listening {log}; do sleep 0.1; done'",
                line
            ),
            _ => line.to_owned(),
        }
    });
    format!("{STOP_JOBS}\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// The literal displays of a page after comments of these `kinds`.
pub(crate) fn displays<'a>(page: &str, kinds: &[&'a str]) -> Vec<(&'a str, String)> {
    let text = read(page);
    let parts = text.split("\n.\\\" ").skip(1);
    let parts = parts.filter_map(|part| part.split_once('\n'));
    let found = parts.filter_map(|(comment, rest)| {
        let kind = kinds.iter().find(|kind| **kind == comment)?;
        let inside = rest.strip_prefix(".Bd -literal -offset indent\n");
        let inside = inside.and_then(|inside| inside.split_once("\n.Ed"));
        let (display, _) = inside.unwrap_or_else(|| panic!("{page}: {kind}"));
        Some((*kind, unescaped(display)))
    });
    found.collect()
}

/// The literal displays that begin with [`CONVERSATION`]. A comment `runs against:` before one has
/// the options of its server.
fn sessions(page: &str, text: &str) -> Vec<Session> {
    let mut sessions = Vec::new();
    let mut options = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if let Some(named) = line.strip_prefix(".\\\" runs against: ") {
            options = named.split(' ').map(str::to_owned).collect();
        }
        if !line.starts_with(".Bd -literal") {
            continue;
        }
        let inside: Vec<String> = lines
            .by_ref()
            .map(|(_, line)| unescaped(line))
            .take_while(|line| line != ".Ed")
            .collect();
        if inside[0] == CONVERSATION {
            sessions.push(Session {
                origin: format!("{page}:{}", number + 1),
                options: std::mem::take(&mut options),
                lines: inside,
            });
        }
    }
    sessions
}

fn unescaped(line: &str) -> String {
    let escapes = [("\\(aq", "'"), ("\\(dq", "\""), ("\\-", "-"), ("\\e", "\\")];
    escapes
        .iter()
        .fold(line.to_owned(), |line, (escape, means)| {
            line.replace(escape, means)
        })
}

fn pages() -> Vec<String> {
    files_in("man")
        .into_iter()
        .filter(|path| {
            [".1", ".7", ".8"]
                .iter()
                .any(|section| path.ends_with(section))
        })
        .collect()
}

fn files_in(dir: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(dir)).unwrap_or_else(|error| panic!("{dir}: {error}"));
    let mut names: Vec<String> = entries
        .map(|entry| {
            format!(
                "{dir}/{}",
                entry
                    .expect("the directory stays")
                    .file_name()
                    .to_string_lossy()
            )
        })
        .collect();
    names.sort();
    names
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
