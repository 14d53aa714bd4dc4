//! Which module may use which: the picture in ARCHITECTURE.md, as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};

/// Each room of the source, with the rooms that it may use beside itself. A room has all that is
/// below its path and is not a room of its own. Whatever is not listed is forbidden.
const MAY_USE: &[(&str, &[&str])] = &[
    // programs
    (
        "latchd",
        &[
            "latchd",
            "wire",
            "os",
            "shared/cli",
            "shared/daemon",
            "shared/log",
            "shared/net",
        ],
    ),
    (
        "latchd/cluster",
        &[
            "latchd/arbiter",
            "latchd/fence",
            "latchd/record",
            "latchd/table",
            "wire",
            "os",
            "shared/log",
            "shared/net",
        ],
    ),
    (
        "latchd/arbiter",
        &[
            "latchd/fence",
            "latchd/table",
            "wire/terms",
            "wire/token",
            "os",
        ],
    ),
    ("latchd/fence", &["wire/token", "os", "shared/log"]),
    ("latchd/record", &["latchd/table", "wire"]),
    ("latchd/table", &["wire/terms", "wire/token"]),
    (
        "lfpd",
        &[
            "os",
            "shared/cli",
            "shared/daemon",
            "shared/log",
            "shared/net",
        ],
    ),
    (
        "latch",
        &["client", "wire", "os", "shared/cli", "shared/supervise"],
    ),
    (
        "sema",
        &["lockfile", "os", "shared/cli", "shared/supervise"],
    ),
    (
        "tests",
        &["latchd", "lfpd", "lockfile", "wire", "os", "shared/net"],
    ),
    // what programs share
    ("shared", &[]),
    (
        "shared/daemon",
        &["os", "shared/cli", "shared/log", "shared/net"],
    ),
    ("shared/cli", &["os", "shared/supervise"]),
    ("shared/supervise", &["os"]),
    ("shared/net", &["os", "shared/log"]),
    ("shared/log", &["os"]),
    // published
    ("client", &["wire", "os"]),
    ("lockfile", &["os"]),
    // words and ground
    ("wire", &["wire", "os"]),
    ("wire/terms", &[]),
    ("wire/token", &[]),
    ("os", &[]),
];

