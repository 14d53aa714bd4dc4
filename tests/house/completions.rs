//! The shell completions below completions/ are those of the programs as they are, and they work.
//!
//! They are made from the rows of the options, which `--help` shows, too. With `LATCHD_BLESS=1`
//! this test writes them anew.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use latchd::command_lines::{
    self, CommandRow, Form, Row, Times, LATCH, LATCHD, LFPD, OF_ALL, SEMA,
};

use crate::support::needs::{self, needs};
use crate::support::Daemon;

/// Every program that has completions.
const PROGRAMS: &[(command_lines::Program, &str)] = &[
    (LATCH, env!("CARGO_BIN_EXE_latch")),
    (LATCHD, env!("CARGO_BIN_EXE_latchd")),
    (LFPD, env!("CARGO_BIN_EXE_lfpd")),
    (SEMA, env!("CARGO_BIN_EXE_sema")),
];

#[test]
fn the_completions_are_those_of_the_programs() {
    for (program, path) in PROGRAMS {
        let name = program.name;
        let program = Program::of(program, path);
        for (file, text) in [
            (format!("{name}.bash"), bash(&program)),
            (format!("_{name}"), zsh(&program)),
            (format!("{name}.fish"), fish(&program)),
        ] {
            let path = completions().join(&file);
            if std::env::var_os("LATCHD_BLESS").is_some() {
                fs::write(&path, &text).unwrap_or_else(|error| panic!("{file}: {error}"));
            }
            let there = fs::read_to_string(&path).unwrap_or_default();
            assert!(
                there == text,
                "completions/{file} is not up to date; `LATCHD_BLESS=1 cargo test --test house completions` \
                 writes it"
            );
        }
    }
}

#[test]
fn nothing_else_lies_beside_the_completions() {
    let there: BTreeSet<String> = fs::read_dir(completions())
        .expect("there are completions")
        .map(|entry| {
            let name = entry.expect("the directory stays").file_name();
            name.to_string_lossy().into_owned()
        })
        .collect();
    let known = PROGRAMS.iter().flat_map(|(program, _)| {
        let name = program.name;
        [
            format!("{name}.bash"),
            format!("_{name}"),
            format!("{name}.fish"),
        ]
    });
    assert_eq!(there, known.collect());
}

// ---------------------------------------------------------------------------------------------
// Trying them

#[test]
fn bash_completes_commands_options_and_values() {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    fs::write(dir.path().join("tok en"), "").expect("write");
    for (words, offers) in [
        ("latch hel", "help"),
        ("latch help renew ''", ""),
        ("latch help st", "stats status"),
        ("latch run --on-lost u", "usr1 usr2"),
        ("latch stats --format = j", "json"),
        ("sema run to --on-lost ''", "term ignore"),
        ("latch re", "reserve renew release"),
        ("latch fence", "fence-check"),
        ("latch --v", "--version"),
        ("latch run --ti", "--timeout"),
        ("latch run key --busy", "--busy-ok --busy-status"),
        ("latch run --nested = n", "no"),
        ("latch run --nested =", "yes no"),
        ("latch run --timeout ''", ""),
        ("latch run --timeout = 5 ''", ""),
        ("latch run ''", ""),
        ("latch renew --lim", "--limit"),
        ("latch renew --busy", ""),
        // A key may be named as a command is.
        ("latch run stats --ti", "--timeout"),
        // bash makes three words of host:port; none of them is a key.
        ("latch run --server host : 1 ''", ""),
        ("latch run --server host : 1 key --lea", "--lease"),
        ("latch run --auth-token-file to", "tok en"),
        ("latch run --auth-token-file = to", "tok en"),
        ("latch fence-check to", "tok en"),
        ("latch fence-check file to", ""),
        ("latch ping --no-such", ""),
        ("latchd --log-t", "--log-timestamps"),
        ("latchd --fence-state-file to", "tok en"),
        ("latchd --debug --ine", "--inetd"),
        ("latchd re", ""),
        ("lfpd --lock", "--lock-dir"),
        ("lfpd --lock-dir to", "tok en"),
        ("lfpd --stdio =", "yes no"),
        ("sema re", "release"),
        ("sema --v", "--version"),
        ("sema try to", "tok en"),
        ("sema try to --s", "--stale --stale-rule --settle"),
        ("sema status to --to", ""),
        ("sema run to --busy-s", "--busy-status"),
    ] {
        assert_eq!(
            in_bash(words, dir.path()),
            offers
                .split_terminator(split_at(offers))
                .collect::<Vec<_>>(),
            "{words}"
        );
    }
    // Once the key is there, options are all that can follow.
    let after_key = in_bash("latch run key ''", dir.path());
    assert!(after_key.contains(&"--timeout".to_owned()) && after_key.contains(&"--".to_owned()));
}

