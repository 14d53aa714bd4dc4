//! The JSON of `stats` for the past holders and the refused claims of keys: see latch-protocol(7),
//! STATISTICS. A state file has it, too. Pure.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::stats::{put, reopen, separate, write_optional, write_string, Seconds};
use crate::latchd::table::{ConnId, Expectation, Fate, GrantEnd, Key, KeyHistory, PastClaim};
use crate::wire::token::Fence;

/// Writes one key with its past holders.
pub fn write_history(history: &KeyHistory, out: &mut Vec<u8>) {
    out.extend(b"{\"key\":");
    write_string(history.key.as_str(), out);
    out.push(b'}');
    append_history(history, out);
}

/// Appends the past holders of a key to the object about that key, and whether work under it is
/// overdue.
pub fn append_history(history: &KeyHistory, out: &mut Vec<u8>) {
    reopen(out);
    write_claims(",\"history\":[", history, &history.past, out);
    if let Some(expected) = history.expected {
        put!(
            out,
            ",\"expected\":{{\"every_s\":{},\"success_age_s\":{},\"succeeded\":{},\"overdue\":{},\
             \"state\":\"{}\"}}",
            expected.within.as_secs(),
            Seconds(expected.age(history.at)),
            expected.has_succeeded,
            expected.is_overdue(history.at),
            history.job_state(&expected)
        );
    }
    if !history.refused.is_empty() {
        write_claims(",\"refused\":[", history, &history.refused, out);
    }
    out.push(b'}');
}

/// Reads what [`write_history`] has written, `age` before `now`; `None` if it is not that.
pub fn read_history(json: &Value, age: Duration, now: Instant) -> Option<KeyHistory> {
    let time = |json: &Value| Duration::try_from_secs_f64(json.as_f64()?).ok();
    let ago = |json: &Value| now.checked_sub(time(json)?.checked_add(age)?);
    let claim = |json: &Value| {
        let status = json["status"].as_u64().and_then(|it| it.try_into().ok());
        let fence = json["fence"].as_str().map(str::parse);
        Some(PastClaim {
            fence: fence.transpose().ok()?.map(Fence),
            tag: json["tag"].as_str().map(Into::into),
            waited: time(&json["waited_s"])?,
            held: time(&json["held_s"])?,
            ended_at: ago(&json["ended_ago_s"])?,
            fate: match json["end"].as_str()? {
                "busy" => Fate::Busy,
                "gave-up" => Fate::GaveUp,
                "kept" => Fate::Kept(status?),
                "released" => Fate::Ended(GrantEnd::Released(status)),
                "expired" => Fate::Ended(GrantEnd::Expired),
                "broken" => Fate::Ended(GrantEnd::Broken(ConnId(0))),
                _ => Fate::Ended(GrantEnd::Abandoned),
            },
            holder: json["holder"].as_str().map(Into::into),
        })
    };
    let claims = |list: &Value| {
        let latest_first = list.as_array().into_iter().flatten();
        latest_first.rev().map(claim).collect::<Option<_>>()
    };
    let expected = &json["expected"];
    Some(KeyHistory {
        key: Key::from(json["key"].as_str()?),
        at: now,
        past: claims(&json["history"])?,
        // An older server has not written any.
        refused: claims(&json["refused"])?,
        is_running: false,
        expected: ago(&expected["success_age_s"]).map(|since| Expectation {
            within: Duration::ZERO,
            since,
            has_succeeded: expected["succeeded"] == true,
        }),
    })
}

/// Writes a list of holders or of refused claims, the latest first.
fn write_claims(begin: &str, history: &KeyHistory, claims: &[PastClaim], out: &mut Vec<u8>) {
    out.extend(begin.bytes());
    for claim in claims.iter().rev() {
        separate(out);
        // A string, because JSON readers may round a number as large as a fence.
        match claim.fence {
            Some(Fence(fence)) => put!(out, "{{\"fence\":\"{fence}\",\"tag\":"),
            None => out.extend(b"{\"fence\":null,\"tag\":"),
        }
        write_optional(claim.tag.as_deref(), out);
        put!(
            out,
            ",\"ended_ago_s\":{},\"waited_s\":{},\"held_s\":{},\"end\":\"{}\",\"status\":",
            Seconds(history.age(claim)),
            Seconds(claim.waited),
            Seconds(claim.held),
            word(claim.fate)
        );
        match claim.fate.status() {
            Some(status) => put!(out, "{status}"),
            None => out.extend(b"null"),
        }
        if claim.fence.is_none() {
            out.extend(b",\"holder\":");
            write_optional(claim.holder.as_deref(), out);
        }
        out.push(b'}');
    }
    out.push(b']');
}

/// How a hold ended, or why a claim was refused.
fn word(fate: Fate) -> &'static str {
    match fate {
        Fate::Busy => "busy",
        Fate::GaveUp => "gave-up",
        Fate::Kept(_) => "kept",
        Fate::Ended(GrantEnd::Released(_)) => "released",
        Fate::Ended(GrantEnd::Expired) => "expired",
        Fate::Ended(GrantEnd::Broken(_)) => "broken",
        _ => "abandoned",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_read_as_it_was_written() {
        let now = Instant::now();
        let claim = |fence: Option<u64>, fate| PastClaim {
            fence: fence.map(Fence),
            tag: Some("job \"1\"".into()),
            waited: Duration::from_millis(1500),
            held: Duration::from_secs(fence.unwrap_or_default()),
            ended_at: now - Duration::from_secs(7),
            fate,
            holder: fence.is_none().then(|| "10.0.0.5".into()),
        };
        let history = KeyHistory {
            key: Key::from("k"),
            at: now,
            past: vec![
                claim(Some(2), Fate::Kept(3)),
                claim(Some(u64::MAX >> 30), Fate::Ended(GrantEnd::Expired)),
            ],
            refused: vec![
                claim(None, Fate::Busy),
                PastClaim {
                    tag: None,
                    holder: None,
                    ..claim(None, Fate::GaveUp)
                },
            ],
            is_running: false,
            expected: None,
        };
        let written = |history: &KeyHistory| -> Value {
            let mut json = Vec::new();
            write_history(history, &mut json);
            serde_json::from_slice(&json).expect("it is JSON")
        };
        let mut json = written(&history);
        assert_eq!(
            json["refused"][1].to_string(),
            concat!(
                r#"{"end":"busy","ended_ago_s":7.0,"fence":null,"held_s":0.0,"holder":"10.0.0.5","#,
                r#""status":null,"tag":"job \"1\"","waited_s":1.5}"#
            )
        );
        let read = |json: &Value| read_history(json, Duration::ZERO, now);
        assert_eq!(read(&json).as_ref(), Some(&history));
        // An older server has not written the refused claims.
        json.as_object_mut().expect("an object").remove("refused");
        let older = KeyHistory {
            refused: Vec::new(),
            ..history
        };
        assert_eq!(written(&older), json);
        assert_eq!(read(&json), Some(older));
        json["history"][0]["fence"] = "x".into();
        assert_eq!(read(&json), None);
    }
}
