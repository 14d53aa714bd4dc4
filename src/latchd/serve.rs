//! The sockets and threads of a running server.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use log::{debug, warn};

use crate::arbiter::{Arbiter, ClientSocket, Heartbeat};
use crate::cluster::Disposition;
use crate::net::connections::{Admission, Connections};
use crate::net::hangup::HangupWatch;
use crate::net::inherited::{self, Inherited};
use crate::net::listener::{accept_from_all, Listener};
use crate::net::stream::Stream;
use crate::net::tls::Certificate;
use crate::net::unix_path::remove_dead_sockets;
use crate::net::workers::Workers;
use crate::server::{self, cannot, no_thread, spawn};
use crate::sys::directory::parent_of;
use crate::sys::notify::{notify, watchdog_interval};
use crate::sys::operator_socket;
use crate::table::ConnId;
use crate::text::{reason, Escaped};

use super::connection;
use super::hangups::report_hangups;
use super::options::Options;
use super::rules::SessionRules;
use super::settings::Sockets;

/// The mode of the operator's socket: only the server's own user and root can connect.
const OPERATOR_MODE: u32 = 0o600;

pub(super) fn listen(
    options: &Options,
    sockets: Sockets,
    inherited: Vec<Listener>,
    certificate: Option<Arc<Certificate>>,
) -> Result<Arc<[Listener]>, String> {
    let listeners = match sockets {
        Sockets::Environment => inherited,
        Sockets::Stdin => {
            let listener = inherited::from_stdin().and_then(Inherited::listening);
            vec![listener.map_err(cannot("listen on descriptor 0"))?]
        }
        Sockets::Bound { tcp, unix } => {
            let (mode, group) = (options.unix_mode, options.unix_group);
            let tcp = tcp.map(|(host, port)| host.addresses(port)).transpose()?;
            let tcp = tcp.unwrap_or_default();
            let mut listeners = server::listen(&tcp, unix.as_deref(), mode, group)?;
            // In a cluster, a standby could not tell the active server which client is an operator.
            if options.has_operator_socket() && options.etcd.is_none() {
                let port = listeners.iter().find_map(Listener::port);
                listeners.extend(port.and_then(listen_to_operator));
            }
            listeners
        }
    };
    let with_tls = |listener: Listener| match &certificate {
        Some(certificate) => listener.with_tls(Arc::clone(certificate)),
        None => listener,
    };
    Ok(listeners.into_iter().map(with_tls).collect())
}

/// Makes the operator's socket, and removes those that dead servers have left beside it. A failure
/// is only logged, because the server works without the socket.
fn listen_to_operator(port: u16) -> Option<Listener> {
    let bound = operator_socket::path_to_bind(port).and_then(|path| {
        if let Err(error) = remove_dead_sockets(parent_of(&path), operator_socket::is_name) {
            let (path, why) = (Escaped::path(&path), reason(&error));
            debug!("old-sockets-kept beside={path} error=\"{why}\"");
        }
        Listener::bind_unix(&path, OPERATOR_MODE, None).map_err(|error| (path, error))
    });
    let warn = |(path, error): &(PathBuf, io::Error)| {
        let (path, why) = (Escaped::path(path), reason(error));
        warn!("no-operator-socket path={path} error=\"{why}\"");
    };
    bound.inspect_err(warn).ok()
}

/// Starts the threads that serve. They run until the process ends.
pub(super) fn start(
    listeners: &Arc<[Listener]>,
    arbiter: &Arc<Arbiter>,
    connections: &Arc<Connections>,
    session_rules: &Arc<SessionRules>,
) -> Result<(), String> {
    let watch = Arc::new(HangupWatch::new().map_err(cannot("watch for hang-ups"))?);
    let workers = {
        let (arbiter, watch) = (Arc::clone(arbiter), Arc::clone(&watch));
        let rules = Arc::clone(session_rules);
        Workers::new(move |admission| converse(&admission, &arbiter, &watch, &rules))
    };
    let reaper = Arc::clone(arbiter);
    // A supervisor that is not told any more restarts the server, so a failure is not logged here.
    let tell = || drop(notify("WATCHDOG=1"));
    let heartbeat = watchdog_interval().map(|interval| Heartbeat::new(interval, tell));
    spawn("reaper", move || reaper.reap(heartbeat))?;
    let (arbiter, senders) = (Arc::clone(arbiter), Arc::clone(connections));
    spawn("hangup", move || report_hangups(&watch, &arbiter, &senders))?;
    accept_from_all("addr", listeners, connections, &workers).map_err(no_thread)
}

fn converse(
    admission: &Admission,
    arbiter: &Arc<Arbiter>,
    watch: &HangupWatch,
    rules: &SessionRules,
) {
    let stream = &admission.stream;
    let first = match &rules.node {
        None => Vec::new(),
        Some(node) => match node.relay_or_serve(stream, rules.read_timeout, rules.write_timeout) {
            Disposition::ServeHere(first) => first,
            Disposition::Over => return,
            Disposition::Silent => return connection::turn_away(stream, rules),
        },
    };
    let socket: Arc<dyn ClientSocket> = Arc::<Stream>::clone(stream);
    let seat = arbiter.connect(ConnId(admission.id), Some(socket));
    connection::serve(stream, first, seat, rules, watch);
}