/// Offers are parted by blanks, but for the file whose name has one.
fn split_at(offers: &str) -> char {
    if offers == "tok en" {
        '\n'
    } else {
        ' '
    }
}

#[test]
fn the_shells_complete_the_keys_in_use() {
    let [zsh, fish] = needs!("zsh", "fish");
    let dir = tempfile::tempdir().expect("there is room for a directory");
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    // A shell would run what is in the last one.
    for key in ["nightly", "night-2", "other", "night$(touch${IFS}run)"] {
        holder.acquire(key, 0);
    }
    let server = daemon.addr().to_string();
    let offers = |server: &str| {
        let script = format!("export LATCH_SERVER={server}");
        let bash = in_bash_with(&script, "latch run ni", dir.path());
        let script = format!("{script}; _arguments() {{ :; }}; compadd() {{ print -l $keys; }}");
        let file = completions().join("_latch");
        let script = format!(
            "{script}; source '{}' 2>/dev/null; _latch_keys",
            file.display()
        );
        let zsh = lines_of(
            zsh.command()
                .args(["-f", "-c", &script])
                .current_dir(dir.path()),
        );
        let mut command = fish.command();
        command.env("LATCH_SERVER", server);
        let fish = in_fish_with(&mut command, "latch run ni", dir.path());
        (bash, zsh, fish)
    };
    let (bash, zsh, mut fish) = offers(&server);
    assert_eq!(bash, ["night-2", "nightly"]);
    assert_eq!(zsh, ["night-2", "nightly", "other"]);
    fish.sort_unstable();
    assert_eq!(fish, ["night-2", "nightly"]);
    drop((holder, daemon));
    let (bash, zsh, fish) = offers(&server);
    assert_eq!((bash.len(), fish.len()), (0, 0), "{bash:?} {fish:?}");
    assert_eq!(zsh.concat(), "");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn bash_completes_the_command_behind_the_dashes() {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    fs::write(dir.path().join("to-do"), "").expect("write");
    let commands = in_bash("latch run key -- ca", dir.path());
    assert!(commands.contains(&"cat".to_owned()), "{commands:?}");
    assert!(!in_bash("latch run key -- ''", dir.path()).is_empty());
    assert_eq!(in_bash("latch run key -- cat to", dir.path()), ["to-do"]);
    assert_eq!(
        in_bash("latch run key --timeout 0 -- cat -- to", dir.path()),
        ["to-do"]
    );
    // What follows belongs to the command, whatever it is called.
    assert_eq!(in_bash("latch run key -- stats --js", dir.path()), [""; 0]);
    assert_eq!(in_bash("latch wait key -- ca", dir.path()), [""; 0]);
}

#[test]
fn bash_leaves_the_command_to_its_own_completion_if_it_can() {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    let script = r#"_command_offset() { COMPREPLY=("offset $1"); }"#;
    let offers = in_bash_with(script, "latch run key -- make al", dir.path());
    assert_eq!(offers, ["offset 4"]);
}

#[test]
fn zsh_and_fish_can_read_their_completions() {
    let [zsh, fish] = needs!("zsh", "fish");
    for (program, _) in PROGRAMS {
        let name = program.name;
        for (shell, file) in [(&zsh, format!("_{name}")), (&fish, format!("{name}.fish"))] {
            let output = shell
                .command()
                .arg("-n")
                .arg(completions().join(&file))
                .output()
                .expect("it starts");
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && complaint.is_empty(),
                "{file}: {complaint}"
            );
        }
    }
}

