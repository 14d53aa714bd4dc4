//! The manual pages and the program say the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use latchd::command_lines::{Form, Row, LATCH, LATCHD, LFPD, SEMA};

use crate::support::needs::{needs, Program};
use crate::tidy::{expect_none, read, shown};

const COMMANDS: &[&str] = &[
    "l",
    "sl",
    "e",
    "se",
    "w",
    "sw",
    "r",
    "sr",
    "n",
    "sn",
    "adopt",
    "keep",
    "hello",
    "ping",
    "barrier",
    "stable-ref",
    "stats",
    "tag",
    "break",
    "auth",
    "cluster",
    "relay",
];

const STATUS_WORDS: &[&str] = &[
    "ok",
    "acquired",
    "queued",
    "timeout",
    "error",
    "error_auth",
    "error_max_locks",
    "error_max_waiters",
    "error_limit_mismatch",
    "error_not_enqueued",
    "error_already_enqueued",
    "error_lease_expired",
    "error_draining",
    "error_not_written",
];

#[test]
fn the_manual_has_the_options_of_latchd_sema_and_lfpd() {
    for program in [LATCHD, SEMA, LFPD] {
        let file = program.manual.replace('(', ".").replace(')', "");
        let options = program.rows(&program.own).filter(|row| row.is_option());
        let options: BTreeSet<String> = options.map(Row::long).collect();
        let manual = options_of_manual(&page(&file));
        let missing: Vec<&String> = options.difference(&manual).collect();
        assert!(missing.is_empty(), "not in man/{file}: {missing:?}");
        let is_other = |name: &&String| {
            let mut rows = program.all_rows(&program.own);
            rows.any(|row| row.is_named(name))
        };
        let unknown: Vec<&String> = manual.iter().filter(|name| !is_other(name)).collect();
        assert!(unknown.is_empty(), "only in man/{file}: {unknown:?}");
    }
}

#[test]
fn help_and_manual_of_latchd_have_the_same_groups() {
    let groups = LATCHD.groups(&LATCHD.own).into_iter();
    let in_help: Vec<(&str, Vec<String>)> = groups
        .map(|(heading, rows)| (heading, rows.into_iter().map(Row::long).collect()))
        .collect();
    let options = section(&page("latchd.8"), "OPTIONS");
    let groups = options.split("\n.Ss ").skip(1);
    let in_manual: Vec<(&str, Vec<String>)> = groups
        .map(|group| {
            let (heading, entries) = group.split_once('\n').expect("entries");
            let heads = entries.lines().filter_map(|line| line.strip_prefix(".It "));
            (heading, heads.flat_map(manual_options_in).collect())
        })
        .collect();
    assert_eq!(in_help, in_manual, "left: --help, right: man/latchd.8");
}

#[test]
fn options_begin_with_a_verb_in_the_help() {
    let mut found = Vec::new();
    for program in [LATCH, LATCHD, LFPD, SEMA] {
        for command in program.commands.iter().chain([&program.own]) {
            let options = program.rows(command).filter(|row| row.is_option());
            let is_other = |row: &&Row| begins_without_verb(row.about);
            let other = options.filter(is_other);
            found.extend(other.map(|row| format!("{}: {}", row.long(), row.about)));
        }
    }
    expect_none(&found, "what does the option do?");
}

#[test]
fn the_manual_has_the_sub_commands_of_latch() {
    let names: Vec<&str> = LATCH.commands.iter().map(|it| it.name).collect();
    let page = page("latch.1");
    let sections = section(&page, "DESCRIPTION");
    let described: Vec<&str> = sections
        .lines()
        .filter_map(|line| line.strip_prefix(".Ss latch "))
        .collect();
    assert_eq!(names, described, "left: latch, right: man/latch.1");
    let synopsis = section(&page, "SYNOPSIS");
    let shown: Vec<&str> = synopsis
        .lines()
        .filter_map(|line| line.strip_prefix(".Cm "))
        .collect();
    assert_eq!(names, shown, "left: latch, right: its SYNOPSIS");
}