/// What the pure modules must not touch: clocks, threads, sockets, files, randomness, logs.
const PURE: &[&str] = &[
    "src/os/base64.rs",
    "src/latchd/cluster/record.rs",
    "src/latchd/table",
    "src/wire/terms.rs",
    "src/wire/token.rs",
    "src/latchd/fence/format.rs",
    "src/latchd/fence/range.rs",
    "src/wire",
    "src/latchd/record.rs",
    "src/latchd/statistics/counters.rs",
    "src/latchd/statistics/histories.rs",
    "src/latchd/statistics/queues.rs",
    "src/latchd/statistics/stats.rs",
    "src/latchd/state_file/format.rs",
    "src/latchd/state_file/start.rs",
    "src/latchd/http/body.rs",
    "src/latchd/http/openapi.rs",
    "src/latchd/http/request.rs",
    "src/latchd/http/routes.rs",
    "src/latchd/auth/rights.rs",
    "src/lfpd/command.rs",
    "src/lfpd/reply.rs",
    "src/lfpd/uucp/names.rs",
    "src/lockfile/record.rs",
    "src/lockfile/staleness.rs",
    "src/lockfile/takeover.rs",
    "src/os/text/mod.rs",
];
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "std::thread",
    "std::net",
    "std::fs",
    "std::process",
    "Mutex",
    "Condvar",
    "getrandom",
    "log::",
    "rustix",
    "crossbeam",
    "crate::latchd::arbiter",
    "crate::latchd::fence::source",
    "crate::os::stream",
    "crate::shared::net",
];

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn sources(under: &Path) -> Vec<PathBuf> {
    if under.is_file() {
        return vec![under.to_owned()];
    }
    let entries =
        fs::read_dir(under).unwrap_or_else(|error| panic!("{}: {error}", under.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a directory entry").path())
        .flat_map(|path| sources(&path))
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// The code of a file: without its comments, and without its tests where `with_tests` is false.
fn code(file: &Path, with_tests: bool) -> String {
    let text = fs::read_to_string(file).expect("a source file");
    let code = if with_tests {
        &text
    } else {
        text.split("#[cfg(test)]\nmod tests {")
            .next()
            .expect("a first part")
    };
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The path of a module, from the crate's root.
type Module = Vec<String>;

/// The module that a file below `src/` is; `None` for the roots of the crates and for stand-ins.
fn module_of(file: &Path) -> Option<Module> {
    let path = file.strip_prefix(root().join("src")).expect("below src");
    let path = path.with_extension("");
    let parts = path.iter().map(|part| part.to_string_lossy().into_owned());
    let mut module: Module = parts.collect();
    let is_left_out = |part: &String| ["bin", "lib", "absent"].contains(&part.as_str());
    if module.last().is_some_and(|name| name == "mod") {
        module.pop();
    }
    (!module.iter().any(is_left_out)).then_some(module)
}

/// Each file below `src/` that is a module, without tests and stand-ins.
fn modules() -> BTreeMap<Module, PathBuf> {
    let files = sources(&root().join("src")).into_iter();
    let named = files.filter_map(|file| Some((module_of(&file)?, file)));
    let is_test = |module: &Module| module.iter().any(|part| part == "tests");
    named.filter(|(module, _)| !is_test(module)).collect()
}

/// The words of a piece of code, `::`, and its other characters.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut found, mut rest) = (Vec::new(), code.trim_start());
    while let Some(first) = rest.chars().next() {
        let len = match first {
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        found.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    found
}

/// Adds the paths of a tree, such as `a::{b, c::d}`, which follows `path`.
fn add_paths<'a>(
    tokens: &mut Peekable<impl Iterator<Item = &'a str>>,
    mut path: Module,
    found: &mut Vec<Module>,
) {
    while let Some(token) = tokens.peek().copied() {
        if token == "{" {
            while matches!(tokens.next(), Some("{" | ",")) {
                add_paths(tokens, path.clone(), found);
            }
            return;
        }
        if !token.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            break;
        }
        path.push(token.to_owned());
        tokens.next();
        if tokens.next_if_eq(&"::").is_none() {
            break;
        }
    }
    found.push(path);
}

/// What a piece of code in `module` names after `crate::` and `super::`.
fn named_paths(code: &str, module: &[String]) -> Vec<Module> {
    let (mut found, mut tokens) = (Vec::new(), tokens(code).into_iter().peekable());
    while let Some(token) = tokens.next() {
        let from = match token {
            "crate" => &[],
            "super" => &module[..module.len() - 1],
            _ => continue,
        };
        if tokens.next_if_eq(&"::").is_some() {
            add_paths(&mut tokens, from.to_vec(), &mut found);
        }
    }
    found
}

/// The modules that can be reached from one by following what each uses.
fn reached<'a>(
    from: &'a Module,
    uses: &'a BTreeMap<Module, BTreeSet<Module>>,
) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        next.extend(uses[module].iter().filter(|used| seen.insert(*used)));
    }
    seen
}

/// In a circle of files a reader cannot begin anywhere. A module and the modules inside it may use
/// each other.
#[test]
fn no_files_use_each_other_in_a_circle() {
    let modules = modules();
    let file_of = |mut path: Module| {
        while !path.is_empty() && !modules.contains_key(&path) {
            path.pop();
        }
        path
    };
    let uses: BTreeMap<Module, BTreeSet<Module>> = modules
        .iter()
        .map(|(module, file)| {
            let named = named_paths(&code(file, false), module).into_iter();
            let named = named.map(file_of).filter(|used| !used.is_empty());
            let is_beside = |used: &Module| !used.starts_with(module) && !module.starts_with(used);
            (module.clone(), named.filter(is_beside).collect())
        })
        .collect();
    let reached: BTreeMap<_, _> = modules.keys().map(|it| (it, reached(it, &uses))).collect();
    let circles: BTreeSet<Vec<String>> = modules
        .keys()
        .filter(|module| reached[module].contains(module))
        .map(|module| {
            let beside = reached[module]
                .iter()
                .filter(|it| reached[*it].contains(module));
            beside.map(|it| it.join("::")).collect()
        })
        .collect();
    assert!(circles.is_empty(), "{circles:#?}");
}

#[test]
fn the_check_sees_what_a_file_uses() {
    let code = "use crate::a::{b, c::{self, D}, e};\nuse super::f::G;\nlet x = crate::h();";
    let module = ["m", "n"].map(str::to_owned);
    let named: Vec<String> = named_paths(code, &module)
        .iter()
        .map(|it| it.join("::"))
        .collect();
    assert_eq!(
        named,
        ["a::b", "a::c::self", "a::c::D", "a::e", "m::f::G", "h"]
    );
}

/// The room of a path such as `latchd::table::Key`.
fn room(path: &[String]) -> Option<&'static str> {
    let is_in = |room: &&str| path.starts_with(&module(room));
    let rooms = MAY_USE.iter().map(|(room, _)| *room).filter(is_in);
    rooms.max_by_key(|room| room.len())
}

