"""Lets the number of a dead process pass to another user's process, and prints what lfpd says then.

    reused_number.py LFPD OWN OTHER

To be run by root in a PID namespace of its own, with a /proc of that namespace: the numbers of
processes are chosen here. OWN and OTHER are directories for lock files. An lfpd is started for each
connection, as inetd does it.
"""

import fcntl
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


def ask(user, line, meanwhile=lambda server: None):
    """The code of lfpd's reply to this line from this user. `meanwhile` gets its number."""
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
    with subprocess.Popen(server, stdin=ours, stdout=ours, stderr=ours) as server:
        meanwhile(server.pid)
        server.wait(20)
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
# A process that begins within 20 ms counts as the holder.
time.sleep(0.5)
heir = start(ROOT, number)
say("reused number", asked, ask(ROOT, f"lock /dev/lfpd-b {number}"))
end(heir)

number = start(STRANGER, saved=ROOT)
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

number = dead_number()
name = os.path.join(OWN, "LCK..lfpd-e")
directory = os.open(OWN, os.O_RDONLY)
fcntl.flock(directory, fcntl.LOCK_EX)


def pass_number_on(server):
    """Gives the number to a process that locks the device, while the server waits for its turn."""
    while not is_waiting(server):
        time.sleep(0.001)
    start(ROOT, number)
    with open(name, "w") as lock:
        lock.write(f"{number:10}\n")
    fcntl.flock(directory, fcntl.LOCK_UN)


def is_waiting(server):
    """Whether it has opened the directory, which it does after its first look at the number."""
    own = os.path.realpath(OWN)
    try:
        files = os.listdir(f"/proc/{server}/fd")
        return any(os.path.realpath(f"/proc/{server}/fd/{file}") == own for file in files)
    except FileNotFoundError:
        return False


asked = ask(STRANGER, f"unlock /dev/lfpd-e {number}", pass_number_on)
say("late number", asked, os.path.exists(name))
end(number)

# A container that starts again gives its processes the same numbers.
for user in (STRANGER, ROOT):
    number = start(user)
    line = f"lock /dev/lfpd-f {number}"
    asked = ask(user, line)
    end(number)
    time.sleep(0.5)
    heir = start(user, number)
    say("own number", asked, ask(user, line), ask(user, line))
    end(heir)