#[test]
fn fish_completes_options_and_the_command_after_the_dashes() {
    let fish = needs!("fish");
    let dir = tempfile::tempdir().expect("there is room for a directory");
    fs::write(dir.path().join("to-do"), "").expect("write");
    for (line, offers) in [
        ("latch rel", &["release"][..]),
        ("latch help rel", &["release"]),
        ("latch run key --on-lost u", &["usr1", "usr2"]),
        ("latch run key --timeo", &["--timeout"]),
        ("latch wait key --busy", &[]),
        ("latch fence-check to-", &["to-do"]),
        ("latch run to-", &[]),
        ("latch run key -- cat to-", &["to-do"]),
        ("latchd --log-t", &["--log-timestamps"]),
        ("lfpd --lock", &["--lock-dir"]),
        ("sema rel", &["release"]),
        ("sema try to-", &["to-do"]),
        ("sema status to-do --set", &[]),
        ("sema run to-do -- cat to-", &["to-do"]),
    ] {
        assert_eq!(in_fish(&fish, line, dir.path()), offers, "{line}");
    }
}

/// What bash offers for the last of `words`.
fn in_bash(words: &str, dir: &Path) -> Vec<String> {
    in_bash_with("", words, dir)
}

fn in_bash_with(script: &str, words: &str, dir: &Path) -> Vec<String> {
    let program = words.split(' ').next().expect("a program");
    let file = completions().join(format!("{program}.bash"));
    let script = format!(
        "{script}\nsource '{}' || exit\nCOMP_WORDS=({words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
         _{program} {program} \"${{COMP_WORDS[COMP_CWORD]}}\"\n\
         [ ${{#COMPREPLY[@]}} = 0 ] || printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        file.display()
    );
    lines_of(
        Command::new("bash")
            .args(["--norc", "--noprofile", "-c", &script])
            .current_dir(dir),
    )
}

/// What fish offers at the end of `line`, without the descriptions. Fish 4 also offers words that
/// only contain what has been typed.
fn in_fish(fish: &needs::Program, line: &str, dir: &Path) -> Vec<String> {
    in_fish_with(&mut fish.command(), line, dir)
}

fn in_fish_with(fish: &mut Command, line: &str, dir: &Path) -> Vec<String> {
    let program = line.split(' ').next().expect("a program");
    let file = completions().join(format!("{program}.fish"));
    let script = format!("source '{}'; complete -C '{line}'", file.display());
    let lines = lines_of(
        fish.args(["--no-config", "-c", &script])
            .env("HOME", dir)
            .current_dir(dir),
    );
    let (_, typed) = line.rsplit_once(' ').expect("a word to complete");
    let offers = lines.iter().filter_map(|line| line.split('\t').next());
    let offers = offers.filter(|offer| offer.starts_with(typed));
    offers.map(str::to_owned).collect()
}

fn lines_of(command: &mut Command) -> Vec<String> {
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.is_empty(), "{command:?}: {complaint}");
    let printed = String::from_utf8(output.stdout).expect("the offers are UTF-8");
    printed.lines().map(str::to_owned).collect()
}

// ---------------------------------------------------------------------------------------------
// What a program takes

/// A program or one of its commands, as the shells need it.
struct Program {
    name: &'static str,
    about: &'static str,
    options: Vec<Opt>,
    operands: Vec<&'static str>,
    /// Whether a command line may follow `--`.
    takes_command: bool,
    commands: Vec<Program>,
}

struct Opt {
    long: String,
    short: Option<&'static str>,
    value: Value,
    repeats: bool,
    about: &'static str,
}

