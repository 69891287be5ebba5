"""The dataclasses every part of the engine passes around.

Owns: the vocabulary of the engine (request, sequence, step) and its errors. Knows nothing of tensors, threads,
sockets or files, and imports nothing but the standard library.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MOST_TOP_LOGPROBS = 20  # likeliest tokens reported in one place
PROMPT_ROWS = 32  # rows of a step that are run for their log probabilities: beside those that choose tokens there is room for so many


class EngineError(Exception):
    """The engine could not do what was asked; `str()` says what was expected and what came."""


class RequestError(EngineError):
    """A request that can never run as it stands. The caller can mend it; nobody else is affected."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param  # the public name of the field at fault, if one is
        self.code = code  # a short machine-readable word, as in `context_length_exceeded`


class BusyError(EngineError):
    """Too many requests wait already; the same one may succeed later."""

    def __init__(self, message: str, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds until it is worth trying again, by estimate


class NotReadyError(EngineError):
    """The model is still loading, or has failed to load."""

    def __init__(self, message: str, loading: bool) -> None:
        super().__init__(message)
        self.loading = loading  # trying again later can help


class ModelError(EngineError):
    """A model file that cannot be used: damaged, untruthful about itself, or of a kind that is not supported."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineOptions:
    model: str  # "default", a GGUF file, a Hugging Face folder or a hub id
    cache_dir: Path  # where converted models are kept
    kernels: str = "cpu"  # cpu | reference
    weights: str = "auto"  # cpu kernels: auto (the model's own) | int8 | float32 | bfloat16
    kv_dtype: str = ""  # cpu kernels: float32 | bfloat16 | int8; "": bfloat16, or float32 if exact
    exact: bool = False  # cpu kernels: activations stay float32
    threads: int = 0  # compute threads; 0: one per core
    max_batch_size: int = 32  # sequences running at once
    max_step_tokens: int = 128  # tokens in one step
    lone_step_tokens: int = 0  # the same when there is one sequence only, if larger
    max_total_tokens: int = 32768  # tokens the KV pool holds
    block_size: int = 16  # tokens per KV block
    max_queue: int = 256  # requests that may wait for a place in the batch
    schedule_policy: str = "fcfs"  # whom of an owner's waiting requests is next: fcfs | lpm
    batch_window_ms: float = 0  # an idle engine waits this long for more arrivals
    max_step_ms: float = 0  # what a step that has decodes may take by prediction; 0: as long as it takes
    swap_space: float = 0  # GiB for blocks that fall out of the pool; 0: they are forgotten
    offload_dir: Path | None = None  # where these are kept; None: in host memory
    shared_prefixes: tuple[str, ...] = ()  # system messages whose KV all owners share


@dataclass(slots=True, frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context (`rope_scaling` of a Hugging Face config)."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope
    factor: float = 1.0
    original_context: int = 0  # tokens the model was trained on; 0: the config's own context length
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: derived from `factor`
    short_factor: tuple[float, ...] = ()  # longrope: one per frequency
    long_factor: tuple[float, ...] = ()  # longrope: one per frequency


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """The shape of a Llama-architecture decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key / value heads; heads % kv_heads == 0
    head_dim: int
    context_length: int  # tokens
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tied_head: bool = False  # the output head is the embedding table
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(slots=True, frozen=True)
class Grammar:
    """What a reply must spell, enforced while it is generated."""

    kind: Literal["json_schema", "regex", "lark"]  # lark: a context-free grammar in llguidance's dialect
    source: str  # the schema as JSON text, the expression, or the grammar


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: str  # JSON Schema of its arguments, as JSON text
    strict: bool = False  # its arguments are held to the schema also where calls are the model's own choice


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Neutral values switch a step off."""

    max_tokens: int  # > 0
    seed: int = 0  # 64 bits; noise is a pure function of (seed, position, token)
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    presence_penalty: float = 0.0  # subtracted once from what was generated before
    frequency_penalty: float = 0.0  # subtracted per time it was generated
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) what prompt or reply already hold
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added logit
    stop: tuple[str, ...] = ()  # text that ends the reply and is not part of it
    stop_ids: tuple[int, ...] = ()  # tokens that end the reply and are not part of it
    ignore_eos: bool = False
    logprobs: int = -1  # likeliest tokens to report beside each one generated; -1: no log probabilities at all
    prompt_logprobs: bool = False  # report them for the prompt's tokens too: it is run whole, whatever the cache holds
    grammar: Grammar | None = None


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class CacheNode:
    """Tokens whose KV exists after those of its parents: a full block, or fewer, and then nothing follows. The prefix cache alone makes and
    changes it."""

    parent: CacheNode | None  # None: a root, which holds no tokens
    tokens: tuple[int, ...]
    block: int = -1  # where it is in the pool; -1: not there
    slot: int = -1  # where it is in the tier; -1: not there
    children: list[CacheNode] = field(default_factory=list)  # ordered by tokens
    salt: bytes = b""  # roots: whose they are
    id: int = 0  # names it among all that were ever kept in the tier; 0: it has no name yet

    @property
    def root(self) -> CacheNode:
        node = self
        while node.parent:
            node = node.parent
        return node


@dataclass(slots=True, frozen=True)
class Copy:
    """The KV of one block, to another."""

    source: int  # block
    target: int  # block


@dataclass(slots=True, frozen=True)
class Save:
    """A block's KV, to the tier."""

    block: int
    slot: int
    node: CacheNode  # what it holds


@dataclass(slots=True, frozen=True)
class Load:
    """A slot of the tier, to a block."""

    slot: int
    block: int
    node: CacheNode  # what it holds


Move = Copy | Save | Load


class Phase(enum.Enum):
    WAITING = "waiting"  # owns no block
    RUNNING = "running"  # owns the blocks in its table
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and where their KV is. The scheduler alone changes it."""

    id: int
    salt: bytes  # whose it is: sequences of different salts share neither blocks nor turns
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)  # sampled tokens, the last one not yet run
    table: list[int] = field(default_factory=list)  # block ids; block i holds positions [i * size, (i + 1) * size)
    computed: int = 0  # tokens whose KV is in the table's blocks
    chain: list[CacheNode] = field(default_factory=list)  # the prefix cache's nodes of its leading full blocks
    found: list[CacheNode] = field(default_factory=list)  # those that the cache had of it when it was last looked for, while it waits
    cached: int = 0  # prompt tokens found in the prefix cache when it first started
    preemptions: int = 0
    crowded_out: int = 0  # those of them for want of blocks
    priority: int = 0  # 0: interactive; 1: background, until it is promoted (`waiting.py`)
    since: int = 0  # the step in which it came, or last had a turn
    shared: int = 0  # leading blocks of a prefix that all owners share
    scored: int = 0  # leading prompt positions whose log probabilities are known, if they were asked for
    pending: list[tuple[CacheNode, int]] = field(default_factory=list)  # nodes to come from the tier, and how many tokens of each
    phase: Phase = Phase.WAITING
    compiled: object = None  # its grammar, as `grammar.py` compiled it: filled in by whoever asks, the scheduler does not look at it

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) of prompt followed by output."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:split] + self.output[max(0, start - split) : stop - split]


@dataclass(slots=True)  # not frozen: made for each token, and that takes three times as long
class Chunk:
    """A sequence's share of one step: positions [start, start + len(tokens)) are run."""

    sequence: Sequence
    start: int
    tokens: list[int]
    samples: bool  # the last position's logits choose the next token
    scored: bool = False  # the logits of those positions that a prompt's token follows are wanted too

    @property
    def scores(self) -> int:
        """How many of its positions, from the first, are there to be scored."""
        return max(0, min(len(self.tokens), len(self.sequence.prompt) - 1 - self.start)) if self.scored else 0


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass: the decodes (one token each) first, then prefill chunks. Before it, `moves`, in order."""

    chunks: list[Chunk]
    moves: list[Move] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(slots=True, frozen=True)
class Score:
    """How likely the model found a token, in numbers alone."""

    id: int
    logprob: float  # NaN: the logits were no numbers
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob) of the likeliest in its place, the likeliest first


@dataclass(slots=True, frozen=True)
class StepResult:
    """What the runner made of a plan."""

    tokens: list[int]  # one per chunk that samples, in the plan's order; -1: its logits were no numbers
    scores: Mapping[int, Score] = field(default_factory=dict)  # by sequence id: of its token, where log probabilities are asked for
    prompt_scores: Mapping[int, list[Score]] = field(default_factory=dict)  # by sequence id: of the prompt's tokens after the scored rows


@dataclass(slots=True, frozen=True)
class Message:
    """One message of a chat, as the prompt builder takes it."""

    role: str  # system | user | assistant | tool
    text: str
    lead_ids: tuple[int, ...] = ()  # assistant: the prompt's tokens between the previous reply and this one, as they were run
    lead_digest: bytes = b""  # assistant: digest of the text that `lead_ids` encode
    ids: tuple[int, ...] | None = None  # assistant: the tokens it was generated as; None: encode `text`


class Ending(enum.Enum):
    """How a chat's prompt ends."""

    REPLY = "reply"  # with the template's opening of the assistant's reply
    CONTINUE = "continue"  # inside the last message, which goes on
    CLOSED = "closed"  # after the last message, with nothing opened


@dataclass(slots=True, frozen=True)
class Prompt:
    """A rendered, tokenised chat, ready to run."""

    ids: list[int]  # the whole prompt
    lead_ids: tuple[int, ...]  # its end: what follows the last assistant message that came with `ids`
    lead_digest: bytes  # digest of the text of `lead_ids`; give both back with the reply as a Message
    goes_on: bool = False  # `lead_ids` end with an assistant message, which `lead_digest` leaves out: the reply is the rest of that message
    ends: tuple[int, ...] = ()  # tokens up to the end of each reply, and of what is said before the next; not told apart: as the one before


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """How likely the model found a token, before penalties, bias, temperature and filters."""

    id: int
    piece: bytes  # what it adds to the text; none for a control token
    logprob: float  # natural logarithm
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens in its place, the likeliest first


@dataclass(slots=True, frozen=True)
class Delta:
    """What one step added to a reply."""

    ids: tuple[int, ...]  # tokens generated since the last delta, in order (those of held-back text included)
    text: str  # visible text they add; may be empty while a character or a possible stop string is incomplete
    exact: bool = True  # all ids so far decode to all text so far: nothing is held back
    cached: int = 0  # prompt tokens that were not computed for this request, because their KV existed
    finish: FinishReason | None = None  # set on the last delta only
    reply: tuple[int, ...] = ()  # on the last delta: the tokens that make up the whole visible text, as a ledger keeps them
    error: str | None = None  # with FinishReason.ERROR: what happened
    error_code: Literal["engine_error", "invalid_grammar"] = "engine_error"  # whose fault it was
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `ids`, if they were asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # on the first delta, if asked for: one for each prompt token, None for the first
