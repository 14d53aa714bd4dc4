//! What the programs take on their command lines: one row for each option and operand. The parser,
//! `--help`, the shell completions and the tests of the manual all read these rows.

/// An option or an operand.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name without dashes. It may have underscores in the place of dashes.
    pub name: &'static str,
    /// Another name of the option, with its dashes: mostly a short one.
    pub other: Option<&'static str>,
    /// How it is given.
    pub form: Form,
    /// How often it may be given.
    pub times: Times,
    /// The heading in the help above this row and the rows after it. Without one, the row belongs
    /// to the group of the row before it.
    pub group: Option<&'static str>,
    /// The text in the help.
    pub about: &'static str,
    /// The option's environment variables, without their prefix.
    pub variables: &'static [&'static str],
    /// The build feature without which the option is refused.
    pub feature: Option<Feature>,
    /// Whether the option is left out of the help, the completions and the lists of the manual:
    /// it is only there for command lines that were written for another program.
    pub is_hidden: bool,
    /// What it does here.
    pub effect: Effect,
    /// The commands of the program that take the option; empty for all.
    pub commands: &'static [&'static str],
    /// The value of the option if it is given alone, and whether the next argument is its value.
    pub alone: Option<Alone>,
}

/// A value, and whether the next argument takes its place.
pub type Alone = (&'static str, fn(&str) -> bool);

/// What an option does.
#[derive(Clone, Copy, Debug)]
pub enum Effect {
    /// What its text in the help says.
    AsSaid,
    /// Nothing, for this reason: it is only accepted.
    Ignored(&'static str),
    /// It is refused with this message.
    Refused(&'static str),
}

/// How an option or an operand is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A word of its own, without a name.
    Operand,
    /// An option that takes no value.
    Flag,
    /// An option with a value. The text says what the value is.
    Valued(&'static str),
    /// An option that takes a value only after an equals sign.
    Switch(&'static str),
}

/// How often an option or an operand may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// It must be given, once.
    Once,
    /// It may be left out.
    AtMostOnce,
    /// It may be given several times, or left out.
    Any,
}

/// A command of a program, or a program without commands.
#[derive(Clone, Copy, Debug)]
pub struct CommandRow {
    /// The word for the command; empty for the program itself.
    pub name: &'static str,
    /// The text in the help.
    pub about: &'static str,
    /// The options and operands in the order of the help.
    pub rows: &'static [Row],
    /// What may follow `--`, or "".
    pub tail: &'static str,
}

impl CommandRow {
    /// A command without options and operands of its own.
    pub const fn new(name: &'static str, about: &'static str) -> CommandRow {
        CommandRow {
            name,
            about,
            rows: &[],
            tail: "",
        }
    }
}

/// A build feature that changes what a program can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The feature's name in Cargo.toml.
    pub name: &'static str,
    /// Whether this build has it.
    pub is_built: bool,
}

/// TLS, for servers and clients.
pub const TLS: Feature = Feature {
    name: "tls",
    is_built: cfg!(feature = "tls"),
};

/// Several servers as one, by way of etcd.
pub const CLUSTER: Feature = Feature {
    name: "cluster",
    is_built: cfg!(feature = "cluster"),
};

/// The group of the options that name and reach a server, which all commands of a client take. The
/// help of a command only names them.
pub const SERVER: &str = "Server";

/// The group of the options of every program.
pub const HELP: &str = "Help";

/// The mark of a row that is hidden.
pub const HIDDEN: bool = true;

/// How many dashes a long option begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dashes {
    /// Always two.
    Two,
    /// One or two, as in programs written in Go.
    OneOrTwo,
}

/// A rule between options: each of the first is bound to the second. An option that is switched
/// off, by `=no` or by a 0 that means none, counts as not given; but it counts with `=` at the end
/// of its name here.
pub type Rule = (&'static [&'static str], Bond, &'static [&'static str]);