#[derive(Debug, PartialEq, Eq)]
enum Value {
    None,
    /// A boolean: yes or no, which may be left out.
    AfterEquals,
    /// What the help calls it.
    Wanted(&'static str),
    /// The same, and the words that it may be.
    OneOf(&'static str, Vec<String>),
}

impl Value {
    fn is_path(&self) -> bool {
        *self == Value::Wanted("path")
    }

    fn is_wanted(&self) -> bool {
        matches!(self, Value::Wanted(_) | Value::OneOf(..))
    }
}

/// The words that a program names when it refuses a value of an option; none if it wants something
/// else. Nothing is run: behind the value is a wrong time.
fn words_of(path: &str, command: Option<&str>, option: &str, time: &str) -> Vec<String> {
    let output = Command::new(path)
        .args(command)
        .args([option, "?", time, "?"])
        .output()
        .expect("it starts");
    assert!(!output.status.success(), "{path} {command:?} {option}");
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or_default();
    let expected = line.split_once(": expected ").and_then(|(about, words)| {
        let is_about_it = about.contains("invalid value");
        is_about_it.then(|| words.split_once(" or ")).flatten()
    });
    let Some((first, last)) = expected else {
        return Vec::new();
    };
    let words: Vec<String> = first.split(", ").chain([last]).map(str::to_owned).collect();
    let is_word = |word: &String| {
        let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        word.starts_with(|c: char| c.is_ascii_lowercase()) && word.chars().all(is_letter)
    };
    if words.iter().all(is_word) {
        words
    } else {
        Vec::new()
    }
}

impl Program {
    fn of(program: &command_lines::Program, path: &str) -> Program {
        // Before a command, only these are read.
        let own: Vec<&Row> = match program.commands {
            [] => program.rows(&program.own).collect(),
            _ => OF_ALL.iter().collect(),
        };
        let commands = program.commands.iter();
        let commands = commands.map(|it| {
            let rows: Vec<&Row> = program.rows(it).collect();
            Program::new(it, &rows, path, Some(it.name))
        });
        let commands = commands.collect();
        let own = Program::new(&program.own, &own, path, None);
        Program {
            name: program.name,
            commands,
            ..own
        }
    }

    fn new(it: &CommandRow, rows: &[&'static Row], path: &str, command: Option<&str>) -> Program {
        let (options, operands): (Vec<&Row>, Vec<&Row>) =
            rows.iter().partition(|row| row.is_option());
        let time = options.iter().find(|row| row.form == Form::Valued("time"));
        let time = time.map(|row| row.long()).unwrap_or_default();
        let options = options.into_iter();
        Program {
            name: it.name,
            about: it.about.split(':').next().unwrap_or_default(),
            options: options
                .map(|row| Opt::of(row, path, command, &time))
                .collect(),
            operands: operands.iter().map(|row| row.name).collect(),
            takes_command: !it.tail.is_empty(),
            commands: Vec::new(),
        }
    }

    /// The program itself and its commands.
    fn all(&self) -> impl Iterator<Item = &Program> {
        std::iter::once(self).chain(&self.commands)
    }

    fn command_names(&self) -> Vec<&str> {
        self.commands.iter().map(|it| it.name).collect()
    }

    /// Whether an operand of a command is a key of a server.
    fn has_keys(&self) -> bool {
        self.all().any(|it| it.operands.contains(&"key"))
    }

    /// The options with a list of words, each list with all names of its options.
    fn word_lists(&self) -> Vec<(&[String], Vec<&str>)> {
        let mut lists: Vec<(&[String], Vec<&str>)> = Vec::new();
        for option in self.all().flat_map(|it| &it.options) {
            let Value::OneOf(_, words) = &option.value else {
                continue;
            };
            let at = lists.iter().position(|(known, _)| known == words);
            let at = at.unwrap_or_else(|| {
                lists.push((words, Vec::new()));
                lists.len() - 1
            });
            for name in option.names() {
                if !lists[at].1.contains(&name) {
                    lists[at].1.push(name);
                }
            }
        }
        lists
    }

    /// The name of a command; nothing for the program itself.
    fn command_name(&self, it: &Program) -> &'static str {
        if it.name == self.name {
            ""
        } else {
            it.name
        }
    }

    /// The options of all commands with such a value, in both forms, each once.
    fn options_with(&self, is_it: impl Fn(&Value) -> bool) -> Vec<&str> {
        let mut names = Vec::new();
        for option in self
            .all()
            .flat_map(|it| &it.options)
            .filter(|it| is_it(&it.value))
        {
            for name in option.names() {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        names
    }
}

impl Opt {
    fn of(row: &'static Row, path: &str, command: Option<&str>, time: &str) -> Opt {
        let long = row.long();
        let value = match row.form {
            Form::Valued(value) => match words_of(path, command, &long, time) {
                words if words.is_empty() => Value::Wanted(value),
                words => Value::OneOf(value, words),
            },
            Form::Switch("bool") if row.other.is_none() => Value::AfterEquals,
            _ => Value::None,
        };
        Opt {
            long,
            short: row.other,
            value,
            repeats: row.times == Times::Any,
            about: row.about,
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.long.as_str()).chain(self.short)
    }
}

// ---------------------------------------------------------------------------------------------
// bash

const BASH: &str = r#"# Completion of @name@ for bash. Made from the rows of its options; do not edit.

_@name@() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= option= operand=0 words= word i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        # bash makes three words of --name=value, and of host:port.
        if [[ $word == = && ${COMP_WORDS[i - 1]} == --* ]]; then
            option=${COMP_WORDS[i - 1]}
        elif [[ $word == [:=]* ]]; then
            ((++i < COMP_CWORD)) || return
@dashes@        elif [[ -n $option ]]; then
            option=
        else
            case $word in
                @valued@) option=$word ;;
                -*) ;;
                *) @operand@ ;;
            esac
        fi
    done
    if [[ $cur == = && ${COMP_WORDS[i - 1]} == --* ]]; then
        option=${COMP_WORDS[i - 1]} cur=
    fi
    case $option in
        '') ;;
