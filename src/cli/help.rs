//! The output of latch, latchd and lfpd for `--help` and `--version`: argh's text, changed to the
//! form that sema's help also has.

/// Options that need a feature: the beginnings of their names, the feature, and whether this build
/// has it.
const BY_FEATURE: [(&[&str], &str, bool); 2] = [
    (&["--tls"], "tls", cfg!(feature = "tls")),
    (
        &["--etcd", "--advertise"],
        "cluster",
        cfg!(feature = "cluster"),
    ),
];

/// The last line of argh's list of options, and its replacement.
const ARGH_HELP: &str = "  --help, help      display usage information";
const OUR_HELP: &str =
    "  -h, --help        print this and exit\n  -V, --version     print the version and exit";

/// What is said at the end of the help if an option takes a time.
pub const TIMES: &str = "A time is in seconds, or has units: 250ms, 90s, 1m30s, 2h, 1d, 2w.";

/// The column in which the description of an option begins, and the maximum length of a line.
const COLUMN: usize = 20;
const WIDTH: usize = 80;

/// What the help text and the version line say about a program.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub name: &'static str,
    /// The build features that change what the program can do.
    pub features: &'static [&'static str],
    /// A sentence about the environment variables that the program reads besides those of its
    /// options, or "".
    pub variables: &'static str,
    pub manual: &'static str,
}

impl Program {
    /// The version, with the features that this build has or lacks: `latch 1.1.0 (-tls)`.
    pub fn version(&self) -> String {
        let has = |feature: &&str| {
            let mut all = BY_FEATURE.iter();
            let is_built = all.any(|(_, name, is_built)| name == feature && *is_built);
            format!("{}{feature}", if is_built { '+' } else { '-' })
        };
        let features: Vec<String> = self.features.iter().map(has).collect();
        let features = if features.is_empty() {
            String::new()
        } else {
            format!(" ({})", features.join(" "))
        };
        format!("{} {}{features}\n", self.name, env!("CARGO_PKG_VERSION"))
    }

    /// Changes argh's `text`: adds the options of all programs, moves the values of options from
    /// the usage to the list, and adds the options' `variables` at the end.
    pub fn help(&self, text: &str, booleans: &[&str], variables: &[String]) -> String {
        let text = text.replace(ARGH_HELP, OUR_HELP);
        let (usage, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let (usage, values) = short_usage(usage);
        let mut lines = vec![usage];
        let mut note = None;
        for line in rest.lines() {
            let is_option = line.starts_with("  -");
            if is_option || line.is_empty() {
                lines.extend(note.take());
            }
            if is_option {
                let (row, feature) = row(line, &values, booleans);
                lines.extend(row);
                let why = |feature| format!("{:COLUMN$}{}", "", not_in_this_build(feature));
                note = feature.map(why);
            } else {
                lines.push(line.to_owned())
            }
        }
        let mut text = lines.join("\n") + "\n";
        let commands = text.contains("\nCommands:\n");
        let commands =
            commands.then(|| format!("For the options of a command: {} help COMMAND.", self.name));
        let times = text.contains("<time>").then(|| TIMES.to_owned());
        let listed = (!variables.is_empty())
            .then(|| format!("Variables of options: {}.", variables.join(", ")));
        let others = Some(self.variables).filter(|sentence| !sentence.is_empty());
        let manual = Some(format!("See {}.", self.manual));
        let ends = [commands, times, listed, others.map(str::to_owned), manual];
        for end in ends.into_iter().flatten() {
            text += &format!("\n{}\n", wrapped(&end));
        }
        text
    }
}

fn not_in_this_build(feature: &str) -> String {
    format!("(not in this build: needs --features {feature})")
}

/// Splits the usage line into a line that has only the required options, and all options with their
/// values. An option that has a short name is in argh's usage under that name only.
fn short_usage(usage: &str) -> (String, Vec<(&str, &str)>) {
    let (mut short, mut values, mut rest) = (String::new(), Vec::new(), usage);
    while let Some((before, option)) = rest.split_once(" [-") {
        short += before;
        let (option, after) = option.split_once(']').unwrap_or((option, ""));
        // ` [--]` has no value and is dropped, because no program treats `--` as argh does.
        values.extend(option.split_once(' '));
        rest = after;
    }
    short += rest;
    if !values.is_empty() {
        short += " [options]";
    }
    // A required option has no brackets around it, and stays in the usage line.
    let required = usage.match_indices(" --").filter_map(|(at, _)| {
        let (name, rest) = usage[at + 2..].split_once(' ')?;
        Some((name, rest.split(' ').next()?))
    });
    values.extend(required);
    (short, values)
}

/// The lines for an option in the list, and the feature that the option needs if this build lacks
/// it.
fn row(
    line: &str,
    values: &[(&str, &str)],
    booleans: &[&str],
) -> (Vec<String>, Option<&'static str>) {
    let (head, about) = match line.split_at_checked(COLUMN) {
        Some((head, about)) if head.ends_with(' ') => (head.trim(), about),
        _ => (line.trim(), ""),
    };
    let names: Vec<&str> = head.split(", ").collect();
    let value = values.iter().find_map(|(name, value)| {
        let named = names.iter().find(|it| it.strip_prefix('-') == Some(name))?;
        Some(match booleans.contains(named) {
            // A short option has no value after an equals sign.
            true if !named.starts_with("--") => String::new(),
            true => format!("[={value}]"),
            false => format!(" {value}"),
        })
    });
    let head = format!("  {head}{}", value.unwrap_or_default());
    let lines = match head.len() < COLUMN {
        true => vec![format!("{head:COLUMN$}{about}").trim_end().to_owned()],
        false if about.is_empty() => vec![head],
        false => vec![head, format!("{:COLUMN$}{about}", "")],
    };
    let long = names.last().copied().unwrap_or_default();
    let mut features = BY_FEATURE.iter();
    let is_of = |prefixes: &[&str]| prefixes.iter().any(|prefix| long.starts_with(prefix));
    let lacking = features.find(|(prefixes, _, is_built)| !is_built && is_of(prefixes));
    (lines, lacking.map(|(_, feature, _)| *feature))
}

/// Wraps a text into lines that fit into a terminal.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}
