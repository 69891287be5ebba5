"""Several choices of one request, when one of them cannot be begun."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.choices import Choices
from app.conversations.run import Run
from app.conversations.turn import Said, Turn
from app.store.records import Asked, Entry, Item, Response
from engine.core import BusyError, SamplingParams


class Crowded:
    """Takes the first turn and no other."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    async def submit(self, turn: Turn) -> Run:
        if self.runs:
            raise BusyError("full")
        common: dict[str, Any] = {"created_at": 0, "id": "resp_1"}
        response = Response(**common, owner="ana", conversation="c", previous=None, input=[], output="msg_1", request=Asked())
        reply = Item(id="msg_1", parent=None, role="assistant", text="", created_at=0, response="resp_1", status="in_progress")
        self.runs.append(Run(response, reply, [Entry([1], "Hi")]))
        return self.runs[0]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("prompts", [1, 2])
async def test_what_a_retry_would_find_goes_on(stored: bool, prompts: int) -> None:
    key = "key" if stored else None
    turn = Turn(owner="ana", items=[Said("user", "x")], sampling=SamplingParams(max_tokens=9), stored=stored, client_message_id=key)
    crowded = Crowded()
    choices = Choices(crowded, [turn] * prompts, 2, {})  # type: ignore[arg-type]
    with pytest.raises(BusyError):
        await choices.begin()
        await choices.done()
    assert bool(crowded.runs[0].stopped_because) == (not stored)