fn module(room: &str) -> Module {
    room.split('/').map(str::to_owned).collect()
}

/// What a file in `module` names in rooms that it may not use.
fn forbidden(code: &str, module: &[String]) -> Vec<Module> {
    let own = room(module).expect("each file is in a room");
    let (_, allowed) = MAY_USE
        .iter()
        .find(|(room, _)| *room == own)
        .expect("listed");
    let may_use = |used: &Module| {
        room(used) == Some(own) || allowed.iter().any(|it| used.starts_with(&self::module(it)))
    };
    let named = named_paths(code, module).into_iter();
    named
        .filter(|used| room(used).is_some() && !may_use(used))
        .collect()
}

#[test]
fn every_room_uses_only_what_lies_below_it() {
    for file in sources(&root().join("src")) {
        let Some(module) = module_of(&file) else {
            continue;
        };
        assert!(room(&module).is_some(), "{}: in no room", file.display());
        // What is above a file is the file itself for the tests at its end.
        let code = code(&file, true);
        let (own, tests) = code.split_once("mod tests {").unwrap_or((&code, ""));
        let in_tests = [&module[..], &["tests".to_owned()]].concat();
        let forbidden = [forbidden(own, &module), forbidden(tests, &in_tests)].concat();
        assert!(forbidden.is_empty(), "{}: {forbidden:?}", file.display());
    }
}

#[test]
fn the_pure_modules_touch_nothing_outside() {
    for place in PURE {
        for file in sources(&root().join(place)) {
            if file.starts_with(root().join("src/latchd/table/tests")) {
                continue;
            }
            let code = code(&file, false);
            for word in IMPURE {
                assert!(
                    !code.contains(word),
                    "{}: {word} in a pure module",
                    file.display()
                );
            }
        }
    }
}

/// Whether a file says at its top, as a word of its own, that it is pure.
fn claims_purity(text: &str) -> bool {
    let header = text.lines().take_while(|line| line.starts_with("//!"));
    header
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric()))
        .any(|word| word == "Pure")
}

#[test]
fn the_pure_modules_are_those_that_say_so() {
    let listed: Vec<PathBuf> = PURE.iter().map(|place| root().join(place)).collect();
    for place in &listed {
        let top = if place.is_dir() {
            place.join("mod.rs")
        } else {
            place.clone()
        };
        let text = fs::read_to_string(&top).expect("a source file");
        assert!(claims_purity(&text), "{}: not Pure.", top.display());
    }
    for file in sources(&root().join("src")) {
        let text = fs::read_to_string(&file).expect("a source file");
        assert!(
            !claims_purity(&text) || listed.iter().any(|place| file.starts_with(place)),
            "{}: not in PURE",
            file.display()
        );
    }
}

#[test]
fn the_check_sees_a_claim_of_purity() {
    assert!(claims_purity("//! A.\n//! B. Pure: no clock.\n"));
    assert!(!claims_purity("//! A. Impure.\n\n//! Pure.\n"));
}

#[test]
fn nobody_climbs_to_another_module_by_relative_steps() {
    for file in sources(&root().join("src")) {
        assert!(
            !code(&file, true).contains("super::super"),
            "{}",
            file.display()
        );
    }
}

#[test]
fn no_code_of_ours_is_unsafe() {
    for file in [
        "src/lib.rs",
        "src/bin/latchd.rs",
        "src/bin/lfpd.rs",
        "src/bin/latch.rs",
        "src/bin/sema.rs",
    ] {
        let text = fs::read_to_string(root().join(file)).expect("a source file");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{file}");
    }
}

#[test]
fn the_check_sees_a_forbidden_use() {
    let in_table = ["latchd", "table", "queue"].map(str::to_owned);
    let code =
        "use crate::wire::token::Token;\nuse super::Key;\nlet x = crate::os::random::fill();";
    let found: Vec<String> = forbidden(code, &in_table)
        .iter()
        .map(|it| it.join("::"))
        .collect();
    assert_eq!(found, ["os::random::fill"]);
}

/// Names in backticks with a slash in them are paths below `src/` or the top.
#[test]
fn the_files_that_the_architecture_names_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("it is there");
    let named = text.split('`').skip(1).step_by(2);
    let is_path = |word: &&str| word.contains('/') && !word.contains([' ', '\n', '<', '*', '{']);
    for name in named.filter(is_path) {
        let below = |top: &str| root().join(top).join(name);
        let is_there = [below(""), below("src"), below("src").with_extension("rs")];
        assert!(is_there.iter().any(|path| path.exists()), "{name}");
    }
}
