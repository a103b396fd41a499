"""Test ids and namespaces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.store import LogNames, frame, mac, model_key
from agentspec.cache.store.base import check_namespace
from agentspec.errors import InvalidSessionError
from agentspec.identifiers import MAX_ID_LENGTH, check_session_id

PARTS = st.lists(st.none() | st.text(st.sampled_from("ab\x00\x01\x02é"), max_size=4), max_size=4)


@settings(deadline=None)
@given(PARTS, PARTS)
def test_framing_is_injective(left: list[str | None], right: list[str | None]) -> None:
    assert (frame(left) == frame(right)) == (left == right)


NAMES = st.text(st.sampled_from("ab/"), min_size=1, max_size=3)


@settings(deadline=None)
@given(*[st.tuples(NAMES, NAMES, st.none() | NAMES)] * 2)
def test_each_model_tokenizer_and_tenant_has_its_own_log(
    left: tuple[str, str, str | None], right: tuple[str, str, str | None]
) -> None:
    names = [LogNames(model_key(model, tokenizer), b"secret").of(tenant) for model, tokenizer, tenant in (left, right)]
    assert (names[0] == names[1]) == (left == right)


def test_a_logs_name_is_stable_and_fits_every_store() -> None:
    # A change of these values orphans every stored log, so raise SCHEMA on purpose, never by accident.
    assert model_key("model", "tokenizer") == "c9234a41f7e424b1"
    logs = LogNames(model_key("model", "tokenizer"), b"secret")
    assert logs.of("tenant") == "c9234a41f7e424b1.e24edf785af13e98ab4ca3c2"
    assert logs.of("tenant").startswith(logs.prefix)
    assert check_namespace(LogNames(model_key("m\x00/é", "t"), b"").of("a\x00b"))


def test_a_logs_name_tells_nothing_without_the_secret() -> None:
    names = {LogNames("0" * 16, secret).of("acme") for secret in (b"one", b"other")}
    assert len(names) == 2 and not any("acme" in name for name in names)
    assert "secret" not in repr(LogNames("0" * 16, b"secret of the server"))


@pytest.mark.parametrize("tenant", [None, "acme", "0123456789abcdef" * 2, "a/b"])
def test_what_is_set_apart_from_a_tenant_has_logs_of_its_own_in_the_tenants_family(tenant: str | None) -> None:
    logs = LogNames("0" * 16, b"secret")
    apart = [f"{mac(b'secret', 'apart', salt)}/{tenant or ''}" for salt in ("one", "two")]
    names = [logs.of(each) for each in (tenant, *apart)]
    assert len(set(names)) == 3
    assert all(name.startswith(logs.family(tenant)) and check_namespace(name) for name in names)
    assert {logs.family(each) for each in apart} == {logs.family(tenant)}
    others = [None, "acme", "acme2", "b", "a/b", "0123456789abcdef" * 2]
    assert sum(logs.of(other).startswith(logs.family(tenant)) for other in others) == 1


def test_the_logs_of_a_tenant_are_found_whatever_their_model() -> None:
    one, two = (LogNames(digit * 16, b"secret") for digit in "12")
    apart = f"{mac(b'secret', 'apart', 'salt')}/acme"
    names = [logs.of(tenant) for logs in (one, two) for tenant in (None, "acme", apart)]
    of_others = [
        LogNames("1" * 16, b"another secret").of("acme"),
        "0123abcd",
        "29ac143d2224796d1cd003a9efc0f20782e000ef",
    ]
    assert set(one.of_any_model(["acme"], [*names, *of_others])) == {one.of("acme"), two.of("acme")}
    assert set(two.of_any_model([apart, None], names)) == {
        logs.of(tenant) for logs in (one, two) for tenant in (None, apart)
    }
    assert one.of_any_model(["other"], of_others) == [one.of("other")]


def test_the_unnamed_tenant_is_no_named_one() -> None:
    names = [None, "", "None", "null", "-"]
    assert len({LogNames("0" * 16, b"secret").of(name) for name in names}) == len(names)


@pytest.mark.parametrize("value", ["fix-42", "a", "x" * MAX_ID_LENGTH, "日本語", "a b/c:{d}", "🙂", "👩‍💻"])
def test_good_ids_come_back(value: str) -> None:
    assert check_session_id(value) == value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("x" * (MAX_ID_LENGTH + 1), "at most 256"),
        ("a\nb", "U\\+000A at position 1"),
        ("\x00", "U\\+0000"),
        ("\x7f", "U\\+007F"),
        ("é\x85", "U\\+0085"),
        ("\u2028", "empty|U\\+2028"),
        ("a\u2028", "group: line separator U\\+2028 at position 1"),
        ("a\u2029", "group: paragraph separator U\\+2029 at position 1"),
        ("\ud800", "group: half of a surrogate pair U\\+D800 at position 0"),
        (5, "string"),
        (None, "string"),
    ],
)
def test_bad_ids_are_refused_with_field_and_reason(value: str, says: str) -> None:
    with pytest.raises(InvalidSessionError, match=says) as error:
        check_session_id(value, field="group")
    assert str(error.value).startswith("group: ")
