"""A tiny model whose replies hardly ever encode to the tokens they were generated as, and the chats it is given."""

from __future__ import annotations

import json
from pathlib import Path

from app.conversations.run import Run
from tests.engine import tiny

CONTEXT = 1024
NEWLINE, NEWLINES = tiny.vocabulary().index("Ċ"), tiny.vocabulary().index("ld")  # the second is made to stand for two line feeds


def write_folder(folder: Path) -> Path:
    """The tiny model with a longer context, and a token for two line feeds."""
    tiny.write_folder(folder, tiny.config(context_length=CONTEXT))
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary, merges = spec["model"]["vocab"], spec["model"]["merges"]
    vocabulary["ĊĊ"] = vocabulary.pop("ld")
    merges[merges.index(["l", "d"])] = ["Ċ", "Ċ"]
    path.write_text(json.dumps(spec))
    return folder


def prompt_of(run: Run) -> list[int]:
    assert run.generation
    return run.generation.sequence.prompt


def ran(run: Run) -> list[int]:
    """The tokens of a finished run's prompt and reply, as the next turn must begin."""
    return prompt_of(run) + (run.reply.ids or [])