#[test]
fn the_manual_has_the_options_of_every_sub_command() {
    let page = page("latch.1");
    for command in LATCH.commands {
        let name = command.name;
        let section = |heading: &str| {
            let (_, from) = page.split_once(&format!("\n.Ss {heading}\n"))?;
            from.split("\n.Ss ").next()?.split("\n.Sh ").next()
        };
        let own =
            section(&format!("latch {name}")).unwrap_or_else(|| panic!("{name} has no section"));
        // The options of all sub-commands that ask a server have a section of their own.
        let servers = match name {
            "fence-check" => "",
            _ => section("Servers").expect("it is there"),
        };
        // So have those of several sub-commands. The line behind each names them.
        let shared = section("Options of the wait and of the lock").expect("it is there");
        let shared = shared.lines().zip(shared.lines().skip(1));
        let shared = shared.filter(|(_, names)| {
            names
                .strip_prefix(".Pq Cm ")
                .is_some_and(|names| names.split(" , ").any(|it| it == name))
        });
        let lines = own.lines().chain(servers.lines());
        let lines = lines.chain(shared.map(|(entry, _)| entry));
        let entries = lines.filter_map(|line| line.strip_prefix(".It "));
        let manual: BTreeSet<&str> = entries.collect();
        let options = command.rows.iter().filter(|row| row.is_option());
        let options: Vec<String> = options.map(in_mdoc).collect();
        let options: BTreeSet<&str> = options.iter().map(String::as_str).collect();
        assert_eq!(options, manual, "left: latch {name}, right: man/latch.1");
    }
}

/// The head of an option's entry: `Fl E , -busy-status Ar status` for `-E, --busy-status <status>`.
fn in_mdoc(row: &Row) -> String {
    let names: Vec<String> = row.names().map(|name| name[1..].to_owned()).collect();
    let names = names.join(" , ");
    match row.form {
        Form::Valued(value) => format!("Fl {names} Ar {value}"),
        // What takes yes or no after an equals sign is said once for all.
        Form::Switch(value) if value != "bool" => format!("Fl {names} Ns Oo = Ns Ar {value} Oc"),
        _ => format!("Fl {names}"),
    }
}

#[test]
fn the_manual_of_latch_names_the_booleans_and_the_operands() {
    let page = page("latch.1");
    let rows = LATCH.commands.iter().flat_map(|command| command.rows);
    let booleans = rows.filter(|row| row.form == Form::Switch("bool") && row.other.is_none());
    let booleans: BTreeSet<String> = booleans.map(Row::long).collect();
    let description = section(&page, "DESCRIPTION");
    let (listed, _) = description
        .split_once("take a value only after an equals sign")
        .expect("the page says how booleans are given");
    let (_, listed) = listed.rsplit_once("equals sign.").expect("and values");
    let listed: BTreeSet<String> = listed
        .lines()
        .filter_map(|line| line.strip_prefix(".Fl "))
        .map(|name| format!("-{}", name.trim_end_matches(" ,")))
        .collect();
    assert_eq!(booleans, listed, "left: latch, right: man/latch.1");

    let synopsis = section(&page, "SYNOPSIS");
    for command in LATCH.commands {
        let operands = command.rows.iter().filter(|row| !row.is_option());
        let operands: Vec<&str> = operands.map(|row| row.name).collect();
        let (_, shown) = synopsis
            .split_once(&format!(".Cm {}\n", command.name))
            .expect("every sub-command is in the SYNOPSIS");
        let shown = shown.lines().map_while(|line| {
            let names = line.strip_prefix(".Ar ");
            names.or_else(|| line.strip_prefix(".Op Ar "))
        });
        let shown = shown.filter(|names| *names != "option ...");
        let shown: Vec<&str> = shown.flat_map(|names| names.split(' ')).collect();
        assert_eq!(operands, shown, "left: {}, right: SYNOPSIS", command.name);
    }
}

#[test]
fn options_begin_with_a_verb_and_end_with_their_default() {
    let mut found = Vec::new();
    for name in ["latchd.8", "lfpd.8", "sema.1"] {
        let page = page(name);
        for option in options_of_manual(&page) {
            let entry = entry_of(&page, &option);
            let faults = faults_of_option(&option, &entry);
            found.extend(faults.map(|fault| format!("{name}: {option} {fault}")));
        }
    }
    expect_none(&found, "as a reader looks for it");
}

