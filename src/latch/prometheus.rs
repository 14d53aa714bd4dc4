//! `latch stats --format prometheus`: the counters of the servers, for monitoring.

use serde_json::Value;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Address, Client, Connection, Error};
use crate::protocol::counters::{Amount, Figure, Figures, Histogram};
use crate::protocol::metrics::{exposition, Metric, Server, COUNTERS, GAUGES, KEY};
use crate::text::Plain;

use super::{failure, print, report, shown, PROTOCOL};

/// Prints the counters of all servers as one text, in which each series names its server.
pub(super) fn show(client: &Client) -> CommandResult {
    let (mut servers, mut failures) = (Vec::new(), Vec::new());
    for server in client.servers() {
        let answer = ask(client, server).map_err(|failure| failures.push(failure));
        servers.push(named(server.to_string(), answer.ok().as_ref()));
    }
    print(&exposition(&servers))?;
    Ok(report(failures))
}

fn ask(client: &Client, server: &Address) -> Result<Value, Failure> {
    let name = server.to_string();
    let json = match client.ask(server, Connection::counters) {
        Ok(json) => serde_json::from_str(&json).unwrap_or_default(),
        Err(Error::Refused(_)) => Value::Null,
        Err(error) => return Err(failure(shown(&name), &error)),
    };
    // A server that does not know the key line `counters` ignores it, and its answer has no
    // counters.
    if json.get("counters").is_some_and(Value::is_object) {
        return Ok(json);
    }
    let why = "the server has no counters; it is older than this latch, or of another make";
    Err(Failure::new(
        PROTOCOL,
        format_args!("{}: {why}", shown(&name)),
    ))
}

/// A server, with those figures in its JSON that the text format can show.
fn named(server: String, json: Option<&Value>) -> Server {
    let figures = json.map(|json| Figures {
        version: json["version"].as_str().map(plain),
        counters: figures(&json["counters"], &COUNTERS),
        gauges: figures(&json["gauges"], &GAUGES),
        waits: histogram(&json["grant_waits"]),
    });
    (Some(server), figures)
}

/// The value of a label, escaped for a terminal: the server may send any text.
fn plain(value: &str) -> String {
    Plain(value.as_bytes()).to_string()
}

fn figures(group: &Value, metrics: &[Metric]) -> Vec<Figure> {
    let figure = |(name, label, _): &Metric| Some((*name, amount(&group[name], label)?));
    metrics.iter().filter_map(figure).collect()
}

fn amount(value: &Value, label: &str) -> Option<Amount> {
    match (value, label) {
        (Value::Number(number), "") => Some(Amount::One(Some(number.to_string()))),
        (Value::Object(members), label) if !label.is_empty() => {
            let words = members
                .iter()
                .filter(|(name, _)| label == KEY || is_word(name));
            let numbers = words.filter_map(|(name, value)| Some((plain(name), number(value)?)));
            Some(Amount::ByName(numbers.collect()))
        }
        _ => None,
    }
}

fn number(value: &Value) -> Option<String> {
    value.is_number().then(|| value.to_string())
}

/// Whether the name consists of ASCII letters, digits and underscores.
fn is_word(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(is_part)
}

/// Reads a histogram; `None` if a part is missing, or if the bounds or the counts do not ascend.
fn histogram(waits: &Value) -> Option<Histogram> {
    let buckets = waits["buckets"].as_array()?;
    let at = |bucket: &Value| Some((bucket["le_s"].as_f64()?, bucket["count"].as_f64()?));
    let values: Vec<(f64, f64)> = buckets.iter().map(at).collect::<Option<_>>()?;
    let rises = values.is_sorted_by(|(bound, count), (next_bound, next_count)| {
        bound < next_bound && count <= next_count
    });
    let count = waits["count"].as_f64()?;
    if !rises || values.last().is_some_and(|(_, last)| *last > count) {
        return None;
    }
    let bucket = |bucket: &Value| Some((number(&bucket["le_s"])?, number(&bucket["count"])?));
    Some(Histogram {
        count: number(&waits["count"])?,
        sum: number(&waits["sum_s"])?,
        buckets: buckets.iter().map(bucket).collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(name: &str, json: &str) -> Server {
        let json: Value = serde_json::from_str(json).expect("JSON");
        named(name.into(), Some(&json))
    }

    #[test]
    fn each_metric_has_the_series_of_all_servers_together() {
        let one = server(
            "a:1",
            r#"{"version":"1.2","counters":{"grants":18446744073709551615,"refusals":{"busy":2,"odd":"x"}},
                "grant_waits":{"count":3,"sum_s":1.500,"buckets":[{"le_s":0.001,"count":1}]},
                "gauges":{"waiters":4,"fences_left":null}}"#,
        );
        let two = r#"{"counters":{"grants":7},"grant_waits":{"count":1}}"#;
        let servers = [one, server("b\"\\\n", two), named("c".into(), None)];
        let expected = r#"# HELP latchd_up Whether the server gave its counters.
# TYPE latchd_up gauge
latchd_up{server="a:1"} 1
latchd_up{server="b\"\\\n"} 1
latchd_up{server="c"} 0
# HELP latchd_build_info The version of the server, as a label.
# TYPE latchd_build_info gauge
latchd_build_info{server="a:1",version="1.2"} 1
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
        assert_eq!(exposition(&servers), expected);
    }

    #[test]
    fn a_version_or_a_key_hides_nothing_from_a_terminal() {
        let json = r#"{"version":"1\u001b[2J\u202e","counters":{},
            "gauges":{"expected_s":{"a\u001b\"/b":60}}}"#;
        let text = exposition(&[server("a:1", json)]);
        let version = r#"version="1\\x1b[2J\\xe2\\x80\\xae"} 1"#;
        assert!(text.contains(version), "{text:?}");
        let key = r#"latchd_expected_seconds{server="a:1",key="a\\x1b\"/b"} 60"#;
        assert!(text.contains(key), "{text:?}");
    }

    /// A series that the format does not know spoils the text of all servers.
    #[test]
    fn a_strange_answer_spoils_no_text() {
        let strange = [
            r#"{"counters":{"grants":{"a":1},"refusals":7},"gauges":{"keys":3}}"#,
            r#"{"counters":{"refusals":{"":1,"\u001b[2J":1,"a b":1}},"gauges":{"expected_s":3}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,
                "buckets":[{"le_s":1,"count":1},{"le_s":1.0,"count":1}]}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,
                "buckets":[{"le_s":1,"count":2},{"le_s":3,"count":1}]}}"#,
            r#"{"grant_waits":{"count":2,"sum_s":1,"buckets":[{"le_s":1,"count":3}]}}"#,
        ];
        for answer in strange {
            let text = exposition(&[server("a:1", answer)]);
            let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(series, [r#"latchd_up{server="a:1"} 1"#], "{answer}");
        }
    }
}
