"""What the system says of a process and its children: memory, processor time, who listens on a port. Linux's /proc only. (proc(5))"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")  # per second
LISTEN = "0A"


def tree(root: int) -> list[int]:
    """The process and all that came of it, as far as they live."""
    found, left = [], [root]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            tasks = list((PROC / str(pid) / "task").iterdir())
            found.append(pid)
            for task in tasks:
                with contextlib.suppress(OSError):
                    left += map(int, (task / "children").read_text().split())
    return found


def memory(root: int) -> int:
    """Resident bytes of the process tree. Pages that several processes share count once (Pss); where the system does not tell, in each."""
    return sum(map(_memory, tree(root)))


def _memory(pid: int) -> int:
    for file, name in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / file).read_text().splitlines():
                if line.startswith(name):
                    return int(line.split()[1]) << 10
    return 0


def processor_seconds(root: int) -> float:
    """What the process tree has used so far, of those that live."""
    total = 0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def idle_share(root: int, seconds: float = 1.0) -> float:
    """Which share of one core the process tree takes while nobody asks it for anything."""
    begin = processor_seconds(root)
    time.sleep(seconds)
    return (processor_seconds(root) - begin) / seconds


def listener(port: int) -> int | None:
    """The process that listens on a TCP port of this machine, the eldest if several do; None: none that may be looked into."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for pid in sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):
            for file in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(file.readlink()) in sockets:
                        return pid
    return None
