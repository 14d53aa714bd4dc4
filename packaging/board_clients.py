"""The clients of a board, on another host: packaging/boards cuts the board's power under them.

They hold locks in all ways that outlive a server, and see whether one is lost or given twice.
"""

import json
import os
import shutil
import socket
import subprocess
import threading
import time

# For how long the server settles, and the leases that only clients can bring back, in seconds. At
# least half of a lease is left when the power goes, which must be longer than a boot.
SETTLE = 60
LONG_LEASE = 900

# What a job does that has the lock of all: another one would find the file locked.
TURN = """
flock --nonblock {folder}/witness sh -c 'echo $LATCH_TOKEN >>{folder}/tokens; sleep 0.2' ||
    echo $LATCH_TOKEN >>{folder}/doubles
"""


class Gone(Exception):
    """The connection has ended, or there is none."""


class Raw:
    """A connection that speaks the protocol itself."""

    def __init__(self, port, patience=20):
        try:
            self.socket = socket.create_connection(("127.0.0.1", port), patience)
            self.file = self.socket.makefile("r")
        except OSError as error:
            raise Gone from error

    def ask(self, command, key="_", argument="_"):
        try:
            self.socket.sendall(f"{command}\n{key}\n{argument}\n".encode())
            line = self.file.readline()
        except OSError as error:
            raise Gone from error
        if not line.endswith("\n"):
            raise Gone
        return line.strip()

    def acquire(self, key):
        reply = self.ask("l", key, f"{SETTLE + 20} {SETTLE}")
        return reply.split()[1] if reply.startswith("ok ") else None

    def close(self):
        self.file.close()
        self.socket.close()


class Clients:
    def __init__(self, latch, port, folder):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        self.latch, self.port, self.folder = latch, port, folder
        self.failures, self.turn_count, self.is_over = [], 0, False
        self.kept, self.dead = [], []  # keys; (key, token, when the lease ends)
        self.mutex = threading.Lock()
        self.jobs = {}
        self.threads = []
        self.last_seen = time.monotonic()

    def run(self, *arguments, **options):
        environment = {**os.environ, "LATCH_SERVER": f"127.0.0.1:{self.port}"}
        return subprocess.Popen(
            [self.latch, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options,
        )

    def start_job(self, name, *options):
        self.jobs[name] = self.run("run", name, *options, "--", "sleep", "100000")

    def start(self):
        """Once the server is up."""
        lease = ["--lease", str(SETTLE)]
        self.start_job("lock", *lease)
        self.start_job("shared", "--shared", *lease)
        self.start_job("slots", "--limit", "3", "--slots", "2", *lease)
        self.start_job("long", "--lease", str(LONG_LEASE))
        self.wait_for(self.jobs)
        self.threads = [
            threading.Thread(target=work)
            for work in [self.take_turns] * 3 + [self.keep, self.make_dead]
        ]
        for thread in self.threads:
            thread.start()

    def fail(self, what):
        with self.mutex:
            self.failures.append(what)

    def has_succeeded(self, client, what):
        """Waits for a latch, which may find no server, or not get its lock in time."""
        _, said = client.communicate()
        if client.returncode not in (0, 69, 75):
            self.fail(f"{what} ended with {client.returncode}: {said.strip()}")
        return client.returncode == 0

    def take_turns(self):
        script = TURN.format(folder=self.folder)
        while not self.is_over:
            turn = self.run(
                "run", "turn", "--lease", str(SETTLE), "--timeout", "20", "--", "sh", "-c", script
            )
            if self.has_succeeded(turn, "a turn"):
                self.turn_count += 1
            else:
                time.sleep(0.2)

    def keep(self):
        """Has the server keep locks without a connection."""
        number = 0
        while not self.is_over:
            number += 1
            key = f"kept-{number}"
            if number % 2:
                client = self.run("reserve", key, "--for", "1h", "--timeout", "20")
            else:
                options = ["--lease", str(SETTLE), "--at-least", "1h", "--timeout", "20"]
                client = self.run("run", key, *options, "--", "true")
            if self.has_succeeded(client, key):
                with self.mutex:
                    self.kept.append(key)
            time.sleep(1)

    def make_dead(self):
        """Makes tokens whose grants have ended without their clients."""
        number = 0
        while not self.is_over:
            number += 1
            key = f"dead-{number}"
            try:
                holder, other = Raw(self.port), Raw(self.port)
                holder.ask("hello", argument="adopt")
                ends = time.monotonic() + SETTLE
                token = holder.acquire(key)
                if token and number % 2:
                    is_dead = other.ask("r", key, token) == "ok"
                else:
                    # The next holder is told once the previous one is known to be dead.
                    holder.close()
                    is_dead = token and other.acquire(key)
                if is_dead:
                    with self.mutex:
                        self.dead.append((key, token, ends))
                other.close()
            except Gone:
                pass
            time.sleep(1)

    def held(self):
        """The keys that are held, and whether by a connection; of semaphores that is not said."""
        raw = Raw(self.port)
        stats = json.loads(raw.ask("stats").partition(" ")[2])
        raw.close()
        entries = stats["locks"] + stats["semaphores"]
        return {entry["key"]: entry.get("owner_conn_id", True) for entry in entries}

    def wait_for(self, names, seconds=30):
        """Until the clients of these jobs hold their locks over a connection."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                held = self.held()
                if all(held.get(name) for name in names):
                    return True
            except Gone:
                return False
            time.sleep(0.2)
        self.fail(f"after {seconds} s not all of {list(names)} have come back")
        return False

    def wait_for_server(self, seconds):
        """Whether it serves again within this time."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                return Raw(self.port).ask("ping") == "ok"
            except Gone:
                time.sleep(0.1)
        return False

    def check(self):
        """What must hold as soon as the server is there again. It may go at any time."""
        with self.mutex:
            kept, dead = list(self.kept), list(self.dead)
        try:
            raw = Raw(self.port)
            for key, token, ends in dead:
                if time.monotonic() < ends:
                    reply = raw.ask("adopt", key, f"{token} {SETTLE}")
                    if reply != "error":
                        self.fail(f"the dead token of {key} was taken: {reply}")
            raw.close()
            held = self.held()
        except Gone:
            return
        for key in kept + ["long"]:
            if key not in held:
                self.fail(f"{key} is not held any more")
        self.wait_for(self.jobs)

    def check_jobs(self, outage):
        """Whether all jobs run after an outage of so many seconds."""
        for name, job in self.jobs.items():
            if job.poll() is not None:
                why = job.stderr.read().strip()
                self.fail(f"{name} ended with {job.returncode} after {outage:.0f} s: {why}")

    def check_tokens(self):
        """Whether no two clients had the lock of all, and its fences rose."""
        read = lambda name: open(os.path.join(self.folder, name)).read().split()
        if os.path.exists(os.path.join(self.folder, "doubles")):
            self.fail(f"two clients held the lock: {read('doubles')}")
        fences = [int(token[:16], 16) for token in read("tokens")]
        if fences != sorted(set(fences)):
            self.fail("the fences of turns do not rise")

    def stop_turns(self):
        self.is_over = True
        for thread in self.threads:
            thread.join()

    def end(self):
        self.is_over = True
        for job in self.jobs.values():
            job.terminate()
            job.wait()
