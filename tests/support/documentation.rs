// Included by the examples in the documentation of latchd::client: a real server, in this process.

/// The server of one example, reachable until the example ends.
struct Server(tempfile::TempDir);

impl Server {
    /// Starts one in place of that which the example names, and waits until it answers. Gives its
    /// address, too.
    fn in_place_of(_named: latchd::client::Address) -> (Server, latchd::client::Address) {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let prefixes = ["LATCH_", "LATCHD_", "DFLOCKD_", "LISTEN_", "NOTIFY_"];
            if prefixes.iter().any(|prefix| text.starts_with(prefix)) {
                std::env::remove_var(&name);
            }
        }
        // Wherever TMPDIR is, the path of the socket must be short.
        let server = Server(tempfile::tempdir_in("/tmp").expect("there is room for a directory"));
        std::env::set_var("LATCHD_PORT", "off");
        std::env::set_var("LATCHD_UNIX", server.path());
        std::thread::spawn(latchd::latchd_main);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while std::os::unix::net::UnixStream::connect(server.path()).is_err() {
            assert!(std::time::Instant::now() < deadline, "the server does not answer");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        std::env::set_var("LATCH_SERVER", server.path());
        let address = latchd::client::Address::Unix(server.path());
        (server, address)
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("socket")
    }
}
