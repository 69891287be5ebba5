"""`/generate` on the real server and model. (slow)"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import Server

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_text_ids_and_what_they_took(http: httpx.Client) -> None:
    asked = {"temperature": 0, "max_new_tokens": 6}
    made = http.post("/generate", json={"prompt": PROMPT, **asked}).json()
    assert set(made) == {"text", "output_ids", "meta_info"}
    assert "Paris" in made["text"]
    meta = made["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (6, "length") and meta["prompt_tokens"] == 5
    for same in (
        {"text": PROMPT, **asked},
        {"prompt": PROMPT, "temperature": 0, "max_tokens": 6},
        {"text": PROMPT, "sampling_params": asked},
    ):
        again = http.post("/generate", json=same).json()
        assert (again["text"], again["output_ids"]) == (made["text"], made["output_ids"])
        assert again["meta_info"]["cached_tokens"] == 4
    goes_on = http.post("/generate", json={"prompt": made["output_ids"], **asked}).json()
    assert goes_on["meta_info"]["prompt_tokens"] == 6
    assert http.post("/generate", json={"input_ids": made["output_ids"], **asked}).json()["output_ids"] == goes_on["output_ids"]


def test_a_stream_has_the_whole_each_time(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_new_tokens": 8}
    made = http.post("/generate", json=asked).json()
    lines = [line for line in http.post("/generate", json=asked | {"stream": True}).text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    parts: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(parts) == 9, "one for each token, and the end"
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"]) and after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert [part["meta_info"]["finish_reason"] for part in parts] == [None] * 8 + ["length"]
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (made["text"], made["output_ids"])


def test_stop_and_forms(http: httpx.Client) -> None:
    stopped = http.post("/generate", json={"prompt": "1, 2, 3,", "temperature": 0, "stop": " 6"}).json()
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == (" 4, 5,", "stop")
    schema = json.dumps({"enum": ["a", "b"]})
    assert http.post("/generate", json={"prompt": "x", "sampling_params": {"json_schema": schema}}).json()["text"] in ('"a"', '"b"')
    assert http.post("/generate", json={"prompt": "x", "regex": "[0-9]{3}"}).json()["text"].isdigit()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "text": "y"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"]}, "prompt.0"),
        ({"prompt": [49152]}, "prompt"),
        ({"text": "0 " * 50_000}, "prompt"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "x", "max_new_tokens": 10**7}, "max_new_tokens"),
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"prompt": "x", "temperature": 1, "sampling_params": {"temperature": 1}}, "temperature"),
        ({"prompt": "x", "sampling_params": {"n": 2}}, "n"),
        ({"prompt": "x", "return_logprob": True}, "return_logprob"),
        ({"prompt": "x", "regex": "(", "max_tokens": 4}, "regex"),
        ({"prompt": "x", "regex": "a", "json_schema": "{}"}, "regex"),
        ({"prompt": "x", "json_schema": "{"}, "json_schema"),
        ({"prompt": "x", "json_schema": '{"type": 5}'}, "json_schema"),
        ({"prompt": "x", "stop_token_ids": [49152]}, "stop_token_ids"),
    ],
)
def test_bad_requests(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_it_needs_nothing_but_a_prompt(http: httpx.Client) -> None:
    made = http.post("/generate", json={"prompt": "Once", "ignore_eos": True}).json()
    assert made["meta_info"]["completion_tokens"] == 128