#[test]
fn options_of_latch_begin_with_a_verb_and_have_a_default() {
    let mut found = Vec::new();
    // They are below the sub-commands, some of which share a name.
    let section = section(&page("latch.1"), "DESCRIPTION");
    let entries = section.split("\n.It ").skip(1);
    for entry in entries.filter(|entry| entry.starts_with("Fl ")) {
        let (head, text) = entry.split_once('\n').expect("a text");
        let text = text.split("\n.Ss ").next().unwrap_or_default();
        // Behind the last option of a list there are other paragraphs.
        let list_count = text.matches("\n.Bl ").count();
        let parts: Vec<&str> = text.split("\n.El").take(1 + list_count).collect();
        let lines = parts.concat();
        // The text is behind comments and the names of the sub-commands.
        let is_text = |line: &&str| !line.starts_with(".\\\"") && !line.starts_with(".Pq Cm ");
        let lines = lines.lines().filter(is_text);
        let text: String = lines.map(|line| format!("\n{line}")).collect();
        let faults = faults_of_option(head, &text);
        found.extend(faults.map(|fault| format!("latch.1: {head} {fault}")));
    }
    assert!(section.contains("\n.It Fl "), "no options found");
    expect_none(&found, "as a reader looks for it");
}

/// Whether the first word of a text is one that is no verb.
fn begins_without_verb(text: &str) -> bool {
    let first = text.split(' ').next().unwrap_or_default().to_lowercase();
    let others = [
        "a", "an", "at", "for", "how", "if", "of", "the", "what", "when", "where", "whether",
        "while", "who",
    ];
    others.contains(&first.as_str())
}

/// What is wrong with the entry of an option: its first word, or its end.
fn faults_of_option(option: &str, entry: &str) -> impl Iterator<Item = String> {
    let text = entry.split_once('\n').map_or("", |(_, text)| text);
    // Behind the last option of a group there is the next group.
    let text = text.split("\n.Ss ").next().unwrap_or_default();
    let first = text.split(' ').next().unwrap_or_default();
    let is_verb = first.starts_with(|c: char| c.is_ascii_uppercase()) && !begins_without_verb(text);
    let beginning = (!is_verb).then(|| format!("begins with {first:?}"));
    let (_, default) = text.rsplit_once("\nDefault:").unwrap_or_default();
    let sentence_count = default.lines().filter(|line| line.ends_with('.')).count();
    let has_default = sentence_count == 1 || ["--help", "--version"].contains(&option);
    let end = (!has_default).then(|| "does not end with its default".to_owned());
    [beginning, end].into_iter().flatten()
}

#[test]
fn the_manual_of_sema_has_the_sections_that_a_user_looks_for() {
    let page = page("sema.1");
    for name in ["EXIT STATUS", "SIGNALS", "EXAMPLES", "CAVEATS"] {
        assert!(section(&page, name).lines().count() > 3, "{name} is empty");
    }
}

#[test]
fn the_manual_has_the_sections_that_an_operator_looks_for() {
    let pages = ["latchd.8", "latchd-security.7"].map(page).concat();
    for name in [
        "OPTIONS",
        "ENVIRONMENT",
        "FILES",
        "SIGNALS",
        "EXIT STATUS",
        "LOG",
        "EXAMPLES",
        "SECURITY",
        "THREATS",
        "CAVEATS",
    ] {
        assert!(section(&pages, name).lines().count() > 3, "{name} is empty");
    }
}

#[test]
fn the_manual_names_the_variables_that_are_no_options() {
    let environment = section(&page("latchd.8"), "ENVIRONMENT");
    let heads: Vec<&str> = environment
        .lines()
        .filter_map(|line| line.strip_prefix(".It Ev "))
        .flat_map(|names| names.split(" , "))
        .collect();
    for variable in [
        "DFLOCKD_GC_LOOP_SLEEP",
        "DFLOCKD_GC_MAX_UNUSED_TIME",
        "JOURNAL_STREAM",
        "LISTEN_FDS",
        "LISTEN_PID",
        "NOTIFY_SOCKET",
        "RUST_LOG",
    ] {
        assert!(
            heads.contains(&variable),
            "{variable} is not among {heads:?}"
        );
    }
}

