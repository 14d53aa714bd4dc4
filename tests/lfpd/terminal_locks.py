"""Makes a pseudo-terminal, prints its path, and locks it in the way that each line of the input names.

Answers each line by the same line, once that lock is there. Any other word unlocks.
"""

import fcntl
import os
import pty
import struct
import sys

F_OFD_SETLK = 37
WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
UNLOCKED = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)

master, terminal = pty.openpty()
print(os.ttyname(terminal), flush=True)
for line in sys.stdin:
    how = line.strip()
    if how == "flock":
        fcntl.flock(terminal, fcntl.LOCK_EX)
    elif how == "shared flock":
        fcntl.flock(terminal, fcntl.LOCK_SH)
    elif how == "posix":
        fcntl.lockf(terminal, fcntl.LOCK_EX)
    elif how == "ofd":
        fcntl.fcntl(terminal, F_OFD_SETLK, WHOLE_FILE)
    else:
        fcntl.flock(terminal, fcntl.LOCK_UN)
        fcntl.lockf(terminal, fcntl.LOCK_UN)
        fcntl.fcntl(terminal, F_OFD_SETLK, UNLOCKED)
    print(how, flush=True)