@booleans@@paths@@words@        *) return ;;
    esac
    case $command in
@options@    esac
    if [[ $cur != -* ]]; then
        case "$command $operand" in
@operands@        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

_@name@_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}
@keys@
complete -F _@name@ @name@
"#;

/// The keys in use, but for those that a shell may misread: other clients choose them.
const KEYS: &str = r#"@name@ stats --json --connect-timeout 1 2>/dev/null |
        grep -o '"key":"[A-Za-z0-9_./@%+,-]*"' | cut -d '"' -f 4 | LC_ALL=C sort -u"#;

const BASH_KEYS: &str = r#"
_@name@_keys() {
    local key
    while read -r key; do
        [[ $key != "$cur"* ]] || COMPREPLY+=("$key")
    done < <(@list@)
}
"#;

/// For a program some of whose commands take a command line behind `--`.
const BASH_DASHES: &str = r#"        elif [[ $word == -- ]]; then
            [[ $command == @runs@ ]] || return
            if declare -F _command_offset >/dev/null; then
                _command_offset $((i + 1)) # of the package bash-completion
            elif ((i + 1 == COMP_CWORD)); then
                mapfile -t COMPREPLY < <(compgen -c -- "$cur")
            else
                _@name@_files
            fi
            return
"#;

fn bash(program: &Program) -> String {
    let runs: Vec<&str> = program
        .all()
        .filter(|it| it.takes_command)
        .map(|it| it.name)
        .collect();
    let dashes = match runs.as_slice() {
        [] => String::new(),
        runs => BASH_DASHES.replace("@runs@", &format!("@({})", runs.join("|"))),
    };
    let (mut options, mut operands) = (String::new(), String::new());
    for it in program.all() {
        let command = program.command_name(it);
        let mut words: Vec<&str> = it
            .options
            .iter()
            .map(|option| option.long.as_str())
            .collect();
        if it.takes_command {
            words.push("--");
        }
        let _ = writeln!(
            options,
            "        '{command}') words='{}' ;;",
            words.join(" ")
        );
        for (place, operand) in it.operands.iter().enumerate() {
            let offers = match *operand {
                "file" => format!("_{}_files; ", program.name),
                "key" => format!("_{}_keys; ", program.name),
                _ => String::new(),
            };
            let _ = writeln!(
                operands,
                "            '{command} {place}') {offers}return ;;"
            );
        }
    }
    if !program.commands.is_empty() {
        let names = program.command_names().join(" ");
        let _ = writeln!(operands, "            'help 0') words='{names}' ;;");
        let _ = writeln!(
            operands,
            "            ' 0') words='{names} help version' ;;"
        );
    }
    let operand = if program.commands.is_empty() {
        "((operand += 1))"
    } else {
        "if [[ -z $command ]]; then command=$word; else ((operand += 1)); fi"
    };
    let booleans = program.options_with(|it| *it == Value::AfterEquals);
    let paths = program.options_with(Value::is_path);
    let files = format!("_{}_files", program.name);
    let words = program.word_lists().into_iter().map(|(words, options)| {
        let words = words.join(" ");
        bash_case(
            &options,
            &format!("COMPREPLY=($(compgen -W '{words}' -- \"$cur\"))"),
        )
    });
    let keys = if program.has_keys() { BASH_KEYS } else { "" };
    BASH.replace("@dashes@", &dashes)
        .replace("@words@", &words.collect::<String>())
        .replace("@keys@", &keys.replace("@list@", KEYS))
        .replace("@name@", program.name)
        .replace(
            "@valued@",
            &program.options_with(Value::is_wanted).join(" | "),
        )
        .replace("@booleans@", &bash_case(&booleans, BASH_BOOLEAN))
        .replace("@paths@", &bash_case(&paths, &files))
        .replace("@operand@", operand)
        .replace("@options@", &options)
        .replace("@operands@", &operands)
}