#[test]
fn the_manual_explains_every_event() {
    let page = page("latchd-log.7");
    let log = section(&page, "EVENTS");
    let entries: Vec<&str> = log.split(".It Li ").skip(1).collect();
    let mut explained = BTreeMap::new();
    for entry in &entries {
        let (head, text) = entry.split_once('\n').expect("a text");
        let (verb, levels) = head.split_once(" Pq ").expect("a level");
        let levels: BTreeSet<String> = levels.split(" or ").map(str::to_owned).collect();
        explained.insert(verb.to_owned(), levels);
        let (meaning, action) = text.split_once(".Sy To do :\n").unwrap_or((text, "."));
        let is_told = !meaning.is_empty() && !action.trim().is_empty();
        assert!(
            is_told,
            "{verb}: what does it mean, and what is to be done?"
        );
    }
    let is_sorted = entries.is_sorted_by_key(|entry| entry.split(' ').next());
    assert!(is_sorted, "the events are in the order of the alphabet");
    let mut logged: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let is_of_latchd = |path: &str| !path.contains("/lfp") && !path.contains("/uucp");
    for (verb, level) in events_of_sources(is_of_latchd) {
        logged.entry(verb).or_default().insert(level);
    }
    let sides = "left: man/latchd-log.7, right: the sources";
    assert_eq!(explained, logged, "{sides}");
}

/// What a program says of an error is what its user searches for.
#[test]
fn messages_can_be_looked_up() {
    const OF_THE_LIBRARY: &[&str] = &[
        "the lease was over before the grant was collected",
        "there is no place in the queue to wait in",
        "this connection is in the queue already",
        "the wait was cancelled",
    ];
    let guide = page("latch-guide.7");
    let symptoms = section(&guide, "SYMPTOMS");
    let sema = page("sema.1");
    let diagnostics = section(&sema, "DIAGNOSTICS");
    for (file, function, explained) in [
        ("/client/error.rs", "fn reason(", symptoms),
        ("/lockfile/error.rs", "fn fmt(", diagnostics),
    ] {
        let files = sources();
        let (_, source) = files.iter().find(|(path, _)| path == file).expect(file);
        let (_, body) = source.split_once(function).expect(function);
        let body = body.split("\n    }\n").next().expect("it ends");
        let body: String = body.split("\\\n").map(str::trim_start).collect();
        // The parts between quotes; a value in the middle of one ends what can be searched for.
        let texts = body.split('"').skip(1).step_by(2);
        let parts = texts.flat_map(|text| text.split(['{', '}']));
        let parts = parts.map(|part| part.trim_matches([' ', ',', ':']));
        let messages: Vec<&str> = parts.filter(|part| part.len() > 10).collect();
        assert!(messages.len() >= 9, "{messages:?}");
        let is_unknown =
            |text: &&&str| !OF_THE_LIBRARY.contains(text) && !explained.contains(**text);
        let unknown: Vec<&&str> = messages.iter().filter(is_unknown).collect();
        assert!(unknown.is_empty(), "{file}: no page explains {unknown:?}");
    }
}

#[test]
fn the_manual_of_lfpd_has_the_sections_that_one_looks_for() {
    let page = page("lfpd.8");
    for name in [
        "ENVIRONMENT",
        "FILES",
        "SIGNALS",
        "EXIT STATUS",
        "EXAMPLES",
        "SECURITY",
        "CAVEATS",
    ] {
        assert!(section(&page, name).lines().count() > 3, "{name} is empty");
    }
}

#[test]
fn the_manual_of_lfpd_explains_every_default_event() {
    let explained = verbs_of_manual(&page("lfpd.8"));
    let shared = ["/net/", "/log/"];
    let logged = events_of_sources(|path| {
        path.contains("/lfp")
            || path.contains("/uucp")
            || shared.iter().any(|part| path.contains(part))
    });
    let logged: BTreeSet<String> = logged.into_iter().map(|(verb, _)| verb).collect();
    assert_eq!(explained, logged, "left: man/lfpd.8, right: the sources");
}

