"""Whose a request is: each denial stands beside the hit that shows the test could have found it."""

from typing import Any

import pytest

from agentspec.cache import Scope
from agentspec.errors import InvalidSessionError
from agentspec.server_ext.identity import CALLER_KEY, NO_KEY, Identity, identify, principal_of, tag_request, who_shares

ADA, BOB = principal_of("key-ada"), principal_of("key-bob")


def request(
    extra: dict[str, Any] | None = None,
    *,
    principal: str | None = None,
    salt: str | None = None,
    tenant: str | None = None,
    scope: Scope = "tenant",
    adapter: str | None = None,
) -> Identity:
    """The identity that a request with session "s" and group "g" ends up with, by way of the API server."""
    given = {"session_id": "s", "group_id": "g", **(extra or {})}
    tagged = tag_request(given, principal=principal, cache_salt=salt)
    return identify(tagged, tenant=tenant, scope=scope, adapter=adapter)


class TestTagging:
    def test_body_or_header_wins_over_xargs(self) -> None:
        tagged = tag_request({"session_id": "xargs", "k": 1}, session_id="header")
        assert tagged == {"session_id": "header", "k": 1, CALLER_KEY: ["", ""]}

    def test_nothing_given_is_the_tenant_of_all(self) -> None:
        assert identify(tag_request(None)) == Identity()

    @pytest.mark.parametrize("bad", ["", "a\nb", "\x00", "x" * 257, "tab\there"])
    def test_an_unprintable_or_long_id_is_refused(self, bad: str) -> None:
        with pytest.raises(InvalidSessionError, match="session_id"):
            tag_request({}, session_id=bad)

    def test_an_id_that_is_no_string_is_refused(self) -> None:
        with pytest.raises(InvalidSessionError, match="session_id"):
            tag_request({"session_id": 5})

    def test_an_unusable_group_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidSessionError, match="group_id"):
            tag_request({"group_id": "a\nb"}, session_id="s")

    @pytest.mark.parametrize("bad", ["everyone", "", 1, None])
    def test_an_unknown_scope_is_refused_with_the_known_ones(self, bad: object) -> None:
        with pytest.raises(InvalidSessionError, match="agentspec_scope must be one of tenant, session, none"):
            tag_request({"agentspec_scope": bad})

    @pytest.mark.parametrize("principal", [None, ADA])
    def test_what_a_caller_writes_about_itself_is_removed(self, principal: str | None) -> None:
        honest = request(principal=principal)
        for forged in ([BOB, ""], [principal or "", "0" * 32], BOB, {"principal": BOB}, 1):
            assert request({CALLER_KEY: forged}, principal=principal) == honest

    def test_no_key_and_no_salt_travels(self) -> None:
        tagged = tag_request({}, principal=ADA, cache_salt="my salt")
        assert "key-ada" not in str(tagged) and "my salt" not in str(tagged)

    def test_the_engine_side_never_raises(self) -> None:
        assert identify({"session_id": "a\nb"}).session is None
        assert identify({**tag_request(None), "agentspec_scope": "?"}).scope == "none"

    @pytest.mark.parametrize("tag", [None, "abc", [], ["x"], [1, 2], ["a", "b", "c"], {"a": 1}, 5])
    def test_a_request_without_a_proper_tag_shares_nothing(self, tag: object) -> None:
        assert identify({"session_id": "s", CALLER_KEY: tag}).scope == "none"

    def test_a_caller_without_a_key_among_keys_shares_nothing(self) -> None:
        for tenant in (None, "acme"):
            assert request(principal=NO_KEY, tenant=tenant).scope == "none"


