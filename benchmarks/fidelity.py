"""How true a server, or a set of kernels, is to the model in float32.

Owns the reference (plain torch on the dequantised weights), the texts that distributions are compared on, and the prompts that replies are.
Knows no server: who asks one gives its texts.

    python -m benchmarks.fidelity [flags of hocket serve]       # Hocket's kernels on about 4,000 tokens
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.server import engine_options
from app.settings import load
from engine.chat_template import ChatTemplate
from engine.core import EngineOptions, Message
from engine.decoder import load_decoder
from engine.kernels.batch import Batch, Span
from engine.models.llama import Llama, ReferenceDecoder
from engine.tokenizer import Tokenizer
from engine.weights.cache import quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare

Array = np.ndarray[Any, np.dtype[Any]]
Logits = Callable[[list[int]], Array]  # token ids -> float32 [positions, vocab]: of the token that follows each; valid until the next call

ROOT = Path(__file__).resolve().parent.parent
PROSE = ("README.md", "CONTRIBUTING.md", "docs/*.md")
WINDOW = 512  # tokens of one text of prose
PROSE_TOKENS = 2048
SAMPLED_TOKENS = 170  # of each sampled reply
BLOCK = 16  # tokens of a KV block
ROWS = 64  # positions compared at once: their float64 copies take 25 MB each at a vocabulary of 50,000

QUESTIONS = (
    "Explain how a sailing boat can move against the wind.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should a beginner know before baking bread at home?",
    "Describe how rain forms, step by step.",
    "Give me a plan for learning to play the guitar in three months.",
    "Why do cities grow along rivers?",
    "Write a polite email asking a neighbour to turn down the music.",
    "Compare trains and aeroplanes for a journey of 600 kilometres.",
    "Write a Python function that counts the words of a text, and explain it.",
    "Tell me about the history of the bicycle.",
    "What happens in the body during sleep?",
    "Write a poem about the first day of winter.",
)


@dataclass(slots=True, frozen=True)
class Fidelity:
    """Next-token distributions against the reference's, over some positions."""

    kl: float  # mean KL(reference || other), nats
    argmax: float  # which part of the positions has the same likeliest token
    perplexity_ratio: float  # other / reference, of the texts' own tokens
    positions: int

    def __str__(self) -> str:
        return (
            f"mean KL {self.kl:.4f}, same likeliest token {self.argmax:.1%}, perplexity {self.perplexity_ratio - 1:+.2%}, "
            f"over {self.positions} positions"
        )


@dataclass(slots=True, frozen=True)
class Agreement:
    """Greedy replies against the reference's."""

    prefix: float  # mean number of tokens before the first that differs
    length: float  # mean length of the reference's replies, tokens
    equal: int  # replies that are the same throughout
    replies: int

    def __str__(self) -> str:
        return f"{self.prefix:.0f} of {self.length:.0f} tokens, {self.equal} of {self.replies} replies whole"


def compare(reference: Array, logits: Array, ids: list[int]) -> Fidelity:
    """Both logits [positions, vocab], of the positions of `ids`. The last one has no next token and does not count for perplexity.

    Raises: ValueError for shapes that differ, or logits that are no numbers
    """
    if reference.shape != logits.shape or len(reference) != len(ids):
        raise ValueError(f"expected logits of {len(ids)} positions in one shape, got {reference.shape} and {logits.shape}")
    divergence = surplus = 0.0
    same = 0
    for at in range(0, len(ids), ROWS):
        p, q = (_log_softmax(part[at : at + ROWS]) for part in (reference, logits))
        divergence += float((np.exp(p) * (p - q)).sum())
        same += int((p.argmax(1) == q.argmax(1)).sum())
        targets = ids[at + 1 : at + 1 + ROWS]
        places = np.arange(len(targets)), targets
        surplus += float((p[places] - q[places]).sum())
    return Fidelity(divergence / len(ids), same / len(ids), math.exp(surplus / max(1, len(ids) - 1)), len(ids))


def total(parts: Iterable[Fidelity]) -> Fidelity:
    """Of several texts together."""
    parts = list(parts)
    count = sum(part.positions for part in parts)
    mean = [
        sum(of(part) * part.positions for part in parts) / count
        for of in (lambda part: part.kl, lambda part: part.argmax, lambda part: math.log(part.perplexity_ratio))
    ]
    return Fidelity(mean[0], mean[1], math.exp(mean[2]), count)


def measure(reference: Logits, logits: Logits, texts: Iterable[list[int]]) -> Fidelity:
    return total(compare(reference(ids), logits(ids), ids) for ids in texts)


def agreement(expected: list[list[str]], replies: list[str]) -> Agreement:
    """`expected`: the reference's replies, as the visible text of each token; `replies`: the other's, at least as long."""
    prefixes = [_common(pieces, reply) for pieces, reply in zip(expected, replies, strict=True)]
    whole = sum(prefix == len(pieces) for prefix, pieces in zip(prefixes, expected, strict=True))
    lengths = [len(pieces) for pieces in expected]
    return Agreement(sum(prefixes) / len(prefixes), sum(lengths) / len(lengths), whole, len(replies))


def _common(pieces: list[str], reply: str) -> int:
    """How many of the pieces the reply begins with."""
    end = 0
    for count, piece in enumerate(pieces):
        if not reply.startswith(piece, end):
            return count
        end += len(piece)
    return len(pieces)


