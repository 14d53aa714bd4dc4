//! Clients that speak TLS, by their own means, and certificates for their servers.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, SystemTime};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, SupportedProtocolVersion,
};

use super::{needs, PATIENCE};

/// What `openssl ca` needs to know.
const CA_CONFIGURATION: &str = "
[ca]
default_ca = tests
[tests]
certificate = ca.pem
private_key = ca.key
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = server
[any]
commonName = supplied
[server]
basicConstraints = CA:FALSE
subjectAltName = DNS:localhost,IP:127.0.0.1
";

/// A CA, and a certificate of it for `localhost` and `127.0.0.1` with its key, in files.
pub struct Set {
    directory: tempfile::TempDir,
}

impl Set {
    /// Makes the certificates.
    pub fn new() -> Set {
        let directory = tempfile::tempdir().expect("there is room for a directory");
        let set = Set { directory };
        set.renew();
        set
    }

    /// Replaces all certificates by others, of another CA.
    pub fn renew(&self) {
        self.make(None, None);
    }

    /// Replaces all certificates by others; that of the server is valid until then.
    pub fn expire_at(&self, time: SystemTime) {
        self.make(None, Some(time));
    }

    /// Replaces all certificates by others; that of the server is valid from then on.
    pub fn begin_at(&self, time: SystemTime) {
        self.make(Some(time), None);
    }

    fn make(&self, not_before: Option<SystemTime>, not_after: Option<SystemTime>) {
        let new_key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj";
        let request = |subject: &str, rest: &str| {
            let words = new_key.split(' ').chain([subject]).chain(rest.split(' '));
            self.openssl(["req"].into_iter().chain(words));
        };
        std::fs::write(self.path("ca.conf"), CA_CONFIGURATION).expect("there is room");
        std::fs::write(self.path("index"), "").expect("there is room");
        request(
            "/CN=the CA of the tests",
            "-x509 -days 3650 -keyout ca.key -out ca.pem",
        );
        request("/CN=latchd", "-new -keyout key.pem -out request.pem");
        let begin = not_before.map_or("20000101000000Z".to_owned(), in_utc);
        let end = not_after.map_or("20991231235959Z".to_owned(), in_utc);
        let signing = "ca -batch -notext -config ca.conf -in request.pem -out cert.pem";
        let period = ["-startdate", &begin, "-enddate", &end];
        self.openssl(signing.split(' ').chain(period));
    }

    fn openssl<'a>(&self, words: impl Iterator<Item = &'a str>) {
        let [openssl] = needs::programs(["openssl"]).expect("each test of TLS asks for it");
        let mut openssl = openssl.command();
        openssl.args(words).current_dir(self.directory.path());
        let output = openssl.output().expect("it is installed");
        assert!(output.status.success(), "{openssl:?}: {output:?}");
    }

    pub fn ca(&self) -> PathBuf {
        self.path("ca.pem")
    }

    pub fn certificate(&self) -> PathBuf {
        self.path("cert.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.path("key.pem")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The options that make a daemon use it.
    pub fn options(&self) -> [String; 2] {
        [
            format!("--tls-cert={}", self.certificate().display()),
            format!("--tls-key={}", self.key().display()),
        ]
    }
}

/// The certificates of all daemons for which a test asks for no others.
pub fn common() -> &'static Set {
    COMMON.get_or_init(Set::new)
}

static COMMON: OnceLock<Set> = OnceLock::new();

/// A static is not dropped, and would leave its directory behind.
#[used]
#[link_section = ".fini_array"]
static AT_EXIT: extern "C" fn() = remove_common;

extern "C" fn remove_common() {
    if let Some(set) = COMMON.get() {
        let _ = std::fs::remove_dir_all(set.directory.path());
    }
}

/// As openssl takes a time.
fn in_utc(time: SystemTime) -> String {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since_epoch.expect("it is after 1970").as_secs();
    let mut date = Command::new("date");
    date.args(["-u", "-d", &format!("@{seconds}"), "+%Y%m%d%H%M%SZ"]);
    let output = date.output().expect("it is everywhere");
    String::from_utf8(output.stdout)
        .expect("digits")
        .trim()
        .to_owned()
}

