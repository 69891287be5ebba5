"""The chat page in a real Chromium, on the real server: what a person sees is what the API says, whatever happens to the connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis
import tokenizers
from playwright.sync_api import BrowserContext, WebSocketRoute, expect

from app.store.records import Item, decode
from engine.weights.convert import prepare
from tests.browser.conftest import ENDLESS, LONG, PATIENCE, SHORT, Chat, new_chat, set_length
from tests.oracle import check_greedy, load
from tests.serving import Server

pytestmark = pytest.mark.slow


def test_three_turns_are_the_reference_models(chat: Chat, server: Server) -> None:
    """What the page shows is what the ledger's own token ids decode to, and each of those is the one transformers would choose."""
    chat.open()
    for turn, question in enumerate(["What is the capital of France?", "And of Italy?", "Name one river there."], start=1):
        chat.send(question)
        chat.ended(turn)
    shown = [chat.copied(chat.replies.nth(turn)) for turn in range(3)]
    ids = [chat.replies.nth(turn).get_attribute("data-response") for turn in range(3)]
    replies = [item for item in chat.items() if item["role"] == "assistant"]
    assert [(item["response_id"], item["text"]) for item in replies] == list(zip(ids, shown, strict=True))

    oracle, tokenizer = load(), tokenizers.Tokenizer.from_file(str(prepare("default").tokenizer_path))
    prompt: list[int] = []
    for item, text in zip(ledger(server, [item["id"] for item in replies]), shown, strict=True):
        assert item.ids
        prompt += item.lead_ids
        check_greedy(oracle, prompt, item.ids, SHORT["max_output_tokens"], text)
        prompt += item.ids
        assert tokenizer.decode(item.ids) == text
    assert "<|im_start|>user\nName one river there.<|im_end|>" in tokenizer.decode(prompt, skip_special_tokens=False)

    chat.page.reload()
    chat.ended(3)
    assert [chat.copied(chat.replies.nth(turn)) for turn in range(3)] == shown
    expect(chat.page.locator("#reading")).to_be_empty()
    expect(chat.replies.last.locator(".numbers")).to_contain_text(re.compile(r"\d+ tokens? · \d+ of \d+ prompt tokens from cache"))


def ledger(server: Server, ids: list[str]) -> list[Item]:
    """The items of these ids, in this order, as the server's log holds them."""
    with redis.Redis(unix_socket_path=str(server.data_dir / "valkey" / "socket")) as client:
        records = [client.hget(key, id) for id in ids for key in client.scan_iter("*:items")]
    return [decode(record, Item) for record in records if record]


def test_stop_keeps_what_was_written_and_survives_a_reload(chat: Chat) -> None:
    """P4."""
    chat.open()
    set_length(chat, ENDLESS)
    chat.send("Tell me a long story about the sea.")
    chat.writing()
    chat.stop()
    expect(chat.replies.last.locator(".note")).to_have_text("Stopped.")
    expect(chat.page.get_by_label("Your message")).to_be_focused()
    text = chat.copied(chat.replies.last)
    assert text == chat.items()[-1]["text"]
    chat.page.reload()
    expect(chat.replies.last.locator(".note")).to_have_text("Stopped.")
    assert chat.copied(chat.replies.last) == text


def test_two_conversations_stream_at_once(chat: Chat) -> None:
    chat.open()
    set_length(chat, ENDLESS)
    chat.send("Tell me a long story about the sea.")
    chat.writing()
    first = chat.conversation
    chat.page.locator("#new-chat").click()
    chat.send("Tell me a long story about a mountain.")
    chat.writing()
    second = chat.conversation
    assert first != second
    expect(chat.page.locator(".badge.running")).to_have_count(2)
    for conversation in (first, second):
        chat.page.locator(f".conversation[data-id='{conversation}'] a").click()
        chat.writing(len(chat.shown) + 1)
    for conversation in (first, second):
        chat.page.locator(f".conversation[data-id='{conversation}'] a").click()
        chat.stop()
        assert chat.copied(chat.replies.last) == chat.items(conversation)[-1]["text"]
        expect(chat.questions).to_have_count(1)


