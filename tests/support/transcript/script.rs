//! Reading a transcript.

use std::time::Duration;

use super::template::Template;
use crate::support::cluster::is_member;
use crate::support::{shown, Signal};

/// What latchd answers to `help`.
const HELP: &str = "\
ok commands, each with a line for its key and one for its arguments; see latch-protocol(7):
l WAIT [LEASE]          take a lock, or wait for it
sl WAIT LIMIT [LEASE]   take a slot of a semaphore, or wait for it
e [LEASE]               take a lock, or a place in its queue
se LIMIT [LEASE]        take a slot, or a place in its queue
w WAIT                  after e: wait for the lock
sw WAIT                 after se: wait for the slot
r TOKEN                 release a lock
sr TOKEN                release a slot
n TOKEN [LEASE]         renew the lease of a lock
sn TOKEN [LEASE]        renew the lease of a slot
adopt TOKEN [LEASE]     renew it, and move it to this connection
keep TOKEN [LEASE]      renew it, and keep it without a connection
hello                   ask what the server can do
ping                    ask whether the server answers
stats                   ask which keys are in use
tag TEXT                say who this client is
break FENCE             take a lock or a slot away from its holder
auth SECRET             give the secret of the server, before all else
quit                    end the connection; this one is a line alone";

/// The signals of a transcript.
const SIGNALS: &[(&str, Signal)] = &[
    ("TERM", Signal::TERM),
    ("INT", Signal::INT),
    ("HUP", Signal::HUP),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("PIPE", Signal::PIPE),
    ("XFSZ", Signal::XFSZ),
];

pub struct Section {
    pub claim: String,
    pub line: usize,
    pub options: Vec<Template>,
    /// What it needs beside the base system: programs of the list, or `root`.
    pub needs: Vec<String>,
    pub lines: Vec<Line>,
}

pub struct Line {
    pub number: usize,
    pub text: String,
    pub step: Step,
}

pub enum Step {
    Write {
        who: char,
        bytes: Template,
        how: How,
    },
    Read {
        who: char,
        expected: Expected,
        when: When,
    },
    Open(char, Route),
    Fin(char),
    Close(char),
    Reset(char),
    Sleep(Duration),
    Waiting {
        key: String,
        count: u64,
    },
    Connections(u64),
    Served {
        who: char,
        when: When,
    },
    Compare {
        left: String,
        relation: Relation,
        right: String,
    },
    Signal(Signal),
    Kill,
    Exit {
        status: i32,
        when: When,
    },
    /// With these options beside those of the section.
    Start(Vec<Template>),
    Log(Template),
    NoLog(Template),
    Shell {
        command: Template,
        output: Vec<Template>,
        is_awaited: bool,
    },
}

#[derive(Clone, Copy, PartialEq)]
pub enum How {
    Whole,
    ByteByByte,
    MayFail,
    Endless,
    /// As a request of HTTP, over a connection of its own.
    Http,
}

/// How a connection reaches the server.
#[derive(Clone, Copy)]
pub enum Route {
    /// Over TCP, or over its Unix socket if it has no port.
    Usual,
    /// From 127.0.0.x.
    From(u8),
    Unix,
    Http,
}

#[derive(Clone, Copy)]
pub enum Relation {
    After,
    Differs,
}

pub enum Expected {
    Line(Template),
    /// The status and the body of an answer of HTTP, and what is in its head.
    Http {
        answer: Template,
        header: String,
    },
    Raw(Vec<u8>),
    Eof,
    Gone,
    End,
    Nothing(Duration),
}

/// The times between which something has to happen.
#[derive(Default)]
pub struct When {
    pub after: Option<After>,
    pub within: Option<Duration>,
}

pub struct After {
    pub time: Duration,
    /// The token whose request the time is counted from.
    pub of: Option<String>,
}

impl Section {
    /// Whether it can be played against any server, which goes on after it.
    pub fn needs_own_daemon(&self) -> bool {
        let needs = |line: &Line| match &line.step {
            Step::Open(_, Route::Usual) => false,
            Step::Open(..) | Step::Signal(_) | Step::Kill | Step::Exit { .. } => true,
            Step::Start(_) | Step::Log(_) | Step::NoLog(_) | Step::Shell { .. } => true,
            Step::Write { how, .. } => *how == How::Http,
            // Statistics show what other sections have left behind.
            _ => line.text.contains("\"connections\":"),
        };
        !self.options.is_empty() || self.lines.iter().any(needs)
    }

    pub fn auth_token(&self) -> Option<String> {
        let is_flag = |option: &Template| option.source == "--auth-token";
        let place = self.options.iter().position(is_flag)?;
        let token = self.options.get(place + 1)?;
        token.text(&Default::default()).ok()
    }
}

