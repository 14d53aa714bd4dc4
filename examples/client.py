#!/usr/bin/env python3
"""Runs a command under a lock: client.py KEY COMMAND [ARGUMENT ...]"""
import os, socket, subprocess, sys, time
HOST, PORT, WAIT, LEASE = "localhost", 6388, 10, 30  # seconds
MARGIN = min(2, LEASE / 4)  # stop relying on the lock this long before its lease ends

def now():  # counts the time in which the host is suspended
    return time.clock_gettime(time.CLOCK_BOOTTIME)

class Lock:
    def __init__(self, key):
        self.key, self.renewal, self.is_adopted = key, "n", True
        self.connect(5)
        word, *rest = self.ask("l", f"{WAIT} {LEASE}", WAIT + 5)
        if word != "ok":
            sys.exit(f"{key}: {word}")
        self.token, self.ends = rest[0], now() + LEASE - MARGIN
        self.fence, self.due = self.token[:16], now()  # renews at once: the wait is not counted

    def connect(self, patience):
        self.socket = socket.create_connection((HOST, PORT), patience)
        for name, value in ("KEEPIDLE", 15), ("KEEPINTVL", 5), ("KEEPCNT", 3):
            self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.replies = self.socket.makefile(encoding="utf-8", newline="\n")
        self.ask("hello", "adopt", patience)  # "error" from a server that does not know it

    def ask(self, command, argument, patience):
        self.socket.settimeout(max(patience, 0.1))
        self.socket.sendall(f"{command}\n{self.key}\n{argument}\n".encode())
        reply = self.replies.readline()
        if not reply.endswith("\n"):
            raise ConnectionError("closed")
        return reply.split()

    def is_held(self):
        """Renews the lease when it is time. After a failure, adopts the lock over a new one."""
        sent = now()
        if self.due <= sent < self.ends:
            try:
                if self.socket is None:
                    self.renewal = "adopt"  # from now on, in case an earlier request arrives late
                    self.connect(min(1, self.ends - sent))
                word = self.ask(self.renewal, f"{self.token} {LEASE}", min(1, self.ends - sent))[0]
                if word == "ok":  # renew once more right after an adoption
                    self.ends, self.due = sent + LEASE - MARGIN, sent + self.is_adopted * LEASE / 3
                    self.is_adopted = True
                elif word == "error":
                    self.ends = 0  # lost
            except OSError:
                self.socket, self.is_adopted, self.due = None, False, now() + 0.2
        return now() < self.ends

    def release(self):
        while self.is_held() and self.socket is None:
            time.sleep(0.1)
        return self.is_held() and self.ask("r", self.token, 5)[0] == "ok"

if len(sys.argv) < 3:
    sys.exit("usage: client.py KEY COMMAND [ARGUMENT ...]")
lock = Lock(sys.argv[1])
if lock.fence < os.environ.get("LAST_FENCE", ""):  # compare as text, not as numbers
    sys.exit("the lock is outdated")
command = subprocess.Popen(sys.argv[2:], env=os.environ | {"TOKEN": lock.token})
while command.poll() is None:
    time.sleep(0.1) if lock.is_held() else command.kill()
sys.exit(command.returncode if lock.release() else "the lock was lost")
