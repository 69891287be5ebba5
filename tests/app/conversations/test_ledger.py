from __future__ import annotations

import pytest

from app.conversations import ledger
from app.conversations.errors import NotFoundError
from app.store.records import Item


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


def test_a_reply_cut_before_its_first_token_is_no_message() -> None:
    asked = Item(id="a", parent=None, role="user", text="hi", created_at=0, response="r")
    empty = Item(id="b", parent="a", role="assistant", text="", created_at=0, response="r", ids=[])
    again = Item(id="c", parent="b", role="user", text="hello?", created_at=0, response="s")
    assert [message.text for message in ledger.messages(None, [asked, empty, again], "")] == ["hi", "hello?"]
    assert [message.role for message in ledger.messages("be kind", [asked], "")] == ["system", "user"]
