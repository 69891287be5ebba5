"""What a model writes, drawn: nothing in it runs or is fetched (P3), and what is finished stays as it is (P1)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.browser.conftest import Chat

STATIC = Path(__file__).parents[2] / "static"

PAYLOADS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg/onload=window.pwned=1>",
    "<svg><script>window.pwned = 1</script></svg>",
    "<iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
    "<iframe src='javascript:parent.pwned=1'></iframe>",
    "<object data='https://evil.example/x'></object><embed src='https://evil.example/x'>",
    "<link rel=stylesheet href='https://evil.example/x.css'>",
    "<style>@import 'https://evil.example/x.css'; body { background: url(https://evil.example/y) }</style>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href='https://evil.example/'>",
    "<form action='https://evil.example/'><button autofocus onfocus='window.pwned=1'>go</button></form>",
    "<details open ontoggle='window.pwned = 1'>x</details>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1></style></mglyph></table></mtext></math>",
    "<a href='javascript:window.pwned=1' id=trap>x</a>",
    "<video poster='https://evil.example/p.png'><source onerror='window.pwned=1'></video>",
    "<p style='background:url(https://evil.example/z)'>x</p>",
    "[x](javascript:window.pwned=1)",
    "[x](JaVaScRiPt:window.pwned=1)",
    "[x](java\tscript:window.pwned=1)",
    "[x](&#106;avascript:window.pwned=1)",
    "[x](\u0001javascript:window.pwned=1)",
    "[x](vbscript:msgbox)",
    "[x](data:text/html,<script>window.pwned=1</script>)",
    "[x](file:///etc/passwd)",
    "[x](blob:https://evil.example/x)",
    "<javascript:window.pwned=1>",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:window.pwned=1)",
    '![x" onerror="window.pwned=1](https://evil.example/q.png)',
    '![x](https://evil.example/r.png "title\\" onerror=window.pwned=1")',
    '[x](https://safe.example/ "t\\" onmouseover=\\"window.pwned=1")',
    "![[x](javascript:window.pwned=1)](https://evil.example/s.png)",
    "[x]: javascript:window.pwned=1\n\n[x]",
    '```"><img src=x onerror=window.pwned=1>\ncode\n```',
    "```html\n<img src=x onerror=window.pwned=1>\n```",
    "`<img src=x onerror=window.pwned=1>`",
    "| <img src=x onerror=window.pwned=1> |\n| --- |\n| <script>window.pwned=1</script> |",
    "> <img src=x onerror=window.pwned=1>\n\n- <svg onload=window.pwned=1>",
    "# <img src=x onerror=window.pwned=1>",
    "<!-- --!><img src=x onerror=window.pwned=1> -->",
    "<![CDATA[><img src=x onerror=window.pwned=1>]]>",
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'></noscript>",
    "<br onclick=window.pwned=1><br/ onload=window.pwned=1>",
    "https://safe.example/<script>window.pwned=1</script>",
    '<https://safe.example/"onmouseover="window.pwned=1>',
]

DRAW = """async ([text, step]) => {
  const { MarkdownView } = await import('/static/js/markdown.js');
  const place = document.createElement('div');
  document.querySelector('#messages').parentElement.append(place);
  const view = new MarkdownView(place);
  if (step) for (let n = step; n < text.length; n += step) view.update(text.slice(0, n));
  view.update(text, true);
  for (const link of place.querySelectorAll('a')) link.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
  await new Promise((resolve) => setTimeout(resolve, 20));
  const links = [...place.querySelectorAll('a')].map((link) => link.getAttribute('href'));
  const elements = [...place.querySelectorAll('*')].map((element) => element.localName);
  const attributes = [...place.querySelectorAll('*')].flatMap((element) => element.getAttributeNames());
  const handlers = attributes.filter((name) => name.startsWith('on') || name === 'style');
  const html = place.innerHTML;
  place.remove();
  return { links, elements, handlers, html, pwned: window.pwned ?? null };
}"""

HARMLESS = {
    *("div", "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del"),
    *("a", "br", "hr", "input", "table", "thead", "tbody", "tr", "th", "td", "span", "button"),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 7], ids=["whole", "by character", "by seven"])
def test_nothing_a_model_writes_runs_or_is_fetched(chat: Chat, step: int) -> None:
    chat.open()
    for payload in [*PAYLOADS, "\n\n".join(PAYLOADS)]:
        drawn = chat.page.evaluate(DRAW, [payload, step])
        assert drawn["pwned"] is None, payload
        assert drawn["handlers"] == [], payload
        assert set(drawn["elements"]) <= HARMLESS, payload
        assert all(link is None or re.match(r"(https?://|mailto:)", link) for link in drawn["links"]), payload
    chat.page.wait_for_timeout(200)  # a fetch begun late would be seen by the fixture, which allows none outside the origin
    assert "evil.example" not in chat.page.url


SAME_TREE = """([one, other]) => {
  const tree = (html) => {
    const { body } = new DOMParser().parseFromString(html, 'text/html');
    for (const code of body.querySelectorAll('code')) code.textContent = code.textContent;  // without its colours
    return body;
  };
  return tree(one).isEqualNode(tree(other));
}"""

SAMPLE = """A *first* paragraph,
of two lines.

## A heading
Some text directly under it.
***not a rule***

1. one
2. two
   - nested

   still two
3. three

> quoted
> lines

| a | b |
| --- | ---: |
| 1 | 2 |

```python
def f():

    return "```"
