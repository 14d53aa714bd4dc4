"""Has programs for serial lines meet lfpd over one device, and prints what each of them found.

    serial_programs.py LFPD

To be run by serial_host.sh. Ends everything that it has started.
"""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time

DEVICE = "/dev/ttyLFP0"
LOCK_FILE = "/var/lock/LCK..ttyLFP0"
MGETTY_LOG = "/var/log/mgetty/mg_ttyLFP0.log"
PATIENCE = 10.0


class Client:
    """A connection to lfpd."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.lines = self.socket.makefile("rb")
        self.lines.readline()

    def ask(self, line):
        self.socket.sendall(line.encode() + b"\n")
        return self.lines.readline()[:3].decode()


class Program:
    """A program on a terminal of its own."""

    def __init__(self, arguments):
        self.output = b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execvp(arguments[0], arguments)

    def read(self, seconds):
        if select.select([self.terminal], [], [], seconds)[0]:
            try:
                self.output += os.read(self.terminal, 4096)
            except OSError:  # it has closed its side
                time.sleep(seconds)

    def has_ended(self):
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def type(self, text):
        try:
            os.write(self.terminal, text)
        except OSError:
            pass

    def kill(self, number):
        if not self.has_ended():
            os.kill(self.pid, number)

    def end(self):
        """Makes sure that it is gone."""
        self.kill(signal.SIGKILL)
        until("its end", self.has_ended)
        os.close(self.terminal)


def until(what, happens, meanwhile=lambda: time.sleep(0.02)):
    deadline = time.monotonic() + PATIENCE
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        meanwhile()


def holder_in_lock_file():
    try:
        with open(LOCK_FILE, "rb") as held:
            content = held.read()
        return int(content) if re.fullmatch(rb" *\d+\n", content) and len(content) == 11 else None
    except FileNotFoundError:
        return None


def log_of_mgetty():
    try:
        with open(MGETTY_LOG, "rb") as log:
            return log.read()
    except FileNotFoundError:
        return b""


def quit_minicom(program):
    program.type(b"\x01x")
    time.sleep(0.5)
    program.type(b"\r")


def quit_cu(program):
    program.type(b"\r~.\r")


def leave(program, quit):
    asked_at = None

    def ask():
        nonlocal asked_at
        # What is typed before it listens may be thrown away, so once is not enough.
        if asked_at is None or time.monotonic() > asked_at + 1:
            quit(program)
            asked_at = time.monotonic()
        program.read(0.1)

    until("end", program.has_ended, ask)


PROGRAMS = [
    # Name, arguments, what it says of a device that is locked, how it is made to end.
    ("minicom", ["minicom", "-D", DEVICE], rb"is locked", quit_minicom),
    ("cu", ["cu", "-l", DEVICE, "-s", "9600"], rb"Line in use", quit_cu),
    (
        "kermit",
        ["kermit", "-Y", "-C", f"set carrier-watch off, set line {DEVICE}, pause 60, exit"],
        rb"Locked by process \d+",
        lambda program: program.kill(signal.SIGHUP),
    ),
    ("mgetty", ["mgetty", "-x", "6", "-r", "-b", "ttyLFP0"], None, lambda program: program.kill(signal.SIGTERM)),
]


def meet(client, holder, name, arguments, refusal, quit):
    lock, unlock = f"lock {DEVICE} {holder}", f"unlock {DEVICE} {holder}"
    answers = [client.ask(lock)]

    program = Program(arguments)
    try:
        if refusal:
            until("refusal", lambda: re.search(refusal, program.output), lambda: program.read(0.1))
        else:
            # It says so in its log only, and waits.
            until("refusal", lambda: b"lockfile found" in log_of_mgetty())
        was_respected = holder_in_lock_file() == holder
    finally:
        program.end()
    answers.append(client.ask(unlock))

    program = Program(arguments)
    try:
        # Not every program makes it in one step.
        until("lock file", lambda: holder_in_lock_file() == program.pid, lambda: program.read(0.02))
        answers.append(client.ask(lock))
        # It may have to come to itself first.
        until("start", lambda: program.output or name == "mgetty", lambda: program.read(0.1))
        leave(program, quit)
    finally:
        program.end()
    answers += [client.ask(lock), client.ask(unlock)]

    # One that is killed leaves its lock behind, and we take it over.
    program = Program(arguments)
    try:
        until("lock file", lambda: holder_in_lock_file() == program.pid, lambda: program.read(0.02))
    finally:
        program.end()
    answers += [client.ask(lock), client.ask(unlock)]
    print(name, "respects our lock," if was_respected else "ROBS US,", *answers, flush=True)


def main():
    master, slave = pty.openpty()
    os.chmod(os.ttyname(slave), 0o666)
    subprocess.run(["mount", "--bind", os.ttyname(slave), DEVICE], check=True)
    server = subprocess.Popen(
        [sys.argv[1], "--listen", "127.0.0.1:0", "--print-port", "--search-dirs", "/var/lock"],
        stdout=subprocess.PIPE,
    )
    holder = subprocess.Popen(["sleep", "300"])
    try:
        client = Client(int(server.stdout.readline()))
        for program in PROGRAMS:
            meet(client, holder.pid, *program)
    finally:
        for process in (holder, server):
            process.kill()
            process.wait()
        os.close(master)


main()
