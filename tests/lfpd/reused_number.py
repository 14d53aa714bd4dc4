"""Lets the number of a dead process pass to another user's process, and prints what lfpd says then.

    reused_number.py LFPD OWN OTHER

To be run by root in a PID namespace of its own, with a /proc of that namespace: the numbers of
processes are chosen here. OWN and OTHER are directories for lock files. An lfpd is started for each
connection, as inetd does it.
"""

import os
import signal
import socket
import subprocess
import sys
import time

LFPD, OWN, OTHER = sys.argv[1:]
ROOT, STRANGER = 0, 65534
NEXT_NUMBER = "/proc/sys/kernel/ns_last_pid"


def start(user, number=None, saved=None):
    """A process of this user's, which waits for signals; with this number, if one is given."""
    for _ in range(100):
        if number:
            with open(NEXT_NUMBER, "w") as last:
                last.write(str(number - 1))
        ready, done = os.pipe()
        child = os.fork()
        if child == 0:
            os.setresuid(user, user, user if saved is None else saved)
            signal.signal(signal.SIGUSR1, lambda *_: os.setresuid(ROOT, ROOT, ROOT))
            os.write(done, b"x")
            os.close(ready)
            os.close(done)
            while True:
                signal.pause()
        os.close(done)
        os.read(ready, 1)
        os.close(ready)
        if number in (None, child):
            return child
        end(child)
    raise RuntimeError("the number was not to be had")


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def dead_number():
    child = start(ROOT)
    end(child)
    return child


def ask(user, line):
    """The code of lfpd's reply to this line from this user."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        output, sink = os.pipe()
        client = os.fork()
        if client == 0:
            os.setresuid(user, user, user)
            with socket.socket() as connection:
                connection.connect(listener.getsockname())
                with connection.makefile("rw", newline="\n") as stream:
                    stream.readline()
                    stream.write(line + "\n")
                    stream.flush()
                    os.write(sink, stream.readline()[:3].encode())
            os._exit(0)
        os.close(sink)
        ours, _ = listener.accept()
        ours.setblocking(True)
    server = [LFPD, "--inetd", "--lock-dir", OWN, "--search-dirs", OTHER]
    subprocess.run(server, stdin=ours, stdout=ours, stderr=ours, timeout=20, check=True)
    os.waitpid(client, 0)
    reply = os.read(output, 3).decode()
    os.close(output)
    return reply


def say(what, *replies):
    print(what, *replies, flush=True)


number = dead_number()
asked = ask(STRANGER, f"lock /dev/lfpd-a {number}")
heir = start(ROOT, number)
say("dead number", asked, ask(ROOT, f"lock /dev/lfpd-a {number}"))
end(heir)

number = start(STRANGER)
asked = ask(STRANGER, f"lock /dev/lfpd-b {number}")
end(number)
heir = start(ROOT, number)
say("reused number", asked, ask(ROOT, f"lock /dev/lfpd-b {number}"))
end(heir)

number = start(STRANGER, saved=ROOT)
# Two clock ticks are the precision with which its start can be compared.
time.sleep(0.1)
asked = ask(STRANGER, f"lock /dev/lfpd-c {number}")
held = ask(ROOT, f"lock /dev/lfpd-c {os.getpid()}")
os.kill(number, signal.SIGUSR1)
while "Uid:\t0\t" not in open(f"/proc/{number}/status").read():
    pass
say("same process", asked, held, ask(ROOT, f"lock /dev/lfpd-c {os.getpid()}"))
end(number)

number = dead_number()
asked = ask(STRANGER, f"lock /dev/lfpd-d {number}")
say("unused number", asked, ask(STRANGER, f"unlock /dev/lfpd-d {number}"))