const BASH_BOOLEAN: &str = "COMPREPLY=($(compgen -W 'yes no' -- \"$cur\"))";

/// The case of the options with one kind of value; nothing if there are none.
fn bash_case(options: &[&str], completes: &str) -> String {
    if options.is_empty() {
        return String::new();
    }
    format!(
        "        {})\n            {completes}\n            return\n            ;;\n",
        options.join(" | ")
    )
}

// ---------------------------------------------------------------------------------------------
// zsh

fn zsh(program: &Program) -> String {
    let name = program.name;
    let mut text = format!(
        "#compdef {name}\n# Completion of {name} for zsh. Made from the rows of its options; do not edit.\n\n"
    );
    if program.commands.is_empty() {
        let _ = write!(text, "_arguments -s \\\n{}", zsh_arguments(program, "    "));
        return text;
    }
    let mut cases = String::new();
    for it in &program.commands {
        let dashes = if it.takes_command { ZSH_DASHES } else { "" };
        let arguments = zsh_arguments(it, "            ");
        let _ = write!(
            cases,
            "    {})\n{dashes}        _arguments -s \\\n{arguments}        ;;\n",
            it.name
        );
    }
    let commands = program.commands.iter();
    let commands = commands.map(|it| (it.name, it.about));
    let commands: Vec<String> = commands
        .chain(WORDS)
        .map(|(name, about)| format!("    {}\n", quoted(&format!("{name}:{about}"))))
        .collect();
    let keys = if program.has_keys() {
        ZSH_KEYS.replace("@list@", KEYS).replace("@name@", name)
    } else {
        String::new()
    };
    text + &keys
        + &ZSH_COMMANDS
            .replace("@commands@", &commands.concat())
            .replace("@options@", &zsh_options(program, "    "))
            .replace("@cases@", &cases)
}

/// What a person may type in the place of a command.
const WORDS: [(&str, &str); 2] = [
    ("help", "Show the options of a command"),
    ("version", "Print the version"),
];

const ZSH_KEYS: &str = r#"_@name@_keys() {
    local -a keys=(${(f)"$(@list@)"})
    compadd "$@" -a keys
}

"#;

/// For a program that has commands.
const ZSH_COMMANDS: &str = r#"local curcontext=$curcontext state line
local -i dashes
local -a commands=(
@commands@)

_arguments -C \
@options@    '1: :->command' \
    '*:: :->arguments'

case $state in
command) _describe command commands ;;
arguments)
    case $line[1] in
    help) _describe command commands ;;
@cases@    esac
    ;;
esac
"#;

/// The words after `--` are a command line of their own.
const ZSH_DASHES: &str = "        dashes=$words[(i)--]
        if (( dashes < CURRENT )); then
            shift $dashes words
            (( CURRENT -= dashes ))
            _normal
            return
        fi
";

fn zsh_arguments(it: &Program, indent: &str) -> String {
    let mut specs = zsh_options(it, indent);
    for (place, operand) in it.operands.iter().enumerate() {
        let action = match *operand {
            "file" => "_files",
            "key" => "_latch_keys",
            _ => " ",
        };
        let _ = writeln!(specs, "{indent}'{}:{operand}:{action}' \\", place + 1);
    }
    format!("{}\n", specs.trim_end_matches(" \\\n"))
}