impl Expected {
    pub fn described(&self) -> String {
        match self {
            Expected::Line(template) => format!("the line \"{}\"", template.source),
            Expected::Http { answer, .. } => format!("the answer {}", answer.source),
            Expected::Raw(bytes) => format!("the bytes \"{}\"", shown(bytes)),
            Expected::Eof => "the end of the stream".to_owned(),
            Expected::Gone => "the end of the stream, or a reset".to_owned(),
            Expected::End => "the end of the stream in the end".to_owned(),
            Expected::Nothing(time) => format!("nothing for {time:?}"),
        }
    }
}

/// Reads a whole file; an error begins with the number of its line.
pub fn parse(text: &str) -> Result<Vec<Section>, String> {
    let mut sections: Vec<Section> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let at = |problem: String| format!("{number}: {problem}: {line}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(claim) = line.strip_prefix("== ") {
            sections.push(Section {
                claim: claim.to_owned(),
                line: number,
                options: Vec::new(),
                needs: Vec::new(),
                lines: Vec::new(),
            });
            continue;
        }
        let section = sections
            .last_mut()
            .ok_or_else(|| at("no section has begun".to_owned()))?;
        if let Some(options) = line.strip_prefix("options:") {
            section.options = parse_options(options).map_err(at)?;
            continue;
        }
        if let Some(needs) = line.strip_prefix("needs:") {
            section.needs = needs.split_whitespace().map(str::to_owned).collect();
            continue;
        }
        if let Some(line) = line.strip_prefix('|') {
            let line = line.strip_prefix(' ').unwrap_or(line);
            let Some(Step::Shell { output, .. }) =
                section.lines.last_mut().map(|line| &mut line.step)
            else {
                return Err(at("no command has this output".to_owned()));
            };
            output.push(Template::parse(line).map_err(at)?);
            continue;
        }
        if let Some(more) = line.strip_prefix("  ") {
            let Some(Step::Shell { command, .. }) =
                section.lines.last_mut().map(|line| &mut line.step)
            else {
                return Err(at("no command goes on here".to_owned()));
            };
            *command = Template::parse(&format!("{}\n{more}", command.source)).map_err(at)?;
            continue;
        }
        for line in expanded(line) {
            let step = parse_step(&line).map_err(at)?;
            section.lines.push(Line {
                number,
                text: line,
                step,
            });
        }
    }
    Ok(sections)
}

/// The lines that this one stands for: those of the answer to `help`, or itself.
fn expanded(line: &str) -> Vec<String> {
    match line.split_once("< HELP") {
        Some((who, "")) => HELP.lines().map(|it| format!("{who}< {it}")).collect(),
        _ => vec![line.to_owned()],
    }
}

fn parse_options(options: &str) -> Result<Vec<Template>, String> {
    options.split_whitespace().map(Template::parse).collect()
}

