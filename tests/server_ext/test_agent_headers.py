"""Test sessions of coding agents by the headers that their clients send (recorded from real clients)."""

import pytest

from agentspec.identifiers import to_header
from agentspec.server_ext.identity import Identity, RequestTagger, identify
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.settings import Settings

CLAUDE = {"x-claude-code-session-id": "root"}
CODEX = {"session-id": "root", "thread-id": "root", "x-client-request-id": "root"}
OPENCODE = {"x-session-id": "root", "x-session-affinity": "root"}
DYNAMO = {"x-dynamo-session-id": "root"}
ROOTS = [CLAUDE, CODEX, OPENCODE, DYNAMO]
CHILDREN = [
    CLAUDE | {"x-claude-code-agent-id": "child"},
    {"thread-id": "child", "session-id": "root"},
    {"thread-id": "child", "session-id": "child", "x-codex-parent-thread-id": "root"},
    {"x-session-id": "child", "x-parent-session-id": "root"},
    {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"},
]


def tagger() -> RequestTagger:
    return RequestTagger(Callers(Settings(store="memory://"), b"the secret of these tests"), "tenant")


def shown(headers: dict[str, str]) -> Presented:
    return Presented([(name.encode(), value.encode()) for name, value in headers.items()])


def request(
    headers: dict[str, str], server: RequestTagger | None = None, *, body: str | None = None, **xargs: object
) -> Identity:
    """Return a request's identity. vLLM takes its session from the body, from X-Session-ID, or from vllm_xargs."""
    named = xargs.get("session_id")
    native = body or headers.get("x-session-id") or (named if isinstance(named, str) else None)
    return identify((server or tagger()).tag(xargs, shown(headers), session_id=native))


def key(name: str) -> str | None:
    return request({}, body=name).session


@pytest.mark.parametrize("headers", ROOTS)
def test_a_client_names_its_session(headers: dict[str, str]) -> None:
    found = request(headers)
    assert (found.session_name, found.session) == ("root", key("root"))
    assert (found.parent_session, found.ignored_ids) == (None, 0)


@pytest.mark.parametrize("header", ["x-session-id", "thread-id"])
@pytest.mark.parametrize("name", ["sesión", "à", "会话 7"])
def test_a_name_beyond_ascii_is_that_of_a_body_and_a_path(header: str, name: str) -> None:
    """Routes take the id from the path. If headers were read otherwise, an erasure would erase nothing, yet succeed."""
    sent = Presented([(header.encode(), name.encode())])
    native = name.encode().decode("latin-1") if header == "x-session-id" else None  # as vLLM reads its header
    found = identify(tagger().tag({}, sent, session_id=native))
    assert (found.session_name, found.session) == (name, key(name))


def test_a_name_that_is_not_utf_8_is_read_as_latin_1() -> None:
    assert identify(tagger().tag({}, Presented([(b"x-session-id", b"s\xe9")]), session_id="s\xe9")).session_name == "sé"


def test_the_first_of_two_headers_counts_as_with_vllm() -> None:
    for values, name in (((b"one", b"two"), "one"), ((b"", b"two"), None)):
        presented = Presented([(b"x-session-id", value) for value in values])
        assert identify(tagger().tag({}, presented)).session_name == name


@pytest.mark.parametrize("headers", CHILDREN)
def test_a_child_agent_names_its_parent(headers: dict[str, str]) -> None:
    found = request(headers)
    assert (found.session_name, found.session) == ("child", key("child"))
    assert found.parent_session == key("root")


def test_a_childs_child_names_the_child() -> None:
    deep = CLAUDE | {"x-claude-code-agent-id": "deep", "x-claude-code-parent-agent-id": "child"}
    assert request(deep).parent_session == key("child")


FINALS = [
    DYNAMO | {"x-dynamo-session-final": "true"},
    OPENCODE | {"x-session-final": "True"},
]


@pytest.mark.parametrize("headers", FINALS)
def test_a_client_ends_its_session(headers: dict[str, str]) -> None:
    assert request(headers).final and not request(headers | {list(headers)[-1]: "false"}).final
    assert not request(headers, body="mine").final


@pytest.mark.parametrize("headers", [*ROOTS, *CHILDREN])
def test_other_requests_end_nothing(headers: dict[str, str]) -> None:
    assert not request(headers).final
    assert request(headers, session_final=True).final and not request(headers, session_final=[1]).final
    assert not request({}, session_final=True).final  # the request names no session


def test_dynamos_headers_win_over_the_others() -> None:
    found = request(CLAUDE | CODEX | OPENCODE | {"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"})
    assert (found.session_name, found.parent_session) == ("d", key("p"))


@pytest.mark.parametrize("headers", [*ROOTS, *CHILDREN])
def test_a_session_in_the_body_wins_over_headers(headers: dict[str, str]) -> None:
    found = request(headers, body="mine")
    assert (found.session_name, found.parent_session) == ("mine", None)


def test_a_session_in_the_body_wins_though_a_second_header_names_it() -> None:
    """vLLM reads the first header, so the second one is not where the body has it from."""
    presented = Presented([(b"x-session-id", b"one"), (b"x-session-id", b"mine")])
    assert identify(tagger().tag({}, presented, session_id="mine")).session_name == "mine"


def test_a_parent_in_the_body_wins_over_headers() -> None:
    assert request(CHILDREN[0], parent_session_id="mine").parent_session == key("mine")


def test_an_empty_header_says_nothing() -> None:
    for headers in ({"x-claude-code-session-id": ""}, CLAUDE | {"x-claude-code-agent-id": " "}):
        found = request(headers)
        assert found.parent_session is None and found.ignored_ids == 0
    found = request({"x-session-id": "s", "x-parent-session-id": ""})
    assert (found.session, found.parent_session, found.ignored_ids) == (key("s"), None, 0)
    found = request(CLAUDE | {"x-claude-code-agent-id": "child", "x-claude-code-parent-agent-id": " "})
    assert found.parent_session == request(CLAUDE).session


def test_an_id_that_our_client_encoded_for_a_header_is_the_one_in_the_body() -> None:
    """Requests of `session.openai` name the session in a header only, those of `session.chat` in the body too."""
    encoded = {"x-session-id": to_header("größer 9%"), "x-parent-session-id": to_header("ein Kind")}
    for found in (request(encoded), request(encoded, body="größer 9%")):
        assert (found.session_name, found.parent_session) == ("größer 9%", key("ein Kind"))


@pytest.mark.parametrize("bad", ["x" * 257, "a\x01b", "a%01b"])
def test_an_unusable_header_counts_as_no_session(bad: str) -> None:
    found = request({"x-claude-code-session-id": bad})
    assert found.session is None and found.scope == "tenant" and found.ignored_ids == 1


def test_another_principals_header_names_another_session() -> None:
    server = RequestTagger(Callers(Settings(store="memory://"), b"the secret of these tests"), "tenant")
    named = [(b"x-claude-code-session-id", b"root"), (b"x-claude-code-agent-id", b"child")]
    ada, bob = (
        identify(server.tag({}, Presented([*named, (b"authorization", b"Bearer " + who)], verified=True)))
        for who in (b"ada", b"bob")
    )
    assert ada.session != bob.session and ada.parent_session != bob.parent_session
