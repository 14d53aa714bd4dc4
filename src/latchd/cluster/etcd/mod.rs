//! A client of etcd's JSON gateway, over a persistent HTTP/1.1 connection. It sends one request at
//! a time, to one member at a time.
//!
//! In the gateway's JSON, keys and values are in base64, 64-bit numbers are strings, and fields
//! that are zero, false or empty are left out. A refusal is sent in chunks, with trailers.

mod http;

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use http::EtcdConnection;
use log::{error, info, warn};
use serde_json::Value;

use super::{read_password, ClusterSettings, Member};
use crate::os::base64;
use crate::os::stream::{Socket, Stream};
use crate::os::text::{reason, Escaped};

/// A password check may take this many times the timeout of another request. etcd checks passwords
/// slowly on purpose, and a check that times out starts from the beginning at the next attempt.
const PASSWORD_TIME: u32 = 3;

/// The codes of refusals after which the gateway asks the next member: cancelled, unknown, deadline
/// exceeded, unavailable. The refused request may still have been carried out.
const NO_ANSWER_CODES: [u64; 4] = [1, 2, 4, 14];

/// Refusal: the request is invalid, or its token is older than the latest change of users.
pub const INVALID_ARGUMENT: u64 = 3;
/// Refusal: something that the request names, such as a lease, does not exist.
pub const NOT_FOUND: u64 = 5;
/// Refusal: the user lacks the permission. The user may be the one in a client certificate.
pub const PERMISSION_DENIED: u64 = 7;
/// Refusal of a request for a token: authentication is not enabled.
const FAILED_PRECONDITION: u64 = 9;
/// Refusal: etcd has reached its space quota, or is overloaded.
pub const RESOURCE_EXHAUSTED: u64 = 8;
/// Refusal: the token has expired, or the member that issued it is gone.
pub const UNAUTHENTICATED: u64 = 16;

/// Why a request failed.
#[derive(Debug, PartialEq, Eq)]
pub enum EtcdFailure {
    /// The member gave no usable answer in time. The request may still be carried out.
    NoAnswer {
        member: String,
        reason: String,
    },
    Refused {
        code: u64,
        message: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub create_revision: u64,
    pub version: u64,
    pub lease: u64,
}

#[derive(Debug)]
pub struct TxnAnswer {
    pub revision: u64,
    /// Whether the comparisons held.
    pub succeeded: bool,
    /// The keys that the transaction's first range request found.
    pub found: Vec<KeyValue>,
}

/// The credential that a member asks for.
#[derive(Debug, PartialEq, Eq)]
enum Credential {
    Unknown,
    /// The member asks for no credential, because its authentication is off.
    NotWanted,
    Token(String),
}

/// A connection to one member of etcd. If that member fails, the next request goes to the next
/// member. The password is read again whenever etcd asks for it, and the certificates after each
/// failure, so these files can be replaced without a restart.
pub struct Gateway {
    settings: ClusterSettings,
    at: usize,
    connection: Option<EtcdConnection>,
    token: Credential,
    timeout: Duration,
}

impl Gateway {
    /// Makes a gateway that connects at its first request. `timeout` limits each request.
    pub fn new(settings: &ClusterSettings, timeout: Duration) -> Gateway {
        Gateway {
            settings: settings.clone(),
            at: 0,
            connection: None,
            token: Credential::Unknown,
            timeout,
        }
    }

