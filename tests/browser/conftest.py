"""A real Chromium on the real server, and the few things every page test does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page, Request, expect, sync_playwright

from tests.serving import Server

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
PATIENCE = 120_000  # milliseconds a reply may take on a slow machine
SHORT = {"temperature": 0, "max_output_tokens": 12}
LONG = {"temperature": 0, "max_output_tokens": 48}
ENDLESS = {"temperature": 0, "max_output_tokens": 400}  # for what is stopped


@dataclass(slots=True)
class Chat:
    """One page and what can be seen and done on it; `faults` collects what a page must never do."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> Chat:
        self.page.goto(self.url + path)
        return self

    def send(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.keyboard.press("Enter")

    @property
    def replies(self) -> Locator:
        return self.page.locator(".message.assistant")

    @property
    def questions(self) -> Locator:
        return self.page.locator(".message.user")

    @property
    def rows(self) -> Locator:
        return self.page.locator(".conversation")

    def ended(self, count: int, status: str = "completed|incomplete") -> None:
        """Wait until there are so many replies and the last one has ended."""
        expect(self.replies).to_have_count(count, timeout=PATIENCE)
        expect(self.replies.last).to_have_attribute("data-status", re.compile(f"^({status})$"), timeout=PATIENCE)

    def writing(self, characters: int = 20) -> None:
        """Wait until the last reply is being written and shows at least so many characters."""
        self.page.wait_for_function(
            "n => { const last = [...document.querySelectorAll('.message.assistant')].at(-1);"
            " return last?.dataset.status === 'in_progress' && last.querySelector('.body').textContent.length >= n }",
            arg=characters,
            timeout=PATIENCE,
        )

    @property
    def shown(self) -> str:
        """What can be read of the last reply."""
        return self.replies.last.locator(".body").text_content() or ""

    def stop(self) -> None:
        self.page.keyboard.press("Escape")
        expect(self.replies.last).to_have_attribute("data-status", "incomplete", timeout=PATIENCE)

    def copied(self, message: Locator) -> str:
        """The message's own text, as its Copy button gives it."""
        message.get_by_role("button", name="Copy", exact=True).last.click()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def on_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.faults.append(f"request to {request.url}")

    def on_console(self, message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            self.faults.append(message.text)

    @property
    def conversation(self) -> str:
        self.page.wait_for_url("**/c/*")
        return self.page.url.rsplit("/", 1)[1]

    def items(self, conversation: str | None = None) -> list[dict[str, Any]]:
        """What the API says the conversation holds: [{role, text, status, response_id}]."""
        params: dict[str, str | int] = {"limit": 100, "order": "asc"}
        answer = httpx.get(f"{self.url}/v1/conversations/{conversation or self.conversation}/items", params=params)
        answer.raise_for_status()
        return [{**item, "text": "".join(part["text"] for part in item["content"])} for item in answer.json()["data"]]


@pytest.fixture(scope="package")  # no longer: while Playwright lives its event loop is the main thread's, and no other can run
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1100, "height": 760}, permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def chat(context: BrowserContext, server: Server) -> Iterator[Chat]:
    """A page on the server with short, greedy replies. Whatever runs a foreign script, leaves the origin or throws fails the test."""
    chat = new_chat(context, server.url, SHORT)
    yield chat
    assert chat.faults == []


def new_chat(context: BrowserContext, url: str, settings: dict[str, Any]) -> Chat:
    page = context.new_page()
    page.add_init_script(f"localStorage.setItem('hocket.settings', {json.dumps(json.dumps(settings))})")
    chat = Chat(page, url)
    # Not the bound methods themselves: Playwright sets attributes on their object, which has slots.
    page.on("pageerror", lambda error: chat.faults.append(f"script error: {error}"))
    page.on("dialog", lambda dialog: chat.on_dialog(dialog))
    page.on("request", lambda request: chat.on_request(request))
    page.on("console", lambda message: chat.on_console(message))
    return chat


def set_length(chat: Chat, settings: dict[str, Any]) -> None:
    chat.page.evaluate("settings => localStorage.setItem('hocket.settings', JSON.stringify(settings))", settings)
