//! `latch stats --format prometheus`: the counters of the servers, for monitoring.

use std::fmt::Display;

use serde_json::Value;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Address, Client, Connection, Error};

use super::{failure, print, report, shown, PROTOCOL};

/// The histogram of waits.
const WAIT: &str = "latchd_grant_wait_seconds";

/// A metric: the name of its value in the JSON of a server, the label for the members if the value
/// is an object, and its help.
type Metric = (&'static str, &'static str, &'static str);

const COUNTERS: [Metric; 10] = [
    ("grants", "", "Slots granted, at once or after a wait."),
    ("releases", "", "Slots released by their holders."),
    ("renewals", "", "Leases renewed by their holders."),
    (
        "expiries",
        "",
        "Slots that passed on because the lease ran out.",
    ),
    ("breaks", "", "Slots that an operator took away."),
    (
        "abandonments",
        "",
        "Slots that passed on because the connection closed or the client no longer waited.",
    ),
    (
        "wait_timeouts",
        "",
        "Claims that waited until their timeout without a grant.",
    ),
    ("refusals", "reason", "Requests refused, by reason."),
    ("disconnects", "", "Connections closed."),
    (
        "dropped_log_lines",
        "",
        "Log lines dropped because their receiver did not keep up.",
    ),
];

const GAUGES: [Metric; 6] = [
    (
        "connections",
        "",
        "Connections open, that of this question included.",
    ),
    ("keys", "kind", "Keys held or waited for, by kind."),
    (
        "idle_keys",
        "",
        "Keys known and neither held nor waited for.",
    ),
    ("holders", "", "Slots held."),
    ("waiters", "", "Claims waiting."),
    (
        "fences_left",
        "",
        "Fences reserved in the fence file and not used.",
    ),
];

/// A server, and its counters if it gave any.
type Answer = (String, Option<Value>);

/// Prints the counters of all servers as one text, in which each series names its server.
pub(super) fn show(client: &Client) -> CommandResult {
    let (mut answers, mut failures) = (Vec::new(), Vec::new());
    for server in client.servers() {
        let answer = ask(client, server).map_err(|failure| failures.push(failure));
        answers.push((server.to_string(), answer.ok()));
    }
    print(&exposition(&answers))?;
    Ok(report(failures))
}

fn ask(client: &Client, server: &Address) -> Result<Value, Failure> {
    let name = server.to_string();
    let json = match client.ask(server, Connection::counters) {
        Ok(json) => serde_json::from_str(&json).unwrap_or_default(),
        Err(Error::Refused(_)) => Value::Null,
        Err(error) => return Err(failure(shown(&name), &error)),
    };
    // A server that does not know the key line answers as to any other.
    if json.get("counters").is_some_and(Value::is_object) {
        return Ok(json);
    }
    let why = "the server has no counters; it is older than this latch, or of another make";
    Err(Failure::new(
        PROTOCOL,
        format_args!("{}: {why}", shown(&name)),
    ))
}

/// The text format of Prometheus: each metric, with the series of all servers below it.
fn exposition(answers: &[Answer]) -> String {
    let mut text = Exposition::default();
    let help = "Whether the server gave its counters.";
    text.begin("latchd_up", "gauge", help);
    for (server, answer) in answers {
        let labels = [("server", server.as_str())];
        text.sample("latchd_up", &labels, u8::from(answer.is_some()));
    }
    let kinds = [
        ("counter", "_total", &COUNTERS[..]),
        ("gauge", "", &GAUGES[..]),
    ];
    for (kind, suffix, metrics) in kinds {
        for (value, label, help) in metrics {
            let name = format!("latchd_{value}{suffix}");
            text.begin(&name, kind, help);
            for (server, answer) in answers {
                let pointer = format!("/{kind}s/{value}");
                if let Some(value) = answer.as_ref().and_then(|json| json.pointer(&pointer)) {
                    write_value(server, &name, label, value, &mut text);
                }
            }
        }
    }
    let help = "How long the claims that were queued waited for their grants.";
    text.begin(WAIT, "histogram", help);
    for (server, answer) in answers {
        // A histogram without all of its parts, or one that falls, is none.
        let waits = answer.as_ref().and_then(|json| json.get("grant_waits"));
        let _ = waits.and_then(|waits| write_waits(server, waits, &mut text));
    }
    text.text
}

fn write_value(server: &str, name: &str, label: &str, value: &Value, text: &mut Exposition) {
    let server = ("server", server);
    match (value, label) {
        (Value::Number(number), "") => text.sample(name, &[server], number),
        (Value::Object(members), label) if !label.is_empty() => {
            for (member, value) in members.iter().filter(|(name, _)| is_word(name)) {
                if let Value::Number(number) = value {
                    text.sample(name, &[server, (label, member)], number);
                }
            }
        }
        _ => {}
    }
}

/// Whether this is a name as servers give it.
fn is_word(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(is_part)
}

fn write_waits(server: &str, waits: &Value, text: &mut Exposition) -> Option<()> {
    let number = |of: &Value, name: &str| of.get(name).filter(|it| it.is_number()).cloned();
    let (count, sum) = (number(waits, "count")?, number(waits, "sum_s")?);
    let buckets = waits.get("buckets")?.as_array()?.iter();
    let buckets = buckets.map(|bucket| Some((number(bucket, "le_s")?, number(bucket, "count")?)));
    let buckets: Vec<(Value, Value)> = buckets.collect::<Option<_>>()?;
    let rises = buckets.is_sorted_by(|(bound, count), (next_bound, next_count)| {
        bound.as_f64() < next_bound.as_f64() && count.as_f64() <= next_count.as_f64()
    });
    let is_whole = buckets
        .last()
        .is_none_or(|last| last.1.as_f64() <= count.as_f64());
    if !rises || !is_whole {
        return None;
    }
    let server = ("server", server);
    let name = format!("{WAIT}_bucket");
    for (bound, count) in buckets {
        text.sample(&name, &[server, ("le", &bound.to_string())], count);
    }
    text.sample(&name, &[server, ("le", "+Inf")], &count);
    text.sample(&format!("{WAIT}_sum"), &[server], sum);
    text.sample(&format!("{WAIT}_count"), &[server], count);
    Some(())
}

/// The text so far.
#[derive(Default)]
struct Exposition {
    text: String,
    /// The lines about a metric that has no series yet.
    header: String,
}

impl Exposition {
    /// Begins a metric. One without series is not mentioned.
    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        self.header = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text += &std::mem::take(&mut self.header);
        let labels = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", quoted(value)));
        let labels: Vec<String> = labels.collect();
        self.text += &format!("{name}{{{}}} {value}\n", labels.join(","));
    }
}

