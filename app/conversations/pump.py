"""From the engine's deltas to a run's log and its end.

Owns the mapping of the engine's finish reasons to a response's terminal state. Every run it is given ends in exactly one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from app.conversations.journal import Journal
from app.conversations.run import Run
from app.store.records import Item, Response, Status, Usage
from engine.core import Delta, FinishReason

log = logging.getLogger(__name__)

Ending = tuple[Response, Item]


async def pump(run: Run, journal: Journal, prompt_tokens: int, keep: Callable[[Item], None]) -> None:
    """Follow the engine's work on `run` to its end, whatever happens on the way. `keep` is given the reply, unless the engine failed."""
    assert run.generation
    usage = Usage(prompt_tokens=prompt_tokens)
    texts: list[str] = []
    last = Delta((), "")
    async for last in run.generation:
        usage.cached_tokens = last.cached
        run.prompt_logprobs = last.prompt_logprobs or run.prompt_logprobs
        usage.completion_tokens += len(last.ids)
        texts.append(last.text)
        journal.add(run, last)
    text = "".join(texts)
    ids = list(last.reply) if last.reply or not text else None  # None: the engine broke off and cannot say; the text is encoded anew
    status, reason = _outcome(last.finish, run.stopped_because)
    response, reply = ended(run, status, text=text, ids=ids, usage=usage, reason=reason, error=last.error, error_code=last.error_code)
    if status != "failed":
        keep(reply)  # before anyone sees the end, and may follow it
    await finish_or_fail(run, journal, response, reply)


async def read_prompt(run: Run, journal: Journal, prompt_tokens: int) -> None:
    """As `pump`, of a turn that only wants its prompt read: what the engine says after it is dropped, and the reply is empty."""
    assert run.generation
    last = Delta((), "")
    async for delta in run.generation:
        last = delta
        run.prompt_logprobs = last.prompt_logprobs or run.prompt_logprobs
    status, reason = _outcome(FinishReason.STOP if last.finish is FinishReason.LENGTH else last.finish, run.stopped_because)
    usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=last.cached)
    await finish_or_fail(run, journal, *ended(run, status, usage=usage, reason=reason, error=last.error))


async def finish_or_fail(run: Run, journal: Journal, response: Response, reply: Item) -> None:
    """Log a run's end and publish it; if the log stays out of reach, those who follow are told that the run failed."""
    try:
        await journal.finish(run, response, reply)
    except Exception as fault:  # whatever it is, followers must not wait for ever
        log.error("the end of response %s could not be written to the log: %r", run.id, fault)
        shown = "".join(entry.text for entry in run.logged)
        error = f"the log could not be written: {fault}"
        run.written = False
        run.finish(replace(response, status="failed", reason=None, error=error), replace(reply, text=shown, ids=None, status="incomplete"))


def ended(
    run: Run,
    status: Status,
    *,
    text: str = "",
    ids: list[int] | None = None,
    usage: Usage | None = None,
    reason: str | None = None,
    error: str | None = None,
    error_code: str = "",
) -> Ending:
    """The run's response and reply, as they are once it has ended."""
    end = {"status": status, "reason": reason, "error": error, "error_code": error_code if error else ""}
    response = replace(run.response, completed_at=time.time(), usage=usage or Usage(), **end)
    return response, replace(run.reply, text=text, ids=ids, status="completed" if status == "completed" else "incomplete")


def interrupted(run: Run) -> Ending:
    """The end of a run whose process died: what its log holds, marked incomplete."""
    entries = run.logged
    ids = [id for entry in entries for id in entry.ids]
    text = "".join(entry.text for entry in entries)
    usage = replace(run.response.usage, completion_tokens=len(ids))
    exact = not entries or entries[-1].exact  # else the text is encoded anew for the next turn
    return ended(run, "incomplete", text=text, ids=ids if exact else None, usage=usage, reason="interrupted")


def _outcome(finish: FinishReason | None, stopped_because: str | None) -> tuple[Status, str | None]:
    match finish:
        case FinishReason.STOP:
            return "completed", None
        case FinishReason.LENGTH:
            return "incomplete", "max_output_tokens"
        case FinishReason.CANCELLED:
            return "incomplete", stopped_because or "server_shutdown"
        case _:
            return "failed", None