/// How options are bound to others.
#[derive(Clone, Copy, Debug)]
pub enum Bond {
    /// One of the others is given, or the text says what is wrong.
    Needs(&'static str),
    /// Both are given, or neither.
    Both,
    Excludes,
    /// What its row refuses, or what this build lacks, is not given: of all options.
    Usable,
}

/// A program as its command line and its help have it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The name of its file.
    pub name: &'static str,
    /// What the program takes itself. A command takes the options of these rows, too.
    pub own: CommandRow,
    /// Its commands, in the order of the help.
    pub commands: &'static [CommandRow],
    /// How its long options begin.
    pub dashes: Dashes,
    /// The prefixes of the options' variables, without the underscore. The first prefix with a
    /// value for an option wins, and the command line wins over all variables.
    pub prefixes: &'static [&'static str],
    /// Pairs of options that exclude each other: if one is set on the command line or by a variable
    /// with an earlier prefix, no variable sets the other.
    pub rivals: &'static [[&'static str; 2]],
    /// What else holds between its options. The first rule that is broken makes the message.
    pub rules: &'static [Rule],
    /// The features that `--version` shows.
    pub features: &'static [Feature],
    /// What the help says about environment variables, or "".
    pub variables: &'static str,
    /// Command lines to begin with, each as its own line in the help.
    pub examples: &'static [&'static str],
    /// Its page of the manual.
    pub manual: &'static str,
}

/// A row on which others are based.
pub const FLAG: Row = Row {
    name: "",
    other: None,
    form: Form::Flag,
    times: Times::AtMostOnce,
    group: None,
    about: "",
    variables: &[],
    feature: None,
    is_hidden: false,
    effect: Effect::AsSaid,
    commands: &[],
    alone: None,
};

/// The options of every program, which are read before all others.
pub const OF_ALL: &[Row] = &[
    Row {
        name: "help",
        other: Some("-h"),
        group: Some(HELP),
        about: "print this and exit",
        ..FLAG
    },
    Row {
        name: "version",
        other: Some("-V"),
        about: "print the version and exit",
        ..FLAG
    },
];

impl Row {
    /// The same option, with another name.
    pub const fn or(self, other: &'static str) -> Row {
        let other = Some(other);
        Row { other, ..self }
    }

    /// The same option, but only for these commands.
    pub const fn only_of(self, commands: &'static [&'static str]) -> Row {
        Row { commands, ..self }
    }

    /// The option's name with its dashes.
    pub fn long(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    /// All names of the option, the long one last.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let other = self.other.map(str::to_owned);
        other.into_iter().chain([self.long()])
    }

    /// Whether this is no operand.
    pub fn is_option(&self) -> bool {
        self.form != Form::Operand
    }

    /// Whether this is the option with this name, which has its dashes.
    pub fn is_named(&self, name: &str) -> bool {
        self.is_option() && self.names().any(|known| known == name)
    }

    /// Why the option cannot be used, if its row or this build refuses it.
    pub fn refusal(&self) -> Option<String> {
        match (self.effect, self.feature) {
            (Effect::Refused(why), _) => Some(why.to_owned()),
            (_, Some(it)) if !it.is_built => {
                Some(format!("needs a build with --features {}", it.name))
            }
            _ => None,
        }
    }

    /// Whether this command takes the option.
    pub fn is_of(&self, command: &str) -> bool {
        self.commands.is_empty() || self.commands.contains(&command)
    }
}

impl Program {
    /// A program without commands, variables and features.
    pub const fn plain(name: &'static str, own: CommandRow, manual: &'static str) -> Program {
        Program {
            name,
            own,
            commands: &[],
            dashes: Dashes::Two,
            prefixes: &[],
            rivals: &[],
            rules: &[],
            features: &[],
            variables: "",
            examples: &[],
            manual,
        }
    }

    /// What a command takes, or the program itself, without the hidden options.
    pub fn rows(&self, command: &CommandRow) -> impl Iterator<Item = &'static Row> {
        self.all_rows(command).filter(|row| !row.is_hidden)
    }

    /// What a command takes, or the program itself: first the rows of its own.
    pub fn all_rows(&self, command: &CommandRow) -> impl Iterator<Item = &'static Row> {
        let name = command.name;
        let is_program = name == self.own.name;
        let of_program = if is_program { &[] } else { self.own.rows };
        let shared = of_program.iter().filter(move |row| row.is_of(name));
        command.rows.iter().chain(shared).chain(OF_ALL)
    }

    /// The options of a command, or of the program itself, in the groups of the help. The rows
    /// before the first heading stand under "Options".
    pub fn groups(&self, command: &CommandRow) -> Vec<(&'static str, Vec<&'static Row>)> {
        let mut groups: Vec<(&str, Vec<&Row>)> = Vec::new();
        for row in self.rows(command).filter(|row| row.is_option()) {
            match groups.last_mut() {
                Some((_, rows)) if row.group.is_none() => rows.push(row),
                _ => groups.push((row.group.unwrap_or("Options"), vec![row])),
            }
        }
        groups
    }

    /// The command with this name.
    pub fn command(&self, name: &str) -> Option<&'static CommandRow> {
        self.commands.iter().find(|command| command.name == name)
    }
}
