"""What a model's files say about its tokens: which end a reply, which begin a prompt, and the template of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.core import ModelError

# Tokens that end a reply in the families of models that have them, whatever the file's own end-of-sequence field names:
# conversions often name the end of a document there and forget the end of a turn, or the reverse. (llama.cpp keeps such a list too.)
# Only ends of a whole turn or document are here: after them a Llama writes another speaker's turn or another document. Left out are tokens
# that some models use inside a reply ("<|call|>", "<|return|>", fill-in-the-middle marks), and ends only a tool protocol gives a meaning.
_WELL_KNOWN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
)


@dataclass(slots=True, frozen=True)
class TokenFacts:
    """The special tokens of a model and its chat template."""

    eos_ids: tuple[int, ...]  # every token that ends a reply; the one the model itself names first comes first
    bos_id: int | None
    add_bos: bool  # a prompt begins with `bos_id`, unless the template has written it already
    template: str | None  # Jinja text; None: the model has none
    special_tokens: dict[str, str] = field(default_factory=dict)  # what templates know: bos_token, eos_token, unk_token, pad_token -> text


def end_ids(named: Iterable[int], control_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Every token that ends a reply: those the model names, then the well-known ends among its control tokens.

    `control_tokens` maps text to id and holds only tokens that no text encodes to: "</s>" as an ordinary word of the vocabulary,
    say, ends nothing.
    """
    known = (control_tokens[text] for text in _WELL_KNOWN_ENDS if text in control_tokens)
    return tuple(dict.fromkeys([*named, *known]))


def checked_id(value: object, vocab_size: int, field: str, where: object) -> int:
    """`value` if it is the id of a token; ModelError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelError(f"{where}: {field}: expected a token id from 0 to {vocab_size - 1}, got {value!r}")
    return value
