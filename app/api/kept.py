"""What of a run's log is still to be told: what a person has deleted, or cut, is not told again, whoever asks.

Owns that alone; how it is told is its caller's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from app.conversations.run import Run
from app.store.records import Entry


async def entries(run: Run) -> AsyncIterator[Entry]:
    """A run's entries: those to come as they come, of one that has ended what it keeps."""
    if run.finished:
        for entry in kept(run):
            yield entry
        return
    async for _, entry in run.entries():
        yield entry


def kept(run: Run) -> Sequence[Entry]:
    """The log of a run that has ended, as far as its reply still holds it."""
    left, text = len(run.reply.text), "".join(entry.text for entry in run.logged)
    if text == run.reply.text:
        return run.logged
    if not run.reply.text:
        return []
    if not text.startswith(run.reply.text):
        return [Entry([], run.reply.text)]
    told: list[Entry] = []
    bytes_left = len(run.reply.text.encode())
    for entry in run.logged:
        logprobs = []
        for token in entry.logprobs:
            bytes_left -= len(token.piece)
            if bytes_left < 0:
                break
            logprobs.append(token)
        told.append(Entry([], entry.text[:left], logprobs=logprobs))
        left -= len(entry.text)
        if left <= 0:
            break
    return told
