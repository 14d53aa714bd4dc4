//! The output of latch, latchd and lfpd for `--help`, and of all programs for `--version`.

use super::rows::{CommandRow, Feature, Form, Program, Row, Times};

/// What is said at the end of the help if an option takes a time.
pub const TIMES: &str = "A time is in seconds, or has units: 250ms, 90s, 1m30s, 2h, 1d, 2w.";

/// The column in which the description of an option begins, and the maximum length of a line.
const COLUMN: usize = 20;
const WIDTH: usize = 80;

impl Program {
    /// The version, with the features that this build has or lacks: `latch 1.1.0 (-tls)`.
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
        let operands: Vec<&Row> = self.rows(it).filter(|row| !row.is_option()).collect();
        if !operands.is_empty() {
            text += "\nArguments:\n";
            text.extend(operands.iter().map(|row| entry(row.name, row.about)));
        }
        let (commands, examples) = match command {
            None => (self.commands, self.examples),
            Some(_) => (&[][..], &[][..]),
        };
        if !commands.is_empty() {
            text += "\nCommands:\n";
            text.extend(commands.iter().map(|it| entry(it.name, it.about)));
        }
        let groups = self.groups(it);
        for (heading, rows) in &groups {
            text += &format!("\n{heading}:\n");
            text.extend(rows.iter().map(|row| row.entry()));
        }
        if !examples.is_empty() {
            text += "\nExamples:\n";
            text.extend(examples.iter().map(|line| format!("  {line}\n")));
        }
        let more = (!commands.is_empty())
            .then(|| format!("For the options of a command: {} help COMMAND.", self.name));
        let is_time = |row: &&Row| matches!(row.form, Form::Valued("time") | Form::Switch("time"));
        let mut options = groups.iter().flat_map(|(_, rows)| rows);
        let times = options.any(is_time).then(|| TIMES.to_owned());
        let variables = Some(self.variables.to_owned()).filter(|rule| !rule.is_empty());
        let manual = Some(format!("See {}.", self.manual));
        for end in [more, times, variables, manual].into_iter().flatten() {
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
            it.rows.iter().partition(|row| row.is_option());
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

    /// The lines for the option in the help.
    fn entry(&self) -> String {
        let mut lines = entry(&self.head(), self.about);
        if let Some(Feature {
            name,
            is_built: false,
        }) = self.feature
        {
            let why = "not in this build: needs --features";
            lines += &format!("{:COLUMN$}({why} {name})\n", "");
        }
        lines
    }
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