class TestWithoutATenant:
    def test_all_callers_are_one_without_keys(self) -> None:
        assert request() == Identity(None, "s", "g", "tenant", "s")

    def test_each_principal_is_a_tenant_of_its_own(self) -> None:
        ada, again, bob = request(principal=ADA), request(principal=ADA), request(principal=BOB)
        assert ada == again and ada.session_name == bob.session_name == "s"
        assert_nothing_in_common(ada, bob)
        assert_nothing_in_common(ada, request())

    @pytest.mark.parametrize("principal", [None, ADA])
    @pytest.mark.parametrize("name", ["salt", "adapter"])
    def test_a_salt_and_an_adapter_separate_further(self, principal: str | None, name: str) -> None:
        one, again = (request(principal=principal, **{name: "one"}) for _ in range(2))  # type: ignore[arg-type]
        assert one == again
        two = request(principal=principal, **{name: "two"})  # type: ignore[arg-type]
        for other in (two, request(principal=principal)):
            assert_nothing_in_common(one, other)

    def test_a_salt_is_no_adapter_and_no_principal(self) -> None:
        identities = [request(salt="x"), request(adapter="x"), request(principal=principal_of("x"))]
        for i, one in enumerate(identities):
            for other in identities[:i]:
                assert_nothing_in_common(one, other)


class TestWithATenant:
    def test_principals_share_the_tenants_index_and_nothing_else(self) -> None:
        ada, bob = request(principal=ADA, tenant="acme"), request(principal=BOB, tenant="acme")
        assert ada.tenant == bob.tenant == "acme"
        assert ada.session != bob.session and ada.group != bob.group

    def test_a_caller_cannot_choose_it(self) -> None:
        assert request({"tenant": "other", "agentspec_tenant": "other"}, tenant="mine").tenant == "mine"

    @pytest.mark.parametrize("name", ["salt", "adapter"])
    def test_a_salt_and_an_adapter_separate_within_it(self, name: str) -> None:
        plain, salted = request(tenant="acme"), request(tenant="acme", **{name: "x"})  # type: ignore[arg-type]
        assert_nothing_in_common(plain, salted)
        elsewhere = request(tenant="rival", **{name: "x"})  # type: ignore[arg-type]
        assert salted.tenant != elsewhere.tenant


class TestNames:
    def test_no_name_can_be_chosen_to_be_anothers(self) -> None:
        ada = request(principal=ADA)
        assert ada.session is not None and ada.session.endswith("/s")
        for principal in (None, BOB):
            assert request({"session_id": ada.session}, principal=principal).session != ada.session

    def test_a_long_name_stays_within_what_a_cache_takes_and_apart_from_others(self) -> None:
        names = ["x" * 256, "x" * 255 + "y"]
        sessions = {request({"session_id": name}, principal=ADA).session for name in names}
        assert len(sessions) == 2 and all(session is not None and len(session) <= 256 for session in sessions)


class TestScope:
    @pytest.mark.parametrize(
        ("server", "asked", "used"),
        [
            ("tenant", None, "tenant"),
            ("tenant", "session", "session"),
            ("tenant", "none", "none"),
            ("session", "tenant", "session"),
            ("session", "none", "none"),
            ("none", "tenant", "none"),
        ],
    )
    def test_a_request_narrows_and_never_widens(self, server: Scope, asked: Scope | None, used: Scope) -> None:
        extra = {} if asked is None else {"agentspec_scope": asked}
        assert request(extra, scope=server).scope == used


@pytest.mark.parametrize(
    ("tenant", "scope", "keys", "line"),
    [
        (None, "tenant", False, "shared by all callers; --api-key separates them"),
        (None, "tenant", True, "each API key shares with itself alone"),
        ("acme", "tenant", True, "drafts from tenant 'acme': API keys share answers, not sessions"),
        ("acme", "tenant", False, "drafts from tenant 'acme': shared by all callers; --api-key keeps sessions apart"),
        (None, "session", True, "each session drafts from itself alone (scope session), of its API key"),
        ("acme", "none", False, "each request drafts from its own text alone (scope none)"),
    ],
)
def test_the_line_at_start(tenant: str | None, scope: Scope, keys: bool, line: str) -> None:
    assert who_shares(tenant, scope, keys=keys) == line


def assert_nothing_in_common(one: Identity, other: Identity) -> None:
    assert one.tenant != other.tenant
    assert one.session != other.session
    assert one.group != other.group