    /// Carries out a transaction. Each part is the inside of a JSON list, without the brackets.
    pub fn txn(
        &mut self,
        compare: &str,
        then: &str,
        otherwise: &str,
    ) -> Result<TxnAnswer, EtcdFailure> {
        let body =
            format!(r#"{{"compare":[{compare}],"success":[{then}],"failure":[{otherwise}]}}"#);
        let answer = self.call_for_keys("/v3/kv/txn", &body)?;
        let responses = answer["responses"].as_array().into_iter().flatten();
        let mut ranges = responses.map(|response| &response["response_range"]);
        let range = ranges.find(|range| range.is_object());
        Ok(TxnAnswer {
            revision: number(&answer["header"]["revision"]),
            succeeded: answer["succeeded"] == true,
            found: range.map(key_values).unwrap_or_default(),
        })
    }

    /// Returns at most `limit` keys, from `key` up to but not including `end`.
    pub fn range(
        &mut self,
        key: &[u8],
        end: &[u8],
        limit: usize,
    ) -> Result<Vec<KeyValue>, EtcdFailure> {
        let (key, end) = (base64::encode(key), base64::encode(end));
        let body = format!(r#"{{"key":"{key}","range_end":"{end}","limit":"{limit}"}}"#);
        Ok(key_values(&self.call_for_keys("/v3/kv/range", &body)?))
    }

    /// Requests a lease of `seconds`, and returns the lease's number.
    pub fn grant_lease(&mut self, seconds: u64) -> Result<u64, EtcdFailure> {
        let answer = self.call("/v3/lease/grant", &format!(r#"{{"TTL":"{seconds}"}}"#))?;
        match number(&answer["ID"]) {
            // A key with lease 0 would never expire, because 0 means no lease.
            0 => Err(self.pass_over("a lease without a number".to_owned())),
            lease => Ok(lease),
        }
    }

    /// Keeps a lease alive; `false` if it does not exist.
    pub fn keep_alive(&mut self, lease: u64) -> Result<bool, EtcdFailure> {
        let answer = self.call("/v3/lease/keepalive", &format!(r#"{{"ID":"{lease}"}}"#))?;
        Ok(number(&answer["result"]["TTL"]) > 0)
    }

    /// Revokes a lease, which deletes its keys.
    pub fn revoke_lease(&mut self, lease: u64) -> Result<(), EtcdFailure> {
        self.call("/v3/lease/revoke", &format!(r#"{{"ID":"{lease}"}}"#))
            .map(drop)
    }

    /// Blocks until a key may have changed in `revision` or later, or until `at_most` has passed.
    /// Only reading the key then tells whether it has changed. A watch that ends too early is a
    /// failure.
    pub fn watch(
        &mut self,
        key: &[u8],
        revision: u64,
        at_most: Duration,
    ) -> Result<(), EtcdFailure> {
        let deadline = Instant::now() + at_most;
        let key = base64::encode(key);
        let body =
            format!(r#"{{"create_request":{{"key":"{key}","start_revision":"{revision}"}}}}"#);
        // The answer to a watch never ends, so the connection cannot be used again.
        let mut has_changed = false;
        let watched = self.connected().and_then(|(connection, token)| {
            connection.watch(&body, token, deadline, |line| {
                let answer: Value = serde_json::from_slice(line).unwrap_or_default();
                let result = &answer["result"];
                has_changed = !result["events"].is_null();
                has_changed || result["canceled"] == true || result.is_null()
            })
        });
        self.connection = None;
        match watched {
            Ok(()) if has_changed => Ok(()),
            _ if Instant::now() >= deadline => Ok(()),
            Ok(()) => Err(self.pass_over("the watch has ended".to_owned())),
            Err(error) => Err(self.pass_over(reason(&error))),
        }
    }

    /// Sends a request and returns the answer. If the connection fails, or the member cannot
    /// answer, the next request goes to the next member.
    pub fn call(&mut self, path: &str, body: &str) -> Result<Value, EtcdFailure> {
        self.authenticate()?;
        let sent = self.send(path, body, self.timeout);
        let Err(EtcdFailure::Refused { code, .. }) = &sent else {
            return sent;
        };
        let wants_token = match *code {
            // The token is too old, or authentication was turned on.
            UNAUTHENTICATED | INVALID_ARGUMENT => true,
            // Authentication was turned on. Over TLS with a client certificate, etcd takes the
            // certificate's common name for the user of a request without a token.
            PERMISSION_DENIED => !matches!(self.token, Credential::Token(_)),
            _ => false,
        };
        if !wants_token || self.settings.user.is_none() {
            return sent;
        }
        self.token = Credential::Unknown;
        self.authenticate()?;
        self.send(path, body, self.timeout)
    }

    /// Like [`Gateway::call`], but for requests about keys. Refuses an answer without a revision,
    /// such as the `{}` of a proxy. Such an answer is not from etcd, and would look as if there
    /// were no keys.
    fn call_for_keys(&mut self, path: &str, body: &str) -> Result<Value, EtcdFailure> {
        let answer = self.call(path, body)?;
        match number(&answer["header"]["revision"]) {
            0 => Err(self.pass_over("an answer without a revision".to_owned())),
            _ => Ok(answer),
        }
    }

    fn authenticate(&mut self) -> Result<(), EtcdFailure> {
        let (Credential::Unknown, Some((name, file))) = (&self.token, &self.settings.user) else {
            return Ok(());
        };
        let password = read_password(file).map_err(|reason| self.no_answer(reason))?;
        let body = serde_json::json!({ "name": name, "password": password }).to_string();
        let timeout = self.timeout * PASSWORD_TIME;
        self.token = match self.send("/v3/auth/authenticate", &body, timeout) {
            Ok(answer) => match answer["token"].as_str() {
                Some(token) => Credential::Token(token.to_owned()),
                None => return Err(self.pass_over("an answer without a token".to_owned())),
            },
            Err(EtcdFailure::Refused { code, .. }) if code == FAILED_PRECONDITION => {
                Credential::NotWanted
            }
            Err(failure) => return Err(failure),
        };
        Ok(())
    }

    fn send(&mut self, path: &str, body: &str, timeout: Duration) -> Result<Value, EtcdFailure> {
        let deadline = Instant::now() + timeout;
        let answered = self
            .connected()
            .and_then(|(connection, token)| connection.ask(path, body, token, deadline));
        let (status, text) = answered.map_err(|error| self.pass_over(reason(&error)))?;
        let Ok(answer) = serde_json::from_slice::<Value>(&text) else {
            return Err(self.pass_over(format!("status {status}, and not in JSON")));
        };
        if status == 200 && answer["error"].is_null() {
            return Ok(answer);
        }
        // In the answer to a stream request, the refusal is nested one level deeper.
        let refusal = match &answer["error"] {
            Value::Object(_) => &answer["error"],
            _ => &answer,
        };
        let message = refusal["message"].as_str().or(refusal["error"].as_str());
        let message = message.unwrap_or("no reason is given").to_owned();
        let code = number(&refusal["code"]).max(number(&refusal["grpc_code"]));
        if NO_ANSWER_CODES.contains(&code) {
            return Err(self.pass_over(message));
        }
        Err(EtcdFailure::Refused { code, message })
    }

    fn member(&self) -> &Member {
        &self.settings.members[self.at]
    }

    /// Returns the connection and the token for it. Connects if necessary.
    fn connected(&mut self) -> io::Result<(&mut EtcdConnection, Option<&str>)> {
        if self.connection.is_none() {
            let secure = |socket, deadline| self.secure(socket, deadline);
            let connection = EtcdConnection::open(&self.member().address, self.timeout, secure)?;
            self.connection = Some(connection);
        }
        let connection = self.connection.as_mut().expect("it was opened");
        let token = match &self.token {
            Credential::Token(token) => Some(token.as_str()),
            Credential::Unknown | Credential::NotWanted => None,
        };
        Ok((connection, token))
    }

    /// If the member speaks TLS, performs the handshake, which must end by `deadline`.
    fn secure(&self, socket: TcpStream, deadline: Instant) -> io::Result<Stream> {
        let member = self.member();
        match &self.settings.tls {
            Some(tls) if member.speaks_tls => tls.secure(socket, &member.address, deadline),
            _ => Ok(Stream::new(Socket::Tcp(socket))),
        }
    }

    fn no_answer(&self, reason: String) -> EtcdFailure {
        let member = self.member().address.clone();
        EtcdFailure::NoAnswer { member, reason }
    }

    /// Switches to the next member, and returns the failure for `reason`. If that member does not
    /// know the token, [`Gateway::call`] requests another token.
    fn pass_over(&mut self, reason: String) -> EtcdFailure {
        let failure = self.no_answer(reason);
        self.connection = None;
        if let Some(tls) = &mut self.settings.tls {
            tls.forget();
        }
        self.at = (self.at + 1) % self.settings.members.len();
        failure
    }
}

/// A comparison: the key was created in this revision. Revision 0 means that the key does not
/// exist.
pub fn is_created(key: &[u8], revision: u64) -> String {
    let key = base64::encode(key);
    format!(
        r#"{{"key":"{key}","target":"CREATE","result":"EQUAL","create_revision":"{revision}"}}"#
    )
}

/// A comparison: the key has been put this many times since it was created.
pub fn is_version(key: &[u8], version: u64) -> String {
    let key = base64::encode(key);
    format!(r#"{{"key":"{key}","target":"VERSION","result":"EQUAL","version":"{version}"}}"#)
}

/// An operation: puts a value with a lease; 0 means no lease.
pub fn put(key: &[u8], value: &[u8], lease: u64) -> String {
    let (key, value) = (base64::encode(key), base64::encode(value));
    format!(r#"{{"request_put":{{"key":"{key}","value":"{value}","lease":"{lease}"}}}}"#)
}

/// An operation: deletes a key if it exists.
pub fn delete(key: &[u8]) -> String {
    let key = base64::encode(key);
    format!(r#"{{"request_delete_range":{{"key":"{key}"}}}}"#)
}

/// An operation: reads a key.
pub fn look_up(key: &[u8]) -> String {
    let key = base64::encode(key);
    format!(r#"{{"request_range":{{"key":"{key}"}}}}"#)
}

/// Reads a 64-bit number, which is a string, or is left out if it is 0.
fn number(value: &Value) -> u64 {
    let text = value.as_str().and_then(|text| text.parse().ok());
    text.or(value.as_u64()).unwrap_or(0)
}

fn key_values(range: &Value) -> Vec<KeyValue> {
    let found = range["kvs"].as_array().into_iter().flatten();
    let bytes = |value: &Value| base64::decode(value.as_str().unwrap_or("")).unwrap_or_default();
    found
        .map(|found| KeyValue {
            key: bytes(&found["key"]),
            value: bytes(&found["value"]),
            create_revision: number(&found["create_revision"]),
            version: number(&found["version"]),
            lease: number(&found["lease"]),
        })
        .collect()
}

#[cfg(test)]
mod tests;

/// The minimum time between two reports.
const INTERVAL: Duration = Duration::from_secs(10);

/// Keeps repeated failures of etcd from flooding the log.
#[derive(Default)]
pub struct Trouble {
    reported: Option<Instant>,
    /// A refusal was reported, and etcd has accepted no batch after it.
    is_refused: bool,
}

impl Trouble {
    /// Logs a failure, unless the previous report is too recent. `waiting` is the number of
    /// sessions that wait for etcd.
    pub fn report(&mut self, failure: &EtcdFailure, waiting: usize) {
        if self.reported.is_some_and(|at| at.elapsed() < INTERVAL) {
            return;
        }
        self.reported = Some(Instant::now());
        match failure {
            EtcdFailure::NoAnswer { member, reason } => {
                let reason = Escaped(reason.as_bytes());
                warn!("etcd-unavailable member={member} error={reason} held_back={waiting}");
            }
            EtcdFailure::Refused { code, message } => {
                self.is_refused = true;
                let shown = Escaped(message.as_bytes());
                match *code {
                    PERMISSION_DENIED | UNAUTHENTICATED => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    // This is etcd's answer to a wrong user name or password.
                    INVALID_ARGUMENT if message.contains("auth") => {
                        error!("etcd-auth-refused error={shown}");
                    }
                    RESOURCE_EXHAUSTED if message.contains("space exceeded") => {
                        let hint = "compact, defragment and disarm; see latchd-cluster(7)";
                        error!(
                            "etcd-refuses code={code} error={shown} held_back={waiting} \
                             hint=\"{hint}\""
                        );
                    }
                    _ => warn!("etcd-refuses code={code} error={shown} held_back={waiting}"),
                }
            }
        }
    }

    /// Logs that etcd has accepted a batch, if a refusal was reported before.
    pub fn end_of_refusals(&mut self) {
        if std::mem::take(&mut self.is_refused) {
            info!("etcd-takes-writes");
            self.reported = None;
        }
    }
}
