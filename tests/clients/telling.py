"""What the scripts of Python clients share: where the server is, what is asked, and a line of JSON for each turn. They judge nothing.

A script is started with one of its ways to speak and one of its cases. It runs among the client's packages, without Hocket's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

BASE_URL = os.environ["HOCKET_URL"] + "/v1"
MODEL = os.environ["HOCKET_MODEL"]
QUESTIONS = ("What is the capital of France?", "And of Italy?")
WEATHER = "How is the weather in Paris?"


def tell(**turn: Any) -> None:
    sys.stdout.write(json.dumps(turn) + "\n")


def run(ways: dict[str, Any], **cases: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    _, way, case = sys.argv
    asyncio.run(cases[case](ways[way]))
