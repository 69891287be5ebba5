"""Responses over WebSocket, on the real server and model. (slow)"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.app.wire import Event, Wire, text_of
from tests.serving import Server

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_output_tokens": 24}


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.url) as opened:
        yield opened


def test_the_events_of_a_turn_in_order(wire: Wire) -> None:
    events = wire.respond(input="What is the capital of France?", **GREEDY)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, _, added, part, *_, done, part_done, item_done, completed = events
    text = text_of(events)
    assert text == done["text"] == part_done["part"]["text"] == item_done["item"]["content"][0]["text"]
    assert "Paris" in text
    response = completed["response"]
    assert created["response"]["id"] == response["id"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert added["item"]["id"] == part["item_id"] == response["output"][0]["id"]
    assert response["output"][0] == item_done["item"]
    assert response["status"] == "completed"
    assert 0 < deltas <= response["usage"]["output_tokens"]  # what comes while the log is written comes together
    assert "stream_id" not in created


def test_the_second_turn_continues_from_the_cache(wire: Wire) -> None:
    first = wire.respond(input="What is the capital of France?", **GREEDY)[-1]["response"]
    second = wire.respond(input="And of Italy?", previous_response_id=first["id"], **GREEDY)[-1]["response"]
    usage = second["usage"]
    assert first["status"] == "completed"  # so the last token of the text was run too: what came of it ended the reply
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"]
    assert second["previous_response_id"] == first["id"]
    assert "Rome" in second["output"][0]["content"][0]["text"]


def test_instructions_do_not_carry_over(wire: Wire) -> None:
    pirate = "You are a pirate, and you say arr at the beginning of each and every sentence that you speak."
    first = wire.respond(input="Hi", instructions=pirate, **GREEDY)[-1]["response"]
    again = wire.respond(input="Hi", instructions=pirate, previous_response_id=first["id"], **GREEDY)[-1]["response"]
    without = wire.respond(input="Hi", previous_response_id=first["id"], **GREEDY)[-1]["response"]
    assert (again["instructions"], without["instructions"]) == (pirate, None)
    assert without["usage"]["input_tokens"] != again["usage"]["input_tokens"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


def test_input_items_of_every_role(wire: Wire) -> None:
    items = [
        {"role": "developer", "content": "Answer in one word."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "My name "}, {"type": "input_text", "text": "is Ana."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello Ana", "annotations": []}],
        },
        {"role": "user", "content": "What is my name?"},
    ]
    response = wire.respond(input=items, **GREEDY)[-1]["response"]
    assert response["output"][0]["content"][0]["text"]


def test_sampling_is_a_function_of_the_seed(wire: Wire) -> None:
    """E12, as the client sees it; the second time from the cache."""
    settings = {
        "temperature": 1.2,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    texts = [text_of(wire.respond(input="Tell me a story.", seed=seed, max_output_tokens=24, **settings)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_bias_and_ignored_eos(wire: Wire) -> None:
    plain = wire.respond(input="What is the capital of France?", **GREEDY)
    stopped = wire.respond(input="What is the capital of France?", stop=["Par"], **GREEDY)
    assert text_of(stopped) == text_of(plain).partition("Par")[0]
    assert stopped[-1]["type"] == "response.completed"
    following = wire.respond(input="Go on.", previous_response_id=stopped[-1]["response"]["id"], **GREEDY)[-1]
    assert following["type"] in ("response.completed", "response.incomplete")
    banned = wire.respond(input="What is the capital of France?", logit_bias={"9070": -100, "504": -100}, **GREEDY)
    assert text_of(banned) != text_of(plain)
    endless = wire.respond(input="What is the capital of France?", ignore_eos=True, **GREEDY)[-1]
    assert endless["response"]["usage"]["output_tokens"] == 24
    assert endless["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_cancelling_ends_the_response_once_and_soon(wire: Wire) -> None:
    wire.create(input="Write a very long story.", ignore_eos=True, max_output_tokens=2000)
    events = [wire.receive() for _ in range(8)]
    wire.send({"type": "response.cancel", "response_id": events[0]["response"]["id"]})
    rest = wire.rest()
    assert rest[-1]["type"] == "response.incomplete"
    assert rest[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert len(rest) < 100
    text = text_of(events + rest)
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == text
    next_turn = wire.respond(input="Thanks.", previous_response_id=events[0]["response"]["id"], **GREEDY)[-1]["response"]
    assert next_turn["usage"]["input_tokens_details"]["cached_tokens"] > 0
    wire.create(input="Write a very long story.", ignore_eos=True, max_output_tokens=2000)
    wire.receive()
    wire.send({"type": "response.cancel"})
    assert wire.rest()[-1]["type"] == "response.incomplete"
    wire.send({"type": "response.cancel"})
    assert wire.receive()["error"]["code"] == "response_not_found"


def test_lanes_run_side_by_side_and_each_in_order(wire: Wire) -> None:
    wire.create(stream_id="a", input="Count to 30.", ignore_eos=True, max_output_tokens=40)
    wire.create(stream_id="a", input="Second.", max_output_tokens=2)
    wire.create(stream_id="b.1", input="Count to 10.", ignore_eos=True, max_output_tokens=10)
    wire.create(input="Default lane.", max_output_tokens=2)
    seen: list[Event] = []
    while sum(event["type"] in ("response.completed", "response.incomplete") for event in seen) < 4:
        seen.append(wire.receive())
    ends = [event.get("stream_id") for event in seen if event["type"] in ("response.completed", "response.incomplete")]
    assert ends.index("b.1") < ends.index("a"), "a lane does not wait for another"
    a = [event for event in seen if event.get("stream_id") == "a"]
    starts = [at for at, event in enumerate(a) if event["type"] == "response.created"]
    assert len(starts) == 2
    assert a[starts[1] - 1]["type"] == "response.incomplete", "first in, first out"
    assert [event["sequence_number"] for event in a] == [*range(starts[1]), *range(len(a) - starts[1])]


def test_a_repeated_message_id_runs_once(wire: Wire, server: Server) -> None:
    """C4: after the end, and at the same moment from two sockets."""
    message = {"input": "Say something.", "metadata": {"client_message_id": "only-once"}, "seed": 5, "max_output_tokens": 12}
    first = wire.respond(**message)
    again = wire.respond(**message)
    assert again == first
    (other,) = wire.respond(**{**message, "input": "Say something else."})
    assert (other["status"], other["error"]["code"]) == (400, "idempotency_error")
    together: list[list[Event]] = []

    def send() -> None:
        with Wire(server.url) as other:
            together.append(other.respond(**{**message, "metadata": {"client_message_id": "at-once"}}))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(events == together[0] for events in together)
    assert together[0][0]["response"]["id"] != first[0]["response"]["id"]


def test_a_cancel_finds_the_response_that_is_not_accepted_yet(wire: Wire) -> None:
    wire.create(input="Write a very long story.", ignore_eos=True, max_output_tokens=2000)
    wire.send({"type": "response.cancel"})
    events = wire.rest()
    assert events[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert len(events) < 100


def test_a_cancel_counts_even_if_the_socket_closes_before_the_response_is_accepted(server: Server) -> None:
    for _ in range(5):
        with Wire(server.url) as gone:
            gone.create(input="Write a very long story. " * 1000, ignore_eos=True, max_output_tokens=3000)
            gone.send({"type": "response.cancel"})
    server.wait_until_idle()


def test_sixteen_responses_at_a_time_and_the_rest_wait(wire: Wire) -> None:
    for lane in range(20):
        wire.create(stream_id=f"lane-{lane}", input="Hi", ignore_eos=True, max_output_tokens=30)
    active: set[str] = set()
    most = ended = 0
    while ended < 20:
        event = wire.receive()
        if event["type"] == "response.created":
            active.add(event["stream_id"])
        elif event["type"] == "response.incomplete":
            active.remove(event["stream_id"])
            ended += 1
        most = max(most, len(active))
    assert most == 16


def test_a_cancel_finds_a_response_that_waits_for_its_place(wire: Wire) -> None:
    for lane in range(16):
        wire.create(stream_id=f"lane-{lane}", input="Hi", ignore_eos=True, max_output_tokens=30)
    wire.create(stream_id="late", input="Write a very long story.", ignore_eos=True, max_output_tokens=2000)
    wire.send({"type": "response.cancel", "stream_id": "late"})
    late: list[Event] = []
    while not late or late[-1]["type"] != "response.incomplete":
        event = wire.receive()
        late += [event] if event.get("stream_id") == "late" else []
    assert late[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}


def test_a_thirty_third_name_is_refused_and_the_others_stay_good(wire: Wire) -> None:
    for lane in range(32):
        assert wire.respond(stream_id=f"lane-{lane}", input="Hi", max_output_tokens=1)[-1]["type"] == "response.incomplete"
    wire.create(stream_id="one-more", input="Hi")
    refused = wire.receive()
    assert (refused["status"], refused["stream_id"]) == (400, "one-more")
    assert (refused["error"]["code"], refused["error"]["param"]) == ("websocket_stream_limit_reached", "stream_id")
    assert wire.respond(stream_id="lane-7", input="Hi", max_output_tokens=1)[-1]["stream_id"] == "lane-7"
    default = wire.respond(input="Hi", max_output_tokens=1)[-1]
    assert (default["type"], default.get("stream_id")) == ("response.incomplete", None), "the default lane has no name"


def test_a_flood_of_frames_is_refused(wire: Wire) -> None:
    wire.create(stream_id="lane-0", input="Hi", ignore_eos=True, max_output_tokens=60)
    for _ in range(3):
        wire.create(stream_id="lane-0", input="x" * 3_500_000)
    refused = next(event for event in iter(wire.receive, None) if event["type"] == "error")
    assert (refused["status"], refused["stream_id"]) == (429, "lane-0")


def test_what_is_not_stored_stops_with_its_socket(server: Server) -> None:
    with Wire(server.url) as gone:
        gone.create(input="Write a very long story.", store=False, ignore_eos=True, max_output_tokens=4000)
        gone.receive()
    server.wait_until_idle()


def test_a_conversation_keeps_its_turns(wire: Wire, server: Server) -> None:
    conversation = httpx.post(f"{server.url}/v1/conversations", json={"metadata": {"topic": "x"}}).json()
    for text in ("My name is Ana.", "What is my name?"):
        wire.respond(conversation=conversation["id"], input=text, **GREEDY)
    items = httpx.get(f"{server.url}/v1/conversations/{conversation['id']}/items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]
    wire.create(conversation={"id": conversation["id"]}, input="Once more.", ignore_eos=True, max_output_tokens=200, stream_id="x")
    assert wire.receive()["type"] == "response.created"
    assert httpx.get(f"{server.url}/v1/conversations/{conversation['id']}").json()["running"]
    wire.create(conversation=conversation["id"], input="Me too.", stream_id="y")
    while (event := wire.receive())["type"] != "error":
        pass
    assert (event["status"], event["error"]["code"], event["stream_id"]) == (409, "conversation_locked", "y")
    wire.send({"type": "response.cancel", "stream_id": "x"})
    assert wire.rest()[-1]["type"] == "response.incomplete"


def test_a_run_outlives_its_socket(server: Server) -> None:
    with Wire(server.url) as gone:
        gone.create(input="Count to 20.", ignore_eos=True, max_output_tokens=40, seed=3)
        response = gone.receive()["response"]
    events = []
    with httpx.stream("GET", f"{server.url}/v1/responses/{response['id']}?stream=true", timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 40
    for after in (0, 3, 4, 20, len(events) - 2, len(events) - 1):
        with httpx.stream("GET", f"{server.url}/v1/responses/{response['id']}?stream=true&starting_after={after}", timeout=60) as stream:
            lines = list(stream.iter_lines())
        assert [json.loads(line[6:]) for line in lines if line.startswith("data: {")] == events[after + 1 :]
        assert "data: [DONE]" in lines


def test_the_official_sdk_holds_a_two_turn_chat(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    with client.responses.connect() as connection:

        def turn(**fields: object) -> object:
            connection.response.create(model=model, temperature=0, max_output_tokens=24, **fields)  # type: ignore[arg-type]
            for event in connection:
                if event.type == "response.completed":
                    return event.response
            raise AssertionError("the connection ended before the response did")

        first = turn(input="What is the capital of France?")
        second = turn(input="And of Italy?", previous_response_id=first.id)  # type: ignore[attr-defined]
    assert "Paris" in first.output_text  # type: ignore[attr-defined]
    assert "Rome" in second.output_text  # type: ignore[attr-defined]
    assert second.usage.input_tokens_details.cached_tokens > 0  # type: ignore[attr-defined]
    retrieved = client.responses.retrieve(first.id)  # type: ignore[attr-defined]
    assert retrieved.output_text == first.output_text  # type: ignore[attr-defined]


def test_health_and_streams_stay_prompt_while_a_huge_message_is_refused(server: Server) -> None:
    """C8: 200,000 characters, eight streams, and /healthz within a second all the while."""
    with Wire(server.url) as wire:
        for lane in range(8):
            wire.create(stream_id=str(lane), input=f"Story {lane}.", ignore_eos=True, max_output_tokens=60)
        created = 0
        while created < 8:
            created += wire.receive()["type"] == "response.created"
        times: list[float] = []
        stop = threading.Event()

        def watch() -> None:
            with httpx.Client() as client:
                while not stop.is_set():
                    begin = time.perf_counter()
                    assert client.get(f"{server.url}/healthz").status_code == 200
                    times.append(time.perf_counter() - begin)

        watcher = threading.Thread(target=watch)
        watcher.start()
        wire.create(stream_id="huge", input="Why? 你好 12345 " * 16_000)
        ended, refused = 0, None
        while ended < 8 or not refused:
            event = wire.receive()
            ended += event["type"] == "response.incomplete"
            refused = event if event["type"] == "error" else refused
        stop.set()
        watcher.join()
    assert refused["error"]["code"] == "context_length_exceeded"
    assert max(times) < 1.0
