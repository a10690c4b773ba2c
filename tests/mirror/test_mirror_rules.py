"""What a mirror decides: by paths, ranges, times and names alone."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from kvmig.core.errors import ConfigError
from kvmig.mirror import marked_files
from kvmig.mirror.addresses import FileAddress, ListAddress, address_of, is_plain
from kvmig.mirror.app import MirrorAnswer, words_of
from kvmig.mirror.facts import STALE_S, AccessBook, FileFacts, may_use_stale, use_of
from kvmig.mirror.hub_client import without_xet
from kvmig.mirror.marked_files import MarkedFiles
from kvmig.mirror.peers import DOWN_S, HolderBook, PeerBook, ranked
from kvmig.mirror.ranges import FAR_BYTES, SMALL_BYTES, ByteRange, asked_range, way_of
from kvmig.mirror.settings import MirrorSettings, check_settings

SHA = "0123456789" * 4
A, B, C = "http://a:1", "http://b:1", "http://c:1"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/org/name/resolve/main/a.json", FileAddress("org/name", "main", "a.json")),
        ("/gpt2/resolve/main/onnx/a.json", FileAddress("gpt2", "main", "onnx/a.json")),
        ("/datasets/org/d/resolve/x/a", FileAddress("datasets/org/d", "x", "a")),
        ("/org/n/resolve/refs%2Fpr%2F1/a", FileAddress("org/n", "refs%2Fpr%2F1", "a")),
        ("/api/models/org/n/revision/main", ListAddress("org/n", "main", "")),
        ("/api/models/org/n/tree/main/onnx", ListAddress("org/n", "main", "")),
        ("/api/datasets/d/tree/main", ListAddress("datasets/d", "main", "")),
        ("/api/whoami-v2", None),
        ("/api/models/org/n", None),
        ("/org/n/blob/main/a", None),
    ],
)
def test_files_and_lists_are_known_by_their_paths(
    path: str, found: FileAddress | ListAddress | None
) -> None:
    if isinstance(found, ListAddress):
        found = ListAddress(found.repository, found.revision, f"{path}?q=1")
    assert address_of(path, "q=1") == found


def test_only_a_whole_commit_never_changes() -> None:
    assert FileAddress("o/n", SHA, "a").is_fixed
    assert not FileAddress("o/n", SHA[:39], "a").is_fixed
    assert not FileAddress("o/n", "main", "a").is_fixed


@pytest.mark.parametrize(
    "path",
    [
        "/o/n/resolve/main/../../../secret/resolve/main/a", "/o/n/resolve/main/%2e%2e/a",
        "/o/n/resolve/main/%2E./a", "/o/n/resolve/..%2F..%2Fx/a", "/o/./n", "/o//n", "o/n",
        "/o/n/a%00b", "/o/n/a%5Cb", "/o/n/a%3Fb", "/o/n/a%23b", "/o/n/\u00e4", "/" + "a" * 5000,
    ],
)  # fmt: skip
def test_a_path_that_the_hub_would_take_for_another_is_refused(path: str) -> None:
    assert not is_plain(path)


@pytest.mark.parametrize("path", ["/", "/o/n/resolve/main/a%20b.json", "/api/models/", "/a"])
def test_a_plain_path_is_taken(path: str) -> None:
    assert is_plain(path)


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("", None), ("bytes=-", None), ("bytes=5-2", None), ("bytes=0-1,4-5", None),
        ("items=0-1", None), ("bytes=0-", (0, 100)), ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)), ("bytes=90-500", (90, 100)), ("bytes=-10", (90, 100)),
        ("bytes=-500", (0, 100)), ("bytes=100-", (100, 100)), ("bytes=99-99", (99, 100)),
    ],
)  # fmt: skip
def test_a_range_is_understood_or_ignored(header: str, part: tuple[int, int] | None) -> None:
    assert asked_range(header, 100) == part


@given(st.text(alphabet="bytes=0123456789-, ", max_size=30), st.integers(1, 1000))
def test_no_range_leaves_the_file(header: str, size: int) -> None:
    part = asked_range(header, size)
    assert part is None or 0 <= part.begin <= part.end <= size


@pytest.mark.parametrize(
    ("part", "come", "way"),
    [
        (None, None, "here"),
        ((0, 8), None, "pass"),
        ((0, SMALL_BYTES + 1), None, "here"),
        ((5, 1 << 40), None, "here"),
        ((0, 8), 0, "here"),
        ((FAR_BYTES + 5, 1 << 40), 4, "pass"),
        ((FAR_BYTES + 5, 1 << 40), 5, "here"),
        ((FAR_BYTES + 5, 1 << 40), 1 << 40, "here"),
    ],
)
def test_a_part_that_nobody_waits_for_is_passed_on(
    part: tuple[int, int] | None, come: int | None, way: str
) -> None:
    assert way_of(None if part is None else ByteRange(*part), 1 << 40, come) == way


def facts(at: float = 0.0, *, public: bool = True) -> FileFacts:
    return FileFacts(SHA, SHA, 5, at, public)


@pytest.mark.parametrize(
    ("fixed", "public", "age", "now", "use"),
    [
        (True, True, None, 1e9, "use"),
        (False, True, None, 59, "use"),
        (False, True, None, 61, "ask"),
        (False, True, None, -1, "ask"),
        (True, False, None, 1, "ask"),
        (True, False, 59.0, 1e9, "use"),
        (True, False, 61.0, 1, "ask"),
    ],
)
def test_the_hub_is_asked_for_branches_and_for_callers_it_has_not_let_in(
    fixed: bool, public: bool, age: float | None, now: float, use: str
) -> None:
    assert use_of(facts(public=public), fixed, age, now) == use


def test_while_the_hub_is_gone_those_whom_it_let_in_get_what_was_known() -> None:
    assert may_use_stale(facts(), None)
    assert may_use_stale(facts(public=False), STALE_S - 1)
    assert not may_use_stale(facts(public=False), STALE_S + 1)
    assert not may_use_stale(facts(public=False), None)


def test_a_caller_is_let_in_to_one_file_and_is_no_other_caller() -> None:
    book = AccessBook(b"key")
    anna, ben = book.caller("Bearer a"), book.caller("Bearer b")
    assert "Bearer" not in anna
    book.let_in(anna, "/o/n/resolve/main/a", 10)
    assert book.age(anna, "/o/n/resolve/main/a", 15) == 5
    assert book.age(anna, "/o/n/resolve/main/b", 15) is None
    assert book.age(ben, "/o/n/resolve/main/a", 15) is None
    assert book.age("", "/o/n/resolve/main/a", 15) is None
    book.shut_out(anna, "/o/n/resolve/main/a")
    assert book.age(anna, "/o/n/resolve/main/a", 15) is None


@given(st.sets(st.integers(0, 50), min_size=2, max_size=8), st.integers(0, 10**6))
def test_a_mirror_that_leaves_changes_the_owner_of_its_own_files_only(
    numbers: set[int], file: int
) -> None:
    mirrors = [f"http://m{one}:1" for one in numbers]
    order = ranked(str(file), mirrors)
    assert sorted(order) == sorted(mirrors)
    for gone in mirrors:
        assert ranked(str(file), set(mirrors) - {gone}) == [one for one in order if one != gone]


def test_files_are_spread_over_mirrors() -> None:
    owners = [ranked(str(file), [A, B, C])[0] for file in range(3000)]
    assert min(owners.count(one) for one in (A, B, C)) > 900


def test_a_mirror_that_does_not_answer_is_left_out_for_a_while() -> None:
    book = PeerBook(C, [A, B])
    file = next(str(one) for one in range(100) if ranked(str(one), [A, B, C]) == [A, B, C])
    assert book.owners(file, 0) == [A, B, C]
    book.fail(A, 0)
    assert book.owners(file, 1) == [B, C]
    assert book.owners(file, DOWN_S) == [A, B, C]
    book.fail(B, 50)
    book.answer(B)
    assert book.owners(file, 51) == [A, B, C]


def test_one_of_all_who_ask_downloads_and_the_others_are_sent_there() -> None:
    book = HolderBook()
    assert book.find(SHA, A, [], 0) == ""
    assert book.find(SHA, B, [], 0) == A
    assert book.find(SHA, C, [], 0) == A
    assert book.find(SHA, A, [], 0) == ""  # it has lost it
    assert book.find("other", B, [], 0) == ""


def test_one_that_could_not_give_a_file_is_replaced_by_who_says_so() -> None:
    book = HolderBook()
    book.find(SHA, A, [], 0)
    assert book.find(SHA, B, [A], 0) == ""
    assert book.find(SHA, C, [], 0) == B
    book.drop(SHA, B)
    assert book.find(SHA, C, [], 0) == ""


def test_lists_lose_what_would_lead_clients_past_the_mirror() -> None:
    body = b'[{"path": "a", "xetHash": "00"}, {"path": "b"}]'
    assert without_xet(body) == b'[{"path":"a"},{"path":"b"}]'
    assert (
        without_xet(b'{"siblings": [{"xetHash": "0", "size": 1}]}') == b'{"siblings":[{"size":1}]}'
    )
    assert without_xet(b"no list") == b"no list"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 70000}, "--port is 70000, must be 0 to 65535"),
        ({"host": "0.0.0.0"}, "--host is '0.0.0.0', must be an address of this host alone"),
        ({"secret": "short"}, "KVMIG_SECRET has 5 characters, must have 16 or more"),
        ({"peers": (A,)}, "--peer needs KVMIG_SECRET"),
        ({"peers": (A,), "secret": "s" * 16}, "--peer needs KVMIG_SECRET"),
        ({"hub": "ftp://a"}, "--hub is 'ftp://a', must be as http://HOST:PORT"),
        ({"hub": "http://u:p@a"}, "--hub is "),
        ({"url": "http://a:1/"}, "--url is 'http://a:1/'"),
        ({"pins": ("a b",)}, "--pin is 'a b', must be ORG/NAME"),
        ({"most_bytes": -1}, "--disk is -1, must be 0 to"),
    ],
)
def test_bad_settings_are_refused_by_flag(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.split(", must")[0].replace("(", r"\(")) as error:
        check_settings(MirrorSettings(folder="/m", **given))  # type: ignore[arg-type]
    assert said in str(error.value)


async def test_what_a_hub_says_in_utf_8_reaches_the_client() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await MirrorAnswer(send, head=False).whole(404, {"x-error-message": "没有这个模型"}, b"")
    assert (b"x-error-message", "没有这个模型".encode()) in sent[0]["headers"]


# -- marks and words


def test_a_mark_holds_for_its_time_and_is_forgotten_with_the_next_one() -> None:
    marks = MarkedFiles(60.0)
    marks.mark("a", 0.0)
    marks.mark("b", 30.0)
    marks.mark("a", 40.0)
    assert (marks.has("a", 99.0), marks.has("b", 89.0)) == (True, True)
    assert (marks.has("a", 100.0), marks.has("b", 90.0)) == (False, False)
    marks.mark("c", 95.0)
    assert len(marks) == 2


def test_of_too_many_marks_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked_files, "MOST_MARKS", 3)
    marks = MarkedFiles(60.0)
    for number in range(5):
        marks.mark(str(number), 0.0)
    assert [marks.has(str(number), 1.0) for number in range(5)] == [False, False, True, True, True]


def test_the_words_of_a_secret_are_keyed_digests_of_a_purpose() -> None:
    secret = "a secret of sixteen"
    found = words_of(secret)
    purposes = (b"kvmig mirror, the word of clients", b"kvmig mirror, the word of mirrors")
    assert found == tuple(
        hmac.digest(secret.encode(), one, "sha256").hex()[:32] for one in purposes
    )
    assert words_of("") == ("", "")
