"""What adapters send: JSON objects as dictionaries, until `sse.py`, `channel.py` or an HTTP answer encodes them. Knows no protocol."""

from __future__ import annotations

from typing import Any

Wire = dict[str, Any]  # an object, or a part of one: an event, an item, a chunk
