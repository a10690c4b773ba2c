"""Who writes a stream: each change once, before what it wrote."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from kvmig.asgi.answer_writers import AnswerWriters


def test_each_change_of_the_writer_is_a_comment_once() -> None:
    writers = AnswerWriters()
    assert writers.take_comments() == b""
    for token, instance in enumerate(["1", "1", "2", "2", "1"]):
        writers.add_token(instance, token)
    assert writers.take_comments() == (
        b': kvmig {"instance":"1","token":0}\n\n'
        b': kvmig {"instance":"2","token":2}\n\n'
        b': kvmig {"instance":"1","token":4}\n\n'
    )
    writers.add_token("1", 9)
    assert writers.take_comments() == b""


@given(st.lists(st.sampled_from("abc")), st.data())
def test_every_token_s_writer_can_be_told_from_the_comments(
    owners: list[str], data: st.DataObject
) -> None:
    writers, comments = AnswerWriters(), b""
    for token, instance in enumerate(owners):
        writers.add_token(instance, token)
        if data.draw(st.booleans()):
            comments += writers.take_comments()
    comments += writers.take_comments()
    changes = {
        int(line.rpartition(b":")[2].rstrip(b"}")): line.split(b'"')[3].decode()
        for line in comments.splitlines()
        if line
    }
    for token, instance in enumerate(owners):
        assert changes[max(one for one in changes if one <= token)] == instance


async def test_a_stream_has_the_comments_before_its_events_and_no_other_answer_has_any() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    for kind, shown in ((b"text/event-stream; charset=utf-8", True), (b"application/json", False)):
        sent.clear()
        writers = AnswerWriters()
        writers.add_token("1", 0)
        send_shown = writers.wrap_send(send)
        await send_shown({"type": "http.response.start", "headers": [(b"content-type", kind)]})
        await send_shown({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send_shown({"type": "http.response.body", "body": b""})
        comment = b': kvmig {"instance":"1","token":0}\n\n' if shown else b""
        assert sent[1]["body"] == comment + b"data: 1\n\n"
        assert sent[2]["body"] == b""
