//! What latch, latchd and lfpd print for `--help` and `--version`: argh's text in the form that
//! sema has, too.

/// How the options begin that a build may lack, with their feature.
const BY_FEATURE: [(&[&str], &str, bool); 3] = [
    (&["--http"], "http", cfg!(feature = "http")),
    (&["--tls"], "tls", cfg!(feature = "tls")),
    (
        &["--etcd", "--advertise"],
        "cluster",
        cfg!(feature = "cluster"),
    ),
];

/// The last line of argh's options, and what replaces it.
const ARGH_HELP: &str = "  --help, help      display usage information";
const OUR_HELP: &str =
    "  -h, --help        print this and exit\n  -V, --version     print the version and exit";

/// What the help says at its end if an option wants a time.
const TIMES: &str = "A time is in seconds, or has units: 90s, 2m, 1m30s, 1h.";

/// The column in which the text about an option begins, and the last one.
const COLUMN: usize = 20;
const WIDTH: usize = 80;

/// A program, as its help and its version show it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub name: &'static str,
    /// The features that change what it can do.
    pub features: &'static [&'static str],
    /// The variables that it reads beside those of its options, in a sentence, or nothing.
    pub variables: &'static str,
    pub manual: &'static str,
}

impl Program {
    /// The version, and which features this build has: `latch 1.1.0 (-tls)`.
    pub fn version(&self) -> String {
        let has = |feature: &&str| {
            let mut all = BY_FEATURE.iter();
            let is_built = all.any(|(_, name, is_built)| name == feature && *is_built);
            format!("{}{feature}", if is_built { '+' } else { '-' })
        };
        let features: Vec<String> = self.features.iter().map(has).collect();
        let features = match features.is_empty() {
            true => String::new(),
            false => format!(" ({})", features.join(" ")),
        };
        format!("{} {}{features}\n", self.name, env!("CARGO_PKG_VERSION"))
    }

    /// argh's own text, with the options of all programs, each with its value in the list and not
    /// in the usage, and with `variables` of options at the end.
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
            match is_option {
                true => {
                    let (row, feature) = row(line, &values, booleans);
                    lines.extend(row);
                    let why = |feature| format!("{:COLUMN$}{}", "", not_in_this_build(feature));
                    note = feature.map(why);
                }
                false => lines.push(line.to_owned()),
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

/// The usage without its options, and each of them with its value. argh has a short name in the
/// place of the long one.
fn short_usage(usage: &str) -> (String, Vec<(&str, &str)>) {
    let (mut short, mut values, mut rest) = (String::new(), Vec::new(), usage);
    while let Some((before, option)) = rest.split_once(" [-") {
        short += before;
        let (option, after) = option.split_once(']').unwrap_or((option, ""));
        // The two dashes alone are no option, and no program takes them as argh does.
        values.extend(option.split_once(' '));
        rest = after;
    }
    short += rest;
    if !values.is_empty() {
        short += " [options]";
    }
    // A required option stands there without brackets.
    let required = usage.match_indices(" --").filter_map(|(at, _)| {
        let (name, rest) = usage[at + 2..].split_once(' ')?;
        Some((name, rest.split(' ').next()?))
    });
    values.extend(required);
    (short, values)
}

/// The lines for an option in the list, and the feature that this build lacks for it.
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
            // A short option has no attached value.
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

/// The words in lines that fit into a terminal.
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