/// A label's value as the format quotes it.
fn quoted(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(text: &str) -> Option<Value> {
        Some(serde_json::from_str(text).expect("JSON"))
    }

    #[test]
    fn each_metric_has_the_series_of_all_servers_together() {
        let one = counters(
            r#"{"counters":{"grants":18446744073709551615,"refusals":{"busy":2,"odd":"x"}},
                "grant_waits":{"count":3,"sum_s":1.500,"buckets":[{"le_s":0.001,"count":1}]},
                "gauges":{"waiters":4,"fences_left":null}}"#,
        );
        let two = counters(r#"{"counters":{"grants":7},"grant_waits":{"count":1}}"#);
        let answers = [
            ("a:1".into(), one),
            ("b\"\\\n".into(), two),
            ("c".into(), None),
        ];
        let expected = r#"# HELP latchd_up Whether the server gave its counters.
# TYPE latchd_up gauge
latchd_up{server="a:1"} 1
latchd_up{server="b\"\\\n"} 1
latchd_up{server="c"} 0
# HELP latchd_grants_total Slots granted, at once or after a wait.
# TYPE latchd_grants_total counter
latchd_grants_total{server="a:1"} 18446744073709551615
latchd_grants_total{server="b\"\\\n"} 7
# HELP latchd_refusals_total Requests refused, by reason.
# TYPE latchd_refusals_total counter
latchd_refusals_total{server="a:1",reason="busy"} 2
# HELP latchd_waiters Claims waiting.
# TYPE latchd_waiters gauge
latchd_waiters{server="a:1"} 4
# HELP latchd_grant_wait_seconds How long the claims that were queued waited for their grants.
# TYPE latchd_grant_wait_seconds histogram
latchd_grant_wait_seconds_bucket{server="a:1",le="0.001"} 1
latchd_grant_wait_seconds_bucket{server="a:1",le="+Inf"} 3
latchd_grant_wait_seconds_sum{server="a:1"} 1.5
latchd_grant_wait_seconds_count{server="a:1"} 3
"#;
        assert_eq!(exposition(&answers), expected);
    }

    /// A series that the format does not know spoils the text of all servers.
    #[test]
    fn a_strange_answer_spoils_no_text() {
        let strange = [
            r#"{"counters":{"grants":{"a":1},"refusals":7},"gauges":{"keys":3}}"#,
            r#"{"counters":{"refusals":{"":1,"\u001b[2J":1,"a b":1}}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,
                "buckets":[{"le_s":1,"count":1},{"le_s":1.0,"count":1}]}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,
                "buckets":[{"le_s":1,"count":2},{"le_s":3,"count":1}]}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,"buckets":[{"le_s":1,"count":3}]}}"#,
        ];
        for answer in strange {
            let text = exposition(&[("a:1".into(), counters(answer))]);
            let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(series, [r#"latchd_up{server="a:1"} 1"#], "{answer}");
        }
    }
}
