"""How much memory there is, so that what can never fit is refused in words.

Owns reading it from the system. Knows nothing of what it is for.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.core import EngineError

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's


def total() -> int:
    """Bytes that this machine has, or that this process may take of them."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(here, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit
        return here


def check_pool(tokens: int, size: int) -> None:
    """Raises: EngineError when the KV of so many tokens, of so many bytes, is more than there is memory."""
    if size > (most := total()):
        takes = f"{size / 2**30:.1f} GiB of {most / 2**30:.1f} GiB"
        raise EngineError(f"expected max_total_tokens that memory can hold, got {tokens}, whose KV takes {takes}")