#[test]
fn lfp_protocol_7_has_every_command_and_every_reply() {
    let page = page("lfp-protocol.7");
    for command in ["LOCK", "UNLOCK", "NOOP", "HELP", "STAT", "QUIT"] {
        assert!(page.contains(&format!(".It Li {command} ")), "{command}");
        let has_section = page
            .lines()
            .filter_map(|line| line.strip_prefix(".Ss "))
            .any(|heading| heading.split(", ").any(|name| name == command));
        assert!(has_section, "{command} has no section");
    }
    let replies = section(&page, "REPLIES");
    for code in ["200", "202", "220", "221", "450", "500", "550"] {
        assert!(
            replies
                .lines()
                .any(|line| line.starts_with(&format!("{code} "))),
            "{code}"
        );
    }
}

#[test]
fn the_protocol_page_names_every_command() {
    let page = page("latch-protocol.7");
    for command in COMMANDS {
        let row = format!(".It Li {command} Ta ");
        assert!(
            page.contains(&row),
            "{command} is not in the table of commands"
        );
        let is_named = |heading: &str| {
            let names = heading.split(':').next().unwrap_or_default();
            names.split(", ").any(|name| name == *command)
        };
        let has_section = page
            .lines()
            .filter_map(|line| line.strip_prefix(".Ss "))
            .any(is_named);
        assert!(has_section, "{command} has no section");
    }
}

#[test]
fn the_protocol_page_names_every_status_word() {
    let page = page("latch-protocol.7");
    let table = page
        .split(".Sh STATUS WORDS")
        .nth(1)
        .expect("there is a table of status words");
    let table = table.split(".Sh ").next().unwrap_or_default();
    let named: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix(".It Li "))
        .collect();
    assert_eq!(
        named, STATUS_WORDS,
        "left: man/latch-protocol.7, right: the table of this test"
    );
}

#[test]
fn mandoc_finds_nothing_wrong_with_the_manual() {
    let mandoc = needs!("mandoc");
    for path in pages() {
        let output = rendered_by(&mandoc, &["-T", "lint", "-W", "warning"], &path);
        let findings = String::from_utf8_lossy(&output.stdout);
        let findings: Vec<String> = findings.lines().map(str::to_owned).collect();
        expect_none(&findings, "mandoc finds these");
    }
}

#[test]
fn groff_renders_every_page_without_a_warning() {
    let groff = needs!("groff");
    for path in pages() {
        let output = rendered_by(&groff, &["-mandoc", "-T", "utf8", "-ww", "-z"], &path);
        let warnings = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && warnings.is_empty(), "{warnings}");
    }
}

#[test]
fn every_page_names_the_version_that_it_describes() {
    let line = concat!(".Os latchd ", env!("CARGO_PKG_VERSION"));
    let is_without = |page: &&PathBuf| !read(page).lines().any(|found| found == line);
    let pages = pages();
    let without: Vec<String> = pages
        .iter()
        .filter(is_without)
        .map(|page| shown(page))
        .collect();
    expect_none(&without, &format!("pages without {line:?}"));
}

#[test]
fn mdoc_takes_no_english_word_for_a_macro() {
    let mut taken = Vec::new();
    for path in pages() {
        let page = fs::read_to_string(&path).expect("it is UTF-8");
        for line in page.lines().filter(|line| line.starts_with('.')) {
            let words: Vec<&str> = line.split_whitespace().skip(1).collect();
            let is_taken = |word: &&str| ["An", "At", "Do", "In", "So"].contains(word);
            // Behind a literal, No is the macro that ends it.
            if words.first() == Some(&"No") || words.iter().any(is_taken) {
                taken.push(format!("{}: {line}", path.display()));
            }
        }
    }
    expect_none(&taken, "write \\&No for a word that mdoc would take away");
}

#[test]
fn groff_and_mandoc_show_the_same_table_of_commands() {
    let [groff, mandoc] = needs!("groff", "mandoc");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("man/latch-protocol.7");
    for (program, arguments) in [
        (&groff, &["-mandoc", "-T", "ascii", "-P-cbou"][..]),
        (&mandoc, &["-T", "ascii"]),
    ] {
        let output = rendered_by(program, arguments, &page);
        let text = without_overstrike(&String::from_utf8_lossy(&output.stdout));
        let rows: BTreeSet<String> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for row in [
            "command argument when it goes well",
            "l timeout [lease] ok token lease",
            "sl timeout limit [lease] ok token lease",
            "e [lease] acquired token lease or queued",
            "n token [lease] ok lease",
            "auth secret ok",
        ] {
            assert!(rows.contains(row), "{program:?}: no {row:?} in {text}");
        }
    }
}

