"""Rows after the meeting: each is opened once, in order, by the other side of one connection."""

import pytest

from spmdctx.communication.meeting import proof
from spmdctx.communication.meeting.proof import LINE_BYTES, Caller, Seal, session_key

KEY = session_key(b"k" * 32, b"0" * 32, Caller(1, 2, b"1" * 32))


def test_rows_come_as_they_were_said():
    sent, heard = Seal(KEY, "caller"), Seal(KEY, "caller")
    said = ["bye", "failed ValueError: no such file: träin.txt", "failed a\nb", "x" * 10 * LINE_BYTES]
    assert [heard.opened(sent.sealed(text)) for text in said] == [*said[:2], "failed a b", "x" * (LINE_BYTES // 2)]
    assert len(sent.sealed("\U0001f600" * LINE_BYTES)) < LINE_BYTES


@pytest.mark.parametrize(
    "forged",
    [
        lambda row: row.replace(b"bye", b"go"),
        lambda row: b"0" * 64 + row[64:],
        lambda row: row[:-1],
        lambda row: row + row,
        lambda row: Seal(KEY, "process 0").sealed("bye"),
        lambda row: Seal(session_key(b"k" * 32, b"0" * 32, Caller(2, 2, b"1" * 32)), "caller").sealed("bye"),
        lambda row: Seal(b"k" * 32, "caller").sealed("bye"),
    ],
    ids=["other words", "no proof", "no end", "two at once", "its own row", "another process's", "the job's key"],
)
def test_a_forged_row_says_nothing_and_hinders_no_other(forged):
    heard, row = Seal(KEY, "caller"), Seal(KEY, "caller").sealed("bye")
    assert heard.opened(forged(row)) == ""
    assert heard.opened(row) == "bye"
    assert heard.opened(row) == ""


def test_an_answer_is_process_0s_to_this_caller():
    key, caller = b"k" * 32, Caller(1, 2, b"1" * 32)
    welcome, refused = (proof.answer(key, b"0" * 32, caller, words) for words in ("", "taken"))
    assert proof.read_answer(key, b"0" * 32, caller, welcome) == ""
    assert proof.read_answer(key, b"0" * 32, caller, refused) == "taken"
    assert proof.read_answer(key, b"0" * 32, caller, refused.replace(b"taken", b"other")) is None
    assert proof.read_answer(key, b"2" * 32, caller, welcome) is None
    assert proof.read_answer(b"o" * 32, b"0" * 32, caller, welcome) is None
    assert proof.read_answer(key, b"0" * 32, caller._replace(process=2), welcome) is None
