from __future__ import annotations

from typing import Any

import pytest

from app.conversations import ledger
from app.conversations.errors import NotFoundError
from app.store.records import Item, Role


def test_a_path_goes_from_the_root_to_its_leaf_past_other_branches() -> None:
    parents = {"a": None, "b": "a", "c": "b", "d": "b", "e": "d"}
    items = {id: Item(id=id, parent=parent, role="user", text=id, created_at=0, response="r") for id, parent in parents.items()}
    assert [item.id for item in ledger.path(items, "e")] == ["a", "b", "d", "e"]
    assert ledger.path(items, None) == []
    with pytest.raises(NotFoundError, match="'x'"):
        ledger.path(items, "x")


def test_ids_count_only_under_the_fingerprint_they_were_made_with() -> None:
    reply = Item(id="a", parent=None, role="assistant", text="hi", created_at=0, response="r", lead_ids=[1], ids=[2], fingerprint="mine")
    (mine,), (other,) = (ledger.messages(None, [reply], fingerprint) for fingerprint in ("mine", "another"))
    assert (mine.lead_ids, mine.ids) == ((1,), (2,))
    assert (other.text, other.lead_ids, other.ids) == ("hi", (), None)


def test_what_a_reply_was_read_after_begins_after_the_reply_before_it() -> None:
    def item(id: str, parent: str | None, role: Role = "user", **fields: Any) -> Item:
        return Item(id=id, parent=parent, role=role, text=id, created_at=0, response="r", **fields)

    mine: dict[str, Any] = {"role": "assistant", "lead_ids": [1], "ids": [2], "fingerprint": "mine"}
    listed = [item("a", None), item("b", "a", **mine), item("c", "b"), item("d", "c", **mine)]
    listed += [item("e", "a", **mine), item("f", "c", **(mine | {"fingerprint": "another"}))]  # a branch; after another model came
    items = {one.id: one for one in listed}
    assert [one.id for one in ledger.led_by(items["a"], items)] == ["b", "e", "f"]
    assert [one.id for one in ledger.led_by(items["c"], items)] == ["d", "f"]


def test_a_reply_cut_before_its_first_token_is_no_message() -> None:
    asked = Item(id="a", parent=None, role="user", text="hi", created_at=0, response="r")
    empty = Item(id="b", parent="a", role="assistant", text="", created_at=0, response="r", ids=[])
    again = Item(id="c", parent="b", role="user", text="hello?", created_at=0, response="s")
    assert [message.text for message in ledger.messages(None, [asked, empty, again], "")] == ["hi", "hello?"]
    assert [message.role for message in ledger.messages("be kind", [asked], "")] == ["system", "user"]