```

Term
---
- [x] done

[link](https://safe.example/) and [later], 彩虹 and e = mc². <br> Last.

[later]: https://safe.example/later
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 17])
def test_text_drawn_in_pieces_ends_as_text_drawn_whole(chat: Chat, step: int) -> None:
    chat.open()
    whole, pieces = (chat.page.evaluate(DRAW, [SAMPLE, each])["html"] for each in (0, step))
    assert chat.page.evaluate(SAME_TREE, [whole, pieces]), pieces
    assert 'align="right"' in whole
    assert "https://safe.example/later" in whole


@pytest.mark.slow
def test_finished_blocks_keep_their_nodes_while_more_is_written(chat: Chat) -> None:
    chat.open()
    changes = chat.page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import('/static/js/markdown.js');
          await import('/static/vendor/highlight/highlight.min.js');
          const place = document.createElement('div');
          document.querySelector('#messages').parentElement.append(place);
          const view = new MarkdownView(place);
          const first = 'A first *paragraph*.\\n\\n- one\\n- two\\n\\n';
          view.update(first);
          view.update(first + 'Next.\\n');
          const finished = [...place.children].slice(0, 2).flatMap((block) => [block, ...block.querySelectorAll('*')]);
          let touched = 0;
          const watcher = new MutationObserver((records) => { touched += records.length; });
          for (const block of [...place.children].slice(0, 2)) {
            watcher.observe(block, { subtree: true, childList: true, characterData: true, attributes: true });
          }
          const range = document.createRange();
          range.selectNodeContents(place.querySelector('li'));
          getSelection().removeAllRanges();
          getSelection().addRange(range);
          const whole = first + 'Next.\\n' + text;
          for (let n = first.length + 6; n <= whole.length; n++) view.update(whole.slice(0, n));
          view.update(whole, true);
          await new Promise((resolve) => setTimeout(resolve, 50));
          const same = finished.every((node) => place.contains(node));
          const selected = getSelection().toString();
          place.remove();
          return { same, touched, selected };
        }""",
        SAMPLE,
    )
    assert changes == {"same": True, "touched": 0, "selected": "one"}


@pytest.mark.slow
def test_an_open_block_grows_without_losing_the_nodes_it_has(chat: Chat) -> None:
    chat.open()
    same = chat.page.evaluate(
        """async () => {
          const { MarkdownView } = await import('/static/js/markdown.js');
          const place = document.createElement('div');
          const view = new MarkdownView(place);
          view.update('- one\\n- two');
          const [one] = place.querySelectorAll('li');
          const words = one.firstChild;
          view.update('- one\\n- two and\\n- three');
          const list = one === place.querySelector('li') && words === one.firstChild;
          const code = document.createElement('div');
          const codeView = new MarkdownView(code);
          codeView.update('```python\\nx = 1');
          const before = code.querySelector('code').firstChild;
          codeView.update('```python\\nx = 1\\ny = 2');
          return list && before === code.querySelector('code').firstChild && before.data.startsWith('x = 1\\ny = 2');
        }"""
    )
    assert same


@pytest.mark.slow
def test_events_applied_twice_or_late_change_nothing(chat: Chat) -> None:
    """C3: replays overlap; each sequence number counts once, and text never shrinks."""
    chat.open()
    outcome = chat.page.evaluate(
        """async () => {
          const { newReply, applyEvent } = await import('/static/js/reply.js');
          const events = 'The sea is wide'.split(/(?= )/).map((delta, i) => (
            { type: 'response.output_text.delta', sequence_number: i, delta }));
          const reply = newReply('resp_1');
          for (const upTo of [2, 4]) for (const event of events.slice(0, upTo)) applyEvent(reply, event);
          const replayed = { ...newReply('resp_1'), text: 'The sea' };
          const lengths = events.map((event) => (applyEvent(replayed, event), replayed.text.length));
          return { text: reply.text, replayed: replayed.text, lengths };
        }"""
    )
    assert outcome["text"] == outcome["replayed"] == "The sea is wide"
    assert min(outcome["lengths"]) == len("The sea")


@pytest.mark.slow
def test_screen_readers_hear_whole_sentences(chat: Chat) -> None:
    chat.open()
    heard = chat.page.evaluate(
        """async () => {
          const { Announcer } = await import('/static/js/announcer.js');
          const region = document.createElement('div');
          const announcer = new Announcer(region);
          const reply = { text: '', status: 'in_progress' };
          for (const piece of ['The **sea', '** is wide. And', ' deep', '! It is blue', '. 海很', '大。又深']) {
            reply.text += piece;
            announcer.hear(reply);
          }
          reply.status = 'completed';
          announcer.hear(reply);
          return [...region.children].map((line) => line.textContent);
        }"""
    )
    assert heard == ["The sea is wide.", "And deep!", "It is blue.", "海很大。", "又深"]


def test_vendored_files_are_what_the_list_says() -> None:
    listed = re.findall(r"`([\w/.]+\.m?js)` \|.*`([0-9a-f]{64})`", (STATIC / "vendor" / "VENDOR.md").read_text())
    assert {path for path, _ in listed} == {str(path.relative_to(STATIC / "vendor")) for path in (STATIC / "vendor").rglob("*.*js")}
    for path, digest in listed:
        assert hashlib.sha256((STATIC / "vendor" / path).read_bytes()).hexdigest() == digest, path
        assert (STATIC / "vendor" / path).with_name("LICENSE").exists()