class Reference:
    """The model in plain torch and float32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tokenizer = Tokenizer(checkpoint.tokenizer_path, checkpoint.eos_ids)
        self.template = ChatTemplate(checkpoint.template, self.tokenizer, **checkpoint.special_tokens)
        torch.set_num_threads(1)  # before the first operation: in this process the kernels' threads alone enter OpenMP
        self._model = Llama(checkpoint.config, checkpoint.tensors())
        self._eos = set(checkpoint.eos_ids)

    def prompt(self, question: str) -> list[int]:
        return self.template.prompt([Message("user", question)]).ids

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Array:
        blocks = -(-len(ids) // BLOCK)
        cache = self._model.new_cache(blocks, BLOCK)
        return np.asarray(self._model.forward(_batch([ids], [0], [0], every=True), cache))

    def greedy(self, questions: Iterable[str], tokens: int) -> list[list[str]]:
        """The reply to each question, as the visible text of each token; shorter where the model ends it."""
        prompts = [self.prompt(question) for question in questions]
        replies = self._replies(prompts, tokens, lambda rows: rows.argmax(1))
        return [self._pieces(reply) for reply in replies]

    def sampled(self, questions: Iterable[str], tokens: int, seed: int = 0) -> list[list[int]]:
        """Each question's prompt and a reply drawn from the model's own distribution: the tokens of both."""
        chance = torch.Generator().manual_seed(seed)
        prompts = [self.prompt(question) for question in questions]
        replies = self._replies(prompts, tokens, lambda rows: torch.multinomial(rows.softmax(1), 1, generator=chance)[:, 0])
        return [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]

    @torch.inference_mode()
    def _replies(self, prompts: list[list[int]], tokens: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> list[list[int]]:
        """All at once, one token of each in a step."""
        blocks = -(-(max(map(len, prompts)) + tokens) // BLOCK)
        cache = self._model.new_cache(blocks * len(prompts), BLOCK)
        replies: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        for _ in range(tokens):
            runs = [prompts[at] if not replies[at] else replies[at][-1:] for at in live]
            starts = [len(prompts[at]) + len(replies[at]) - len(run) for at, run in zip(live, runs, strict=True)]
            chosen = choose(self._model.forward(_batch(runs, starts, [at * blocks for at in live]), cache)).tolist()
            for at, token in zip(live, chosen, strict=True):
                replies[at].append(token)
            live = [at for at, token in zip(live, chosen, strict=True) if token not in self._eos]
            if not live:
                break
        return [reply[:-1] if reply[-1] in self._eos else reply for reply in replies]

    def _pieces(self, ids: list[int]) -> list[str]:
        """What each token adds to the text; a token that leaves a character incomplete adds nothing yet."""
        pieces, shown = [], ""
        for end in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:end])
            whole = "" if text.endswith("\ufffd") else text[len(shown) :]
            pieces.append(whole)
            shown += whole
        return pieces


def texts(reference: Reference) -> list[list[int]]:
    """About 4,000 tokens: replies sampled from the reference, and this repository's own prose."""
    return prose(reference) + reference.sampled(QUESTIONS, SAMPLED_TOKENS)


def prose(reference: Reference) -> list[list[int]]:
    """This repository's own, in windows."""
    text = "\n\n".join(path.read_text("utf-8") for pattern in PROSE for path in sorted(ROOT.glob(pattern)))
    ids = reference.tokenizer.encode_plain(text)[:PROSE_TOKENS]
    return [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]


def kernel_logits(checkpoint: Checkpoint, options: EngineOptions) -> Logits:
    """The logits of the decoder that `options` ask for, as it computes them in steps of at most `max_step_tokens`."""
    rows = options.max_step_tokens
    wide = replace(options, max_batch_size=rows)  # a step may have that many rows whose logits are wanted
    blocks = -(-checkpoint.config.context_length // options.block_size)
    decoder: Any = load_decoder(checkpoint, wide, blocks, quiet)
    forward = partial(decoder.model.forward, cache=decoder.cache) if isinstance(decoder, ReferenceDecoder) else decoder.forward

    def logits(ids: list[int]) -> Array:
        parts = []
        for start in range(0, len(ids), rows):
            batch = _batch([ids[start : start + rows]], [start], [0], every=True, block_size=options.block_size)
            parts.append(np.asarray(forward(batch)).copy())
        return np.concatenate(parts)

    return logits


def _batch(runs: list[list[int]], starts: list[int], first_blocks: list[int], *, every: bool = False, block_size: int = BLOCK) -> Batch:
    """One step of several sequences: run i is its positions from starts[i] on, and its KV lies in consecutive blocks from first_blocks[i].

    every: the logits of every position are wanted, else of each sequence's last.
    """
    spans: list[Span] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    row = 0
    for run, start, block in zip(runs, starts, first_blocks, strict=True):
        stop = start + len(run)
        spans.append(Span(row, len(run), stop, np.arange(block, block - (-stop // block_size), dtype=np.int64)))
        positions += range(start, stop)
        slots += range(block * block_size + start, block * block_size + stop)
        row += len(run)
        samples += range(row - len(run), row) if every else [row - 1]
    tokens = np.array([token for run in runs for token in run], np.int64)
    return Batch(tokens, np.array(positions, np.int64), np.array(slots, np.int64), spans, np.array(samples, np.int64))


def _log_softmax(logits: Array) -> Array:
    """float64 [rows, vocab]"""
    if not np.isfinite(logits).all():
        raise ValueError("expected logits that are numbers, got some that are not")
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def kernels(reference: Reference, checkpoint: Checkpoint, options: EngineOptions) -> str:
    """The line that says how true the kernels are that `options` ask for."""
    return f"Hocket's kernels against float32: {measure(reference.logits, kernel_logits(checkpoint, options), texts(reference))}"


def main(flags: list[str]) -> None:
    settings = load(flags, "python -m benchmarks.fidelity")
    checkpoint = prepare(settings.model, settings.cache_dir)
    print(kernels(Reference(checkpoint), checkpoint, engine_options(settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
