//! The sockets and threads of a running server.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use log::{debug, warn};

use crate::latchd::arbiter::{Arbiter, ClientSocket, Heartbeat};
use crate::latchd::cluster::Disposition;
use crate::latchd::table::ConnId;
use crate::os::directory::parent_of;
use crate::os::notify::{notify, watchdog_interval};
use crate::os::operator_socket;
use crate::os::stream::Stream;
use crate::os::text::{reason, Escaped};
use crate::os::tls::Certificate;
use crate::shared::daemon::{self, cannot, no_thread, spawn};
use crate::shared::net::connections::Admission;
use crate::shared::net::hangup::HangupWatch;
use crate::shared::net::inherited::{self, Inherited};
use crate::shared::net::listener::{accept_from_all, Listener};
use crate::shared::net::unix_path::remove_dead_sockets;
use crate::shared::net::workers::Workers;

use super::options::Options;
use super::settings::Sockets;
use crate::latchd::context::ServerContext;
use crate::latchd::line::connection;
use crate::latchd::line::hangups::act_on_hangups;

/// The mode of the operator's socket: only the server's own user and root can connect.
const OPERATOR_MODE: u32 = 0o600;

pub fn listen(
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
            let mut listeners = daemon::listen(&tcp, unix.as_deref(), mode, group)?;
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
pub fn start(
    listeners: &Arc<[Listener]>,
    arbiter: &Arc<Arbiter>,
    context: &Arc<ServerContext>,
) -> Result<(), String> {
    let watch = Arc::new(HangupWatch::new().map_err(cannot("watch for hang-ups"))?);
    let workers = {
        let (arbiter, watch) = (Arc::clone(arbiter), Arc::clone(&watch));
        let context = Arc::clone(context);
        Workers::new(move |admission| converse(&admission, &arbiter, &watch, &context))
    };
    let reaper = Arc::clone(arbiter);
    // A supervisor that is not told any more restarts the server, so a failure is not logged here.
    let tell = || drop(notify("WATCHDOG=1"));
    let heartbeat = watchdog_interval().map(|interval| Heartbeat::new(interval, tell));
    spawn("reaper", move || reaper.reap(heartbeat))?;
    let (arbiter, senders) = (Arc::clone(arbiter), Arc::clone(&context.connections));
    spawn("hangup", move || act_on_hangups(&watch, &arbiter, &senders))?;
    accept_from_all("addr", listeners, &context.connections, &workers).map_err(no_thread)
}

fn converse(
    admission: &Admission,
    arbiter: &Arc<Arbiter>,
    watch: &HangupWatch,
    context: &ServerContext,
) {
    let stream = &admission.stream;
    let first = match &context.node {
        None => Vec::new(),
        Some(node) => {
            if !node.is_active() {
                // The active server asks for the token.
                admission.let_in();
            }
            match node.relay_or_serve(stream, context.read_timeout, context.write_timeout) {
                Disposition::ServeHere(first) => first,
                Disposition::Over => return,
                Disposition::Silent => return connection::turn_away(stream, context),
            }
        }
    };
    let socket: Arc<dyn ClientSocket> = Arc::<Stream>::clone(stream);
    let seat = arbiter.connect(ConnId(admission.id), Some(socket));
    connection::serve(admission, first, seat, context, watch);
}