/// A version of the protocol.
#[derive(Clone, Copy, Debug)]
pub enum Version {
    Tls12,
    Tls13,
}

impl Version {
    fn supported(self) -> &'static SupportedProtocolVersion {
        match self {
            Version::Tls12 => &TLS12,
            Version::Tls13 => &TLS13,
        }
    }
}

/// The client's settings for servers of this CA.
pub fn trusting(ca: &Path, version: Version) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(ca).expect("the file is there");
    roots.add(ca).expect("it is a certificate");
    let config = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(&[version.supported()])
        .expect("ring has both versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// The settings of a server with these certificates.
pub fn serving(set: &Set) -> Arc<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(set.certificate());
    let key = PrivateKeyDer::from_pem_file(set.key()).expect("the file is there");
    let config = ServerConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(&[&TLS13])
        .expect("ring has the version")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.expect("the file is there")], key);
    Arc::new(config.expect("the key is that of the certificate"))
}

/// A client's end of a connection, shared by those that read and write.
#[derive(Clone)]
pub struct TlsClient(Arc<Shared>);

struct Shared {
    socket: TcpStream,
    session: Mutex<ClientConnection>,
}

impl TlsClient {
    /// Shakes hands with a server of the common certificates.
    pub fn over(socket: TcpStream) -> io::Result<TlsClient> {
        static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
        let config = CONFIG.get_or_init(|| trusting(&common().ca(), Version::Tls13));
        TlsClient::with(socket, Arc::clone(config))
    }

    /// Shakes hands with these settings.
    pub fn with(socket: TcpStream, config: Arc<ClientConfig>) -> io::Result<TlsClient> {
        let name = ServerName::try_from("localhost").expect("it is a name");
        let session = ClientConnection::new(config, name).expect("the settings are valid");
        let client = TlsClient(Arc::new(Shared {
            socket,
            session: Mutex::new(session),
        }));
        client.set_read_timeout(PATIENCE)?;
        let mut session = client.session();
        while session.is_handshaking() {
            if let Err(error) = session.complete_io(&mut &client.0.socket) {
                match error.kind() {
                    // The next read finds the end: the server wants no client.
                    io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe => break,
                    _ => return Err(error),
                }
            }
        }
        drop(session);
        Ok(client)
    }

    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.0.socket.set_read_timeout(Some(timeout))
    }

    pub fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.0.socket.set_write_timeout(Some(timeout))
    }

    /// Announces the end of what is sent, in the stream and by a FIN.
    pub fn half_close(&self) -> io::Result<()> {
        let mut session = self.session();
        session.send_close_notify();
        let sent = session.write_tls(&mut &self.0.socket);
        self.0.socket.shutdown(Shutdown::Write).and(sent.map(drop))
    }

    fn session(&self) -> MutexGuard<'_, ClientConnection> {
        self.0.session.lock().unwrap()
    }
}

impl AsFd for TlsClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

impl Read for TlsClient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session().reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            // The mutex is free while this blocks: another thread may write.
            let arrived = self.0.socket.peek(&mut [0]);
            let mut session = self.session();
            if session.is_handshaking() {
                return Ok(0);
            }
            arrived?;
            session.read_tls(&mut &self.0.socket)?;
            session.process_new_packets().map_err(io::Error::other)?;
        }
    }
}

impl Write for TlsClient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut session = self.session();
        let len = session.writer().write(bytes)?;
        // The records of one write leave together.
        let mut records = Vec::new();
        while session.wants_write() {
            session.write_tls(&mut records)?;
        }
        (&self.0.socket).write_all(&records)?;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // nothing is kept back
    }
}

/// Ends the stream of a client that closes in good order.
impl Drop for Shared {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap();
        session.send_close_notify();
        let _ = session.write_tls(&mut &self.socket);
    }
}