fn rendered_by(program: &Program, arguments: &[&str], page: &Path) -> Output {
    let mut command = program.command();
    command
        .args(arguments)
        .arg(page)
        .output()
        .expect("it is installed")
}

/// Text without what shows bold and underlined letters on paper: a letter, a backspace, a letter.
fn without_overstrike(text: &str) -> String {
    let mut plain = String::new();
    for letter in text.chars() {
        match letter {
            '\u{8}' => drop(plain.pop()),
            letter => plain.push(letter),
        }
    }
    plain
}

/// The first words of what is logged at the levels info, warn and error, and of the line that the
/// log has of its own, each with its level.
fn events_in(source: &str) -> Vec<(String, String)> {
    let calls = [
        ("info!(", "info"),
        ("warn!(", "warn"),
        (".warn(format_args!(", "warn"),
        (".warn_of(format_args!(", "warn"),
        (".error(format_args!(", "error"),
        ("error!(", "error"),
    ];
    // A call may be broken into lines.
    let source: String = source.lines().map(str::trim).collect();
    let texts = calls.iter().flat_map(|(call, level)| {
        let texts = source.split(call).skip(1);
        texts.filter_map(move |rest| Some((rest.trim_start().strip_prefix('"')?, *level)))
    });
    let events = texts.filter_map(|(text, level)| {
        let verb = text.split([' ', '"']).next()?;
        Some((verb.to_owned(), level.to_owned()))
    });
    events.collect()
}

/// The verbs that the section LOG of a page explains.
fn verbs_of_manual(page: &str) -> BTreeSet<String> {
    let log = section(page, "LOG");
    let heads = log.lines().filter_map(|line| line.strip_prefix(".It Li "));
    heads
        .flat_map(|verbs| verbs.split(" , ").map(str::to_owned))
        .collect()
}

/// The events that are logged in the files below src whose path `is_of_interest`, with levels.
fn events_of_sources(is_of_interest: impl Fn(&str) -> bool) -> BTreeSet<(String, String)> {
    let files = sources().into_iter();
    files
        .filter(|(path, _)| is_of_interest(path))
        .flat_map(|(_, text)| events_in(&text))
        .collect()
}

/// All files below src, each with its path there and its text.
fn sources() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut dirs = vec![src.clone()];
    let mut texts = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("it is a directory") {
            let path = entry.expect("the directory stays").path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                let text = fs::read_to_string(&path).expect("it is text");
                let place = path.strip_prefix(&src).expect("it is below src");
                texts.push((format!("/{}", place.display()), text));
            }
        }
    }
    texts
}

/// The options of the list in the section OPTIONS.
fn options_of_manual(page: &str) -> BTreeSet<String> {
    let section = section(page, "OPTIONS");
    section
        .lines()
        .filter_map(|line| line.strip_prefix(".It "))
        .flat_map(manual_options_in)
        .collect()
}

fn entry_of(page: &str, option: &str) -> String {
    let entries = section(page, "OPTIONS");
    let entry = entries.split("\n.It ").skip(1).find(|entry| {
        manual_options_in(entry.lines().next().unwrap_or_default())
            .iter()
            .any(|it| it == option)
    });
    entry
        .unwrap_or_else(|| panic!("{option} is not in the manual"))
        .to_owned()
}

pub(crate) fn section(page: &str, name: &str) -> String {
    let from = page.split(&format!("\n.Sh {name}\n")).nth(1);
    let from = from.unwrap_or_else(|| panic!("there is no section {name}"));
    from.split("\n.Sh ").next().unwrap_or_default().to_owned()
}

/// `Fl -name` is how mdoc writes `--name`.
fn manual_options_in(head: &str) -> Vec<String> {
    let words: Vec<&str> = head.split(' ').collect();
    let options = words
        .windows(2)
        .filter(|pair| pair[0] == "Fl" && pair[1].starts_with('-'));
    options.map(|pair| format!("-{}", pair[1])).collect()
}

pub(crate) fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("man").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn pages() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("man");
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let pages: Vec<PathBuf> = entries
        .map(|entry| entry.expect("the directory stays").path())
        .collect();
    assert!(pages.len() >= 2, "the manual has two pages");
    pages
}