# Letters only: a marker like "**" is there while its other half is awaited, and then gives way to bold words.
SAMPLE_LENGTHS = """
new MutationObserver(() => {
  const body = [...document.querySelectorAll('.message.assistant .body')].at(-1);
  if (body) (window.lengths ??= []).push(body.textContent.replace(/\\P{L}/gu, '').length);
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


def test_a_reload_mid_reply_goes_on_and_text_never_shrinks(chat: Chat) -> None:
    """C2, P4."""
    chat.open()
    set_length(chat, LONG)
    chat.send("Count slowly from one to fifty, in words.")
    chat.writing()
    chat.page.add_init_script(f"localStorage.setItem('hocket.settings', JSON.stringify({LONG}));{SAMPLE_LENGTHS}")
    before = sum(map(str.isalpha, chat.shown))
    chat.page.reload()
    chat.ended(1)
    lengths = chat.page.evaluate("window.lengths")
    assert lengths == sorted(lengths)
    assert lengths[-1] >= before
    assert chat.copied(chat.replies.last) == chat.items()[-1]["text"]
    expect(chat.questions).to_have_count(1)


def test_a_second_tab_follows(chat: Chat, context: BrowserContext, server: Server) -> None:
    """C2, P4."""
    chat.open()
    chat.send("Say hello.")
    chat.ended(1)
    other = new_chat(context, server.url, LONG).open(f"/c/{chat.conversation}")
    other.ended(1)
    set_length(chat, ENDLESS)
    chat.send("Tell me a long story about the sea.")
    other.writing()
    expect(other.questions).to_have_count(2)
    other.stop()
    chat.ended(2, "incomplete")
    assert other.copied(other.replies.last) == chat.items()[-1]["text"]
    assert other.faults == []


def test_conversations_are_listed_found_again_and_deleted(chat: Chat) -> None:
    chat.open()
    chat.send("Say one.")
    chat.ended(1)
    first = chat.conversation
    chat.page.locator("#new-chat").click()
    chat.send("Say two.")
    chat.ended(1)
    second = chat.conversation
    chat.page.reload()
    expect(chat.rows.nth(0)).to_have_attribute("data-id", second)
    expect(chat.rows.nth(1)).to_have_attribute("data-id", first)
    expect(chat.rows.nth(1).locator(".conversation-title")).to_have_text("Say one.")
    chat.open(f"/c/{first}")
    expect(chat.questions.locator(".body")).to_have_text(["Say one."])
    expect(chat.page).to_have_title("Say one. – Hocket")
    chat.page.go_back()
    expect(chat.questions.locator(".body")).to_have_text(["Say two."])
    chat.page.go_forward()
    row = chat.page.locator(f".conversation[data-id='{first}']")
    row.hover()
    row.get_by_role("button", name="Delete Say one.").click()
    chat.page.get_by_role("button", name="Keep it").click()
    expect(row).to_have_count(1)
    row.get_by_role("button", name="Delete Say one.").click()
    chat.page.get_by_role("button", name="Delete", exact=True).click()
    expect(row).to_have_count(0)
    expect(chat.page).to_have_url(f"{chat.url}/")
    assert httpx.get(f"{chat.url}/v1/conversations/{first}").status_code == 404
    chat.open(f"/c/{first}")
    expect(chat.page.locator(".banner.notice")).to_contain_text("does not exist")


def test_reading_on_is_not_disturbed_by_what_is_being_written(chat: Chat) -> None:
    """P2."""
    chat.page.set_viewport_size({"width": 700, "height": 420})
    chat.open()
    set_length(chat, ENDLESS)
    chat.send("\n".join(["Tell me a long story about the sea.", *["Please."] * 30]))
    chat.writing()
    latest = chat.page.get_by_role("button", name="Latest")
    expect(latest).to_be_hidden()
    scroller = chat.page.locator("#transcript")
    scroller.hover()
    chat.page.mouse.wheel(0, -4)  # a touch pad's smallest move is a wish to stay, too
    expect(latest).to_be_visible()
    chat.page.mouse.wheel(0, -200)
    chat.page.wait_for_timeout(200)  # let the wheel come to rest
    top = scroller.evaluate("element => element.scrollTop")
    chat.writing(len(chat.shown) + 40)
    assert scroller.evaluate("element => element.scrollTop") == top
    latest.click()
    expect(latest).to_be_hidden()
    chat.writing(len(chat.shown) + 40)
    assert scroller.evaluate("element => element.scrollHeight - element.clientHeight - element.scrollTop") <= 1
    chat.stop()


def test_a_retry_after_a_cut_socket_never_runs_twice(chat: Chat) -> None:
    """C4 as a browser meets it: the message arrived, the acknowledgement did not."""
    cuts = 0

    def cut_first_acknowledgement(route: WebSocketRoute) -> None:
        server = route.connect_to_server()

        def pass_on(frame: str | bytes) -> None:
            nonlocal cuts
            if cuts == 0 and '"response.created"' in str(frame):
                cuts += 1
                server.close()
                route.close(code=1011)
            else:
                route.send(frame)

        server.on_message(pass_on)

    chat.page.route_web_socket("**/v1/responses", cut_first_acknowledgement)
    chat.open()
    chat.send("Say hello.")
    chat.ended(1)
    assert cuts == 1
    assert [item["role"] for item in chat.items()] == ["user", "assistant"]
    expect(chat.questions).to_have_count(1)
    assert chat.copied(chat.replies.last) == chat.items()[-1]["text"]


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_socket_cut_mid_reply_loses_and_doubles_nothing(chat: Chat, after: int) -> None:
    """C1, C3: the reply goes on over a replay, whatever number of events came before the cut."""
    seen = 0

    def cut_once(route: WebSocketRoute) -> None:
        server = route.connect_to_server()

        def pass_on(frame: str | bytes) -> None:
            nonlocal seen
            route.send(frame)
            seen += 1
            if seen == after:
                server.close()
                route.close(code=1011)

        server.on_message(pass_on)

    chat.page.route_web_socket("**/v1/responses", cut_once)
    chat.open()
    chat.send("Tell me about the sea.")
    chat.ended(1)
    assert chat.copied(chat.replies.last) == chat.items()[-1]["text"]
    expect(chat.questions).to_have_count(1)


def test_what_is_written_while_the_model_loads_is_sent_when_it_is_ready(chat: Chat) -> None:
    loading = '{"status": "loading", "stage": "reading weights", "fraction": 0.4}'
    chat.page.route("**/readyz", lambda route: route.fulfill(status=503, content_type="application/json", body=loading))
    chat.open()
    banner = chat.page.locator(".banner.model")
    expect(banner).to_contain_text("The model is loading (reading weights). You can write meanwhile.")
    assert banner.locator("progress").evaluate("element => element.value") == pytest.approx(0.4)
    chat.send("Say hello.")
    expect(chat.questions.locator(".state")).to_have_text("Will be sent as soon as the model is loaded")
    chat.page.unroute("**/readyz")
    chat.ended(1)
    expect(banner).to_have_count(0)


def test_a_refused_message_says_why_and_can_be_edited(chat: Chat) -> None:
    chat.open()
    chat.send("far too long " * 20_000)
    note = chat.questions.locator(".note")
    expect(note).to_contain_text("Not sent: ", timeout=PATIENCE)
    note.get_by_role("button", name="Edit").click()
    expect(chat.questions).to_have_count(0)
    expect(chat.page.get_by_label("Your message")).to_have_value(re.compile("^far too long"))
    chat.send("Say hello.")
    chat.ended(1)


def test_a_draft_is_kept_per_conversation(chat: Chat) -> None:
    chat.open()
    chat.send("Say hello.")
    chat.ended(1)
    box = chat.page.get_by_label("Your message")
    expect(box).to_have_value("")
    box.fill("half a thought")
    chat.page.locator("#new-chat").click()
    expect(box).to_have_value("")
    box.fill("another")
    chat.page.go_back()
    expect(box).to_have_value("half a thought")
    chat.page.reload()
    expect(box).to_have_value("half a thought")
    chat.open("/")
    expect(box).to_have_value("another")


def test_enter_sends_but_not_while_composing(chat: Chat) -> None:
    chat.open()
    box = chat.page.get_by_label("Your message")
    box.fill("ni")
    box.evaluate(
        "box => box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    expect(box).to_have_value("ni")
    chat.page.keyboard.press("Shift+Enter")
    expect(box).to_have_value("ni\n")
    expect(chat.questions).to_have_count(0)
    chat.page.keyboard.press("Enter")
    chat.ended(1)


def test_a_server_killed_mid_reply_comes_back_and_one_goes_on(chat: Chat, server: Server) -> None:
    chat.open()
    set_length(chat, ENDLESS)
    chat.send("Tell me a long story about the sea.")
    chat.writing()
    before = len(chat.shown)
    server.restart(kill=True)
    chat.ended(1, "incomplete")
    expect(chat.replies.last.locator(".note")).to_contain_text("The reply was cut off.")
    assert len(chat.shown) >= before
    assert chat.copied(chat.replies.last) == chat.items()[-1]["text"]
    expect(chat.page.locator(".banner.connection")).to_have_count(0)
    set_length(chat, SHORT)
    chat.send("Say hello.")
    chat.ended(2)


def test_a_lost_connection_is_shown_and_found_again(chat: Chat) -> None:
    chat.open()
    refuse = True
    sockets = 0

    def gate(route: WebSocketRoute) -> None:
        nonlocal sockets
        sockets += 1
        if refuse:
            route.close(code=1011)
        else:
            route.connect_to_server()

    chat.page.route_web_socket("**/v1/responses", gate)
    chat.page.reload()
    banner = chat.page.locator(".banner.connection")
    expect(banner).to_contain_text("Trying again", timeout=10_000)
    chat.send("Say hello.")
    expect(chat.questions.locator(".state")).to_have_text("Will be sent as soon as there is a connection")
    assert sockets < 8, "each wait is longer than the one before"
    before = sockets
    banner.get_by_role("button", name="Try now").click()
    chat.page.wait_for_timeout(100)
    assert sockets > before
    refuse = False
    chat.ended(1)
    expect(banner).to_have_count(0)


def test_a_key_is_asked_for_once_and_a_wrong_one_stops(context: BrowserContext, new_server: Callable[..., Server], tmp_path: Path) -> None:
    """C10: a refused key ends the connecting until there is another one."""
    keys = tmp_path / "keys"
    keys.write_text("right-key ana\n")
    running = new_server("--api-key", str(keys)).start()
    chat = new_chat(context, running.url, SHORT)
    sockets: list[str] = []
    chat.page.on("websocket", lambda socket: sockets.append(socket.url))
    chat.open()
    dialog = chat.page.locator("#key-dialog")
    expect(dialog).to_contain_text("This server asks for a key")
    dialog.get_by_label("API key").fill("wrong-key")
    dialog.get_by_role("button", name="Continue").click()
    expect(dialog).to_contain_text("The key used so far is not accepted")
    count = len(sockets)
    dialog.get_by_role("button", name="Not now").click()
    expect(chat.page.locator(".banner.connection")).to_contain_text("This server asks for a key.")
    chat.page.wait_for_timeout(2500)  # several of the first waits to reconnect: nothing may come
    assert len(sockets) == count <= 2
    chat.page.get_by_role("button", name="Enter a key").click()
    dialog.get_by_label("API key").fill("right-key")
    dialog.get_by_role("button", name="Continue").click()
    chat.send("Say hello.")
    chat.ended(1)
    chat.page.reload()
    chat.ended(1)
    expect(dialog).to_be_hidden()
    assert "right-key" not in str(chat.page.evaluate("JSON.stringify(localStorage)")), "the key is kept for this tab only"
    assert chat.faults == []


def test_a_key_that_expires_stops_the_reconnecting(chat: Chat) -> None:
    """C10 on the socket alone: close code 4401 is final, whatever HTTP says."""
    sockets = 0

    def expire(route: WebSocketRoute) -> None:
        nonlocal sockets
        sockets += 1
        route.close(code=4401)

    chat.page.route_web_socket("**/v1/responses", expire)
    chat.open()
    expect(chat.page.locator("#key-dialog")).to_be_visible()
    chat.page.wait_for_timeout(2500)  # several of the first waits to reconnect: nothing may come
    assert sockets == 1