fn zsh_options(it: &Program, indent: &str) -> String {
    let mut specs = String::new();
    for option in &it.options {
        let about: String = option
            .about
            .chars()
            .flat_map(|c| {
                matches!(c, '[' | ']' | ':')
                    .then_some('\\')
                    .into_iter()
                    .chain([c])
            })
            .collect();
        for name in option.names() {
            let others: Vec<&str> = match option.long.as_str() {
                "--help" | "--version" => vec!["-", "*"],
                _ => option.names().collect(),
            };
            let exclude = if option.repeats {
                "*".into()
            } else {
                format!("({})", others.join(" "))
            };
            let value = match &option.value {
                Value::None => format!("[{about}]"),
                Value::AfterEquals => format!("=-[{about}]::bool:(yes no)"),
                Value::Wanted(value) | Value::OneOf(value, _) => {
                    let action = match &option.value {
                        Value::OneOf(_, words) => format!("({})", words.join(" ")),
                        value if value.is_path() => "_files".to_owned(),
                        _ => " ".to_owned(),
                    };
                    let joined = if name.starts_with("--") { "=" } else { "" };
                    format!("{joined}[{about}]:{value}:{action}")
                }
            };
            let _ = writeln!(
                specs,
                "{indent}{} \\",
                quoted(&format!("{exclude}{name}{value}"))
            );
        }
    }
    specs
}

// ---------------------------------------------------------------------------------------------
// fish

/// The words behind `--` as a command line of their own.
const FISH_DASHES: &str = r#"
function __@name@_command
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-2]) $words[-1])
end
"#;

const FISH_KEYS: &str = r#"
function __@name@_keys
    command -q @name@; or return
    @list@
end
"#;

fn fish(program: &Program) -> String {
    let name = program.name;
    let mut text = format!(
        "# Completion of {name} for fish. Made from the rows of its options; do not edit.\n"
    );
    if program.all().any(|it| it.takes_command) {
        text += &FISH_DASHES.replace("@name@", name);
    }
    if program.has_keys() {
        text += &FISH_KEYS.replace("@list@", KEYS).replace("@name@", name);
    }
    let _ = writeln!(text, "\ncomplete -c {name} -f");
    let commands = program.commands.iter();
    let commands = commands.map(|it| (it.name, it.about));
    let words = WORDS.iter().filter(|_| !program.commands.is_empty());
    for (command, about) in commands.chain(words.copied()) {
        let about = quoted(about);
        let _ = writeln!(
            text,
            "complete -c {name} -n __fish_use_subcommand -a {command} -d {about}"
        );
    }
    if !program.commands.is_empty() {
        let names = program.command_names().join(" ");
        let _ = writeln!(
            text,
            "complete -c {name} -n '__fish_seen_subcommand_from help' -a '{names}'"
        );
    }
    for it in program.all() {
        let condition = match program.command_name(it) {
            "" if program.commands.is_empty() => String::new(),
            "" => " -n __fish_use_subcommand".to_owned(),
            command => format!(" -n '__fish_seen_subcommand_from {command}'"),
        };
        text.push('\n');
        for option in &it.options {
            // The long name is shown last.
            let names: Vec<&str> = option.names().collect();
            let names: String = names
                .into_iter()
                .rev()
                .map(|name| match name.strip_prefix("--") {
                    Some(long) => format!(" -l {long}"),
                    None => format!(" -s {}", &name[1..]),
                })
                .collect();
            let value = match &option.value {
                Value::None | Value::AfterEquals => String::new(),
                value if value.is_path() => " -r -F".to_owned(),
                Value::Wanted(_) => " -x".to_owned(),
                Value::OneOf(_, words) => format!(" -x -a '{}'", words.join(" ")),
            };
            let about = quoted(option.about);
            let _ = writeln!(
                text,
                "complete -c {name}{condition}{names}{value} -d {about}"
            );
        }
        if it.operands.contains(&"file") {
            let _ = writeln!(text, "complete -c {name}{condition} -F");
        }
        if it.operands.first().is_some_and(|operand| *operand == "key") {
            let condition = format!(
                "'__fish_seen_subcommand_from {}; and test (count (commandline -opc)) -eq 2'",
                it.name
            );
            let _ = writeln!(
                text,
                "complete -c {name} -n {condition} -a '(__{name}_keys)'"
            );
        }
        if it.takes_command {
            let condition = format!(
                "'__fish_seen_subcommand_from {}; and contains -- -- (commandline -opc)'",
                it.name
            );
            let _ = writeln!(
                text,
                "complete -c {name} -n {condition} -a '(__{name}_command)'"
            );
        }
    }
    text
}

/// A word for zsh and fish; both know the quote outside of quotes.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn completions() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("completions")
}