fn parse_step(line: &str) -> Result<Step, String> {
    let mut chars = line.chars();
    if let (Some(who @ 'A'..='Z'), Some(direction @ ('<' | '>'))) = (chars.next(), chars.next()) {
        return match direction {
            '>' => parse_write(who, &line[2..]),
            _ => parse_read(who, line[2..].trim_start()),
        };
    }
    for (start, is_awaited) in [("$ ", false), ("until $ ", true)] {
        if let Some(command) = line.strip_prefix(start) {
            return Ok(Step::Shell {
                command: Template::parse(command)?,
                output: Vec::new(),
                is_awaited,
            });
        }
    }
    let (when, line) = parse_when(line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    Ok(match words[..] {
        ["sleep", time] => Step::Sleep(parse_time(time)?),
        ["waiting", key, count] => Step::Waiting {
            key: key.to_owned(),
            count: parse_number(count)?,
        },
        ["connections", count] => Step::Connections(parse_number(count)?),
        ["served", who] => Step::Served {
            who: who.chars().next().ok_or("nobody is to be served")?,
            when,
        },
        ["true", left, relation, right] => {
            let relation = match relation {
                ">" => Relation::After,
                "!=" => Relation::Differs,
                _ => return Err("no such relation".to_owned()),
            };
            Step::Compare {
                left: left.to_owned(),
                relation,
                right: right.to_owned(),
            }
        }
        ["signal", name] => {
            let signal = SIGNALS.iter().find(|signal| signal.0 == name);
            Step::Signal(signal.ok_or("no such signal")?.1)
        }
        ["kill"] => Step::Kill,
        ["exit", status] => Step::Exit {
            status: parse_number(status)? as i32,
            when,
        },
        ["start", ..] => Step::Start(parse_options(&line["start".len()..])?),
        ["log", ..] => Step::Log(Template::anywhere(line["log".len()..].trim())?),
        ["nolog", ..] => Step::NoLog(Template::anywhere(line["nolog".len()..].trim())?),
        _ => return Err("not understood".to_owned()),
    })
}

fn parse_write(who: char, rest: &str) -> Result<Step, String> {
    let (how, bytes) = match rest.as_bytes().first() {
        Some(b'>') => (How::ByteByByte, &rest[1..]),
        Some(b'?') => (How::MayFail, &rest[1..]),
        Some(b'*') => (How::Endless, &rest[1..]),
        _ => (How::Whole, rest),
    };
    let bytes = bytes
        .strip_prefix(' ')
        .ok_or("a blank is missing after the arrow")?;
    let (how, bytes) = match bytes.strip_prefix("HTTP ") {
        Some(request) => (How::Http, request),
        None => (how, bytes),
    };
    Ok(match bytes {
        "OPEN" => Step::Open(who, Route::Usual),
        "OPEN unix" => Step::Open(who, Route::Unix),
        "OPEN http" => Step::Open(who, Route::Http),
        "FIN" => Step::Fin(who),
        "CLOSE" => Step::Close(who),
        "RST" => Step::Reset(who),
        _ => match bytes.strip_prefix("OPEN from 127.0.0.") {
            Some(last) => Step::Open(who, Route::From(parse_number(last)? as u8)),
            None => Step::Write {
                who,
                bytes: Template::parse(bytes)?,
                how,
            },
        },
    })
}

fn parse_read(who: char, rest: &str) -> Result<Step, String> {
    let (when, rest) = parse_when(rest)?;
    let expected = match rest.split_once(' ') {
        _ if rest == "EOF" => Expected::Eof,
        _ if rest == "GONE" => Expected::Gone,
        _ if rest == "END" => Expected::End,
        Some(("nothing", time)) => Expected::Nothing(parse_time(time)?),
        Some(("raw", bytes)) => {
            Expected::Raw(Template::parse(bytes)?.filled_in(&Default::default())?)
        }
        Some(("HTTP", answer)) => {
            let (before, header, after) = in_brackets(answer);
            Expected::Http {
                answer: Template::parse(&format!("{before}{after}"))?,
                header: header.to_owned(),
            }
        }
        _ => Expected::Line(Template::parse(&of_member(rest))?),
    };
    Ok(Step::Read {
        who,
        expected,
        when,
    })
}

/// Cuts `POST /path [Name: value] body` at its brackets. A body has none before its first brace.
pub fn in_brackets(text: &str) -> (&str, &str, &str) {
    let head = text.split_once('{').map_or(text, |(head, _)| head);
    match head.find(" [").zip(head.find(']')) {
        Some((begin, end)) => (&text[..begin], &text[begin + 2..end], &text[end + 1..]),
        None => (text, "", ""),
    }
}

/// The line as one of several servers sends it, if the daemon is one: statistics have one more
/// member.
fn of_member(line: &str) -> String {
    const FIGURES: &str =
        r#","cluster":{"role":"active","epoch":<int>,"orphans":0,"journal_ms":<number>}}"#;
    match line.strip_suffix('}') {
        Some(rest) if is_member() && line.starts_with("ok {\"connections\"") => {
            format!("{rest}{FIGURES}")
        }
        _ => line.to_owned(),
    }
}

/// Reads `[after 900ms, within 2s]`, if it is there.
fn parse_when(text: &str) -> Result<(When, &str), String> {
    let mut when = When::default();
    let Some((times, rest)) = text
        .strip_prefix('[')
        .and_then(|text| text.split_once("] "))
    else {
        return Ok((when, text));
    };
    for time in times.split(", ") {
        match time.split_once(' ') {
            Some(("after", time)) => when.after = Some(parse_after(time)?),
            Some(("within", time)) => when.within = Some(parse_time(time)?),
            _ => return Err(format!("no time: {time}")),
        }
    }
    Ok((when, rest))
}

/// Reads `900ms` or `900ms of t1`.
fn parse_after(text: &str) -> Result<After, String> {
    let (time, of) = match text.split_once(" of ") {
        Some((time, token)) => (time, Some(token.to_owned())),
        None => (text, None),
    };
    let time = parse_time(time)?;
    Ok(After { time, of })
}

fn parse_time(text: &str) -> Result<Duration, String> {
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return parse_number(milliseconds).map(Duration::from_millis);
    }
    let seconds = text
        .strip_suffix('s')
        .ok_or_else(|| format!("a time without unit: {text}"))?;
    parse_number(seconds).map(Duration::from_secs)
}

fn parse_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("no number: {text}"))
}
