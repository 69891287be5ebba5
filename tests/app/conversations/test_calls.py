"""Which call an output may answer."""

from __future__ import annotations

import pytest

from app.conversations.calls import call_id, call_ids, check_answers
from app.conversations.errors import ConversationError
from app.store.records import Item, Role
from engine.tool_calls import call_text

TWO = f"{call_text('a', '{}')}\n{call_text('b', '{}')}"


def item(role: Role, text: str = "", **fields: object) -> Item:
    return Item(id="msg_1f", parent=None, role=role, text=text, created_at=0, response="resp_1", **fields)  # type: ignore[arg-type]


def test_a_call_has_its_client_s_name_or_one_of_its_reply() -> None:
    assert [call_id(item("assistant", TWO, calls=True, call_ids=["x"]), index) for index in range(2)] == ["x", "call_1f_1"]


def test_calls_that_a_client_named_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be a megabyte each, and this is done on the event loop."""
    monkeypatch.setattr("app.conversations.calls.parse", lambda text: pytest.fail("it was read"))
    made = item("assistant", TWO, calls=True, call_ids=["x", "y"])
    check_answers([], [made, item("tool", call_id="y"), item("tool", call_id="x")])


def test_each_call_is_answered_once_and_after_it_was_made() -> None:
    made = item("assistant", TWO, calls=True)
    first, second = item("tool", call_id="call_1f_0"), item("tool", call_id="call_1f_1")
    check_answers([], [made, second, first])
    check_answers([made], [first, second])
    check_answers([made, first], [second])
    for path, new in (([], [first]), ([], [first, made]), ([made], [first, first]), ([made, first], [first])):
        with pytest.raises(ConversationError, match="call_1f_0") as refused:
            check_answers(path, new)
        assert refused.value.param == "input"


def test_an_output_that_was_deleted_can_be_given_anew() -> None:
    made, output = item("assistant", TWO, calls=True), item("tool", call_id="call_1f_0", deleted=True)
    check_answers([made, output], [item("tool", call_id="call_1f_0")])


@pytest.mark.parametrize("fields", [{"calls": False}, {"calls": True, "deleted": True}])
def test_no_call_is_no_call(fields: dict[str, bool]) -> None:
    with pytest.raises(ConversationError):
        check_answers([item("assistant", TWO, **fields)], [item("tool", call_id="call_1f_0")])


def test_a_call_that_was_broken_off_can_be_answered() -> None:
    """Clients say that it could not be read."""
    check_answers([item("assistant", TWO[:-15], calls=True)], [item("tool", call_id="call_1f_1")])
    with pytest.raises(ConversationError):
        check_answers([item("assistant", TWO[:-15], calls=True)], [item("tool", call_id="call_1f_2")])


def test_a_call_keeps_its_name_behind_one_that_was_broken_off() -> None:
    broken = f"{call_text('a', '{}')[:-15]}, what?\n{call_text('b', '{}')}"
    reply = item("assistant", broken, calls=True)
    assert call_ids(reply) == ["call_1f_0", "call_1f_1"]
    check_answers([reply], [item("tool", call_id="call_1f_1")])
