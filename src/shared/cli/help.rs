//! The output of all programs for `--help` and `--version`.

use super::rows::{CommandRow, Feature, Form, Program, Row, Times, HELP, SERVER};

/// What is said at the end of the help if an option takes a time.
const TIMES: &str = "A time is in seconds, or has units: 250ms, 90s, 1m30s, 2h, 1d, 2w.";

/// The column in which the description of an option begins, and the maximum length of a line.
const COLUMN: usize = 20;
const WIDTH: usize = 80;

impl Program {
    /// The version, with the features that this build has or lacks: `latch 2.0.0 (-tls)`.
    pub fn version(&self) -> String {
        let has = |feature: &Feature| {
            let sign = if feature.is_built { '+' } else { '-' };
            format!("{sign}{}", feature.name)
        };
        let features: Vec<String> = self.features.iter().map(has).collect();
        let in_brackets = if features.is_empty() {
            String::new()
        } else {
            format!(" ({})", features.join(" "))
        };
        format!("{} {}{in_brackets}\n", self.name, env!("CARGO_PKG_VERSION"))
    }

    /// The help of a command, or of the program itself.
    pub fn help(&self, command: Option<&CommandRow>) -> String {
        let it = command.unwrap_or(&self.own);
        let about = wrapped(it.about, WIDTH, "\n");
        let mut text = format!("{}\n\n{about}\n", self.usage(command));
        let (commands, examples) = match command {
            None => (self.commands, self.examples),
            Some(_) => (&[][..], &[][..]),
        };
        let operands: Vec<&Row> = self.rows(it).filter(|row| !row.is_option()).collect();
        if !operands.is_empty() && commands.is_empty() {
            text += "\nArguments:\n";
            text.extend(operands.iter().map(|row| entry(row.name, row.about)));
        }
        if !commands.is_empty() {
            text += "\nCommands:\n";
            text.extend(commands.iter().map(|it| entry(it.name, it.about)));
        }
        // A program with commands shows what they have in common.
        let is_shown = |name: &str| commands.is_empty() || [SERVER, HELP].contains(&name);
        let groups = self.groups(commands.first().unwrap_or(it));
        let groups: Vec<_> = groups
            .into_iter()
            .filter(|(name, _)| is_shown(name))
            .collect();
        let is_built = |row: &&Row| row.feature.is_none_or(|feature| feature.is_built);
        let all = || groups.iter().flat_map(|(_, rows)| rows.iter().copied());
        for (heading, rows) in &groups {
            let rows: Vec<&Row> = rows.iter().copied().filter(is_built).collect();
            if rows.is_empty() {
                continue;
            }
            text += &format!("\n{heading}:\n");
            if command.is_some() && *heading == SERVER {
                let names = format!("{}: see {} help", names_of(rows), self.name);
                text += &format!("  {}\n", wrapped(&names, WIDTH - 2, "\n  "));
            } else {
                text.extend(rows.iter().map(|row| entry(&row.head(), row.about)));
            }
        }
        if !examples.is_empty() {
            text += "\nExamples:\n";
            text.extend(examples.iter().map(|line| format!("  {line}\n")));
        }
        let more = (!commands.is_empty())
            .then(|| format!("For the options of a command: {} help COMMAND.", self.name));
        let is_time = |row: &&Row| matches!(row.form, Form::Valued("time") | Form::Switch("time"));
        let times = all().any(|row| is_time(&row)).then(|| TIMES.to_owned());
        let lacking: Vec<&Row> = all().filter(|row| !is_built(row)).collect();
        let other_builds = (!lacking.is_empty()).then(|| {
            let features = self.features.iter().filter(|feature| !feature.is_built);
            let features: Vec<&str> = features.map(|feature| feature.name).collect();
            let (features, names) = (features.join(","), names_of(lacking));
            format!("A build with --features {features} also has {names}.")
        });
        let variables = Some(self.variables.to_owned()).filter(|rule| !rule.is_empty());
        let manual = Some(format!("See {}.", self.manual));
        for end in [more, times, other_builds, variables, manual]
            .into_iter()
            .flatten()
        {
            text += &format!("\n{}\n", wrapped(&end, WIDTH, "\n"));
        }
        text
    }

    fn usage(&self, command: Option<&CommandRow>) -> String {
        let mut usage = format!("Usage: {}", self.name);
        if command.is_none() && !self.commands.is_empty() {
            return usage + " <command> [<args>]";
        }
        let it = command.unwrap_or(&self.own);
        if command.is_some() {
            usage += &format!(" {}", it.name);
        }
        let is_required = |row: &&&Row| row.times == Times::Once;
        let (options, operands): (Vec<&Row>, Vec<&Row>) =
            self.rows(it).partition(|row| row.is_option());
        for operand in &operands {
            usage += &match operand.times {
                Times::Once => format!(" <{}>", operand.name),
                _ => format!(" [<{}>]", operand.name),
            };
        }
        for option in options.iter().filter(is_required) {
            usage += &format!(" {}", option.head());
        }
        if !options.iter().all(|row| is_required(&row)) {
            usage += " [options]";
        }
        if !it.tail.is_empty() {
            usage += &format!(" -- {}", it.tail);
        }
        usage
    }
}

impl Row {
    /// The option's names and its value.
    fn head(&self) -> String {
        let names: Vec<String> = self.names().collect();
        let names = names.join(", ");
        match self.form {
            Form::Valued(value) if self.times == Times::Any => format!("{names} <{value}...>"),
            Form::Valued(value) => format!("{names} <{value}>"),
            // A short option has no value after an equals sign.
            Form::Switch(value) if self.other.is_none() => format!("{names}[=<{value}>]"),
            _ => names,
        }
    }
}

fn names_of(rows: Vec<&Row>) -> String {
    let names: Vec<String> = rows.iter().map(|row| row.long()).collect();
    names.join(", ")
}

/// A name and what it means, which has a column of its own.
fn entry(head: &str, about: &str) -> String {
    let line_end = format!("\n{:COLUMN$}", "");
    let head = format!("  {head}");
    let about = wrapped(about, WIDTH - COLUMN, &line_end);
    if head.len() < COLUMN {
        format!("{head:COLUMN$}{about}\n")
    } else {
        format!("{head}{line_end}{about}\n")
    }
}

/// Wraps a text into lines of at most `width` columns.
fn wrapped(text: &str, width: usize, line_end: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join(line_end)
}
