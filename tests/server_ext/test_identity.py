"""Test whose a request is. Beside each denial stands a hit, which shows that the test can find one."""

from itertools import product
from typing import Any

import msgspec
import pytest

from agentspec.cache import Scope
from agentspec.identifiers import MAX_ID_LENGTH, check_ids
from agentspec.server_ext.identity import (
    BATCH_KEY,
    CALL_KEY,
    DETAIL_KEY,
    IDENTITY_KEY,
    LENGTH_KEY,
    PREDICTION_KEY,
    QUOTABLE_KEY,
    Identity,
    RequestTagger,
    identify,
)
from agentspec.server_ext.identity.callers import NOBODY, Callers, Presented
from agentspec.server_ext.settings import Settings

SECRET = b"the secret of these tests"
FIELDS = len(Identity.__slots__)
KEYS_AND_SALTS = (("ada", None), ("bob", None), ("ada", "salt"))


def sender(key: str | None) -> Presented:
    """Return what a request with this checked API key presents; "": no key, on a server that checks keys."""
    return Presented(
        [] if not key else [(b"authorization", f"Bearer {key}".encode())], None if key is None else bool(key)
    )


def tagger(tenant: str | None = None, scope: Scope = "tenant") -> RequestTagger:
    return RequestTagger(Callers(Settings(store="memory://", tenant=tenant), SECRET), scope)


def request(
    extra: dict[str, Any] | None = None,
    *,
    key: str | None = None,
    salt: str | None = None,
    tenant: str | None = None,
    scope: Scope = "tenant",
    adapter: str | None = None,
) -> Identity:
    """Return the identity that the API server gives a request with session "s" and group "g"."""
    given = {"session_id": "s", "group_id": "g", **(extra or {})}
    return identify(tagger(tenant, scope).tag(given, sender(key), cache_salt=salt, adapter=adapter))


class TestTagging:
    def test_body_or_header_wins_over_xargs(self) -> None:
        tagged = tagger().tag({"session_id": "xargs", "k": 1}, session_id="header")
        assert identify(tagged).session_name == "header" and tagged["k"] == 1

    def test_nothing_given_is_the_tenant_of_all(self) -> None:
        assert identify(tagger().tag(None)) == Identity()

    def test_everything_that_a_request_says_of_itself_arrives(self) -> None:
        said = request({"parent_session_id": "p", "weight_version": "v7"}, key="ada")
        assert (said.session_name, said.group_name, said.weight_version) == ("s", "g", "v7")
        assert said.parent_session == request({"session_id": "p"}, key="ada").session
        assert said.parent_session != request({"session_id": "p"}, key="bob").session
        assert request({"weight_version": 12}).weight_version == "12"

    @pytest.mark.parametrize("bad", ["", " ", "a\nb", "\x00", "x" * 257, "\ud800", 5, 1.5, ["s"], {"s": 1}, True])
    @pytest.mark.parametrize("field", ["session_id", "group_id", "parent_session_id", "weight_version"])
    def test_an_unusable_id_counts_as_none_and_is_counted(self, field: str, bad: object) -> None:
        if field == "weight_version" and bad == 5:
            return
        given = {"session_id": "s", "group_id": "g", "parent_session_id": "p", "weight_version": "w"}
        good, found = (identify(tagger().tag({**given, **change})) for change in ({}, {field: bad}))
        assert found.ignored_ids == 1 and found.scope == "tenant"
        parts = {
            "session_id": (found.session, found.session_name),
            "group_id": (found.group, found.group_name),
            "parent_session_id": (found.parent_session,),
            "weight_version": (found.weight_version,),
        }
        goods = (good.session, good.group, good.parent_session, good.weight_version)
        for (name, values), intended in zip(parts.items(), goods, strict=True):
            assert set(values) == {None} if name == field else values[0] == intended

    @pytest.mark.parametrize("bad", ["everyone", "", 1, None, ["tenant"], {}, "Tenant"])
    def test_an_unknown_scope_narrows_to_none(self, bad: object) -> None:
        found = request({"agentspec_scope": bad})
        assert (found.scope, found.ignored_ids) == ("none", 1)

    @pytest.mark.parametrize("bad", ["\ud800", "x" * 1_000_000, ["s"]])
    @pytest.mark.parametrize(
        "key", ["session_id", "group_id", "parent_session_id", "weight_version", "agentspec_scope"]
    )
    def test_what_is_ignored_does_not_reach_the_engine(self, key: str, bad: object) -> None:
        """vLLM cannot send a lone surrogate to its engine, and would answer HTTP 500."""
        for who in (None, sender("")):  # nobody's, too
            tagged = tagger().tag({"session_id": "s", "agentspec_scope": "session", key: bad, "kept": "k"}, who)
            assert key not in tagged and tagged["kept"] == "k"
            assert identify(tagged).ignored_ids == 1
            msgspec.msgpack.encode(tagged)

    @pytest.mark.parametrize("value", [True, "true", False, "false", "\ud800", ["\ud800"]])
    def test_the_end_of_a_session_reaches_the_engine_in_the_identity_alone(self, value: object) -> None:
        tagged = tagger().tag({"session_id": "s", "session_final": value})
        assert identify(tagged).final == (value in (True, "true")) and "session_final" not in tagged
        msgspec.msgpack.encode(tagged)

    def test_what_is_ignored_is_said_once_and_without_the_value(self, caplog: pytest.LogCaptureFixture) -> None:
        server = tagger()
        server.tag({"session_id": "usable"})
        for _ in range(3):
            server.tag({"session_id": "my secret\n"})
        assert [record.getMessage() for record in caplog.records] == [
            "agentspec: session_id of a request cannot be used and is ignored"
        ]
        server.tag({"session_id": "my secret\n", "agentspec_scope": "everything"})
        assert caplog.messages[1:] == ["agentspec: agentspec_scope of a request cannot be used and counts as none"]

    @pytest.mark.parametrize("key", [None, "ada"])
    def test_what_a_caller_writes_about_itself_is_removed(self, key: str | None) -> None:
        honest, bobs = request(key=key), tagger().tag({"session_id": "s"}, sender("bob"))[IDENTITY_KEY]
        for forged in (bobs, bobs[:2], "bob", {"principal": "bob"}, 1, [None] * len(bobs)):
            assert request({IDENTITY_KEY: forged}, key=key) == honest
        for field in set(Identity.__slots__) - {"weight_version"}:
            assert (
                request({field: "bob", f"agentspec_{field}": "bob"} | {"agentspec_scope": "tenant"}, key=key) == honest
            )

    def test_no_key_and_no_salt_travels(self) -> None:
        tagged = tagger().tag({}, sender("key-ada"), cache_salt="my salt")
        assert "key-ada" not in str(tagged) and "my salt" not in str(tagged)

    @pytest.mark.parametrize(
        "tag",
        [None, "abc", [], ["x"], [1, 2], {"a": 1}, 5, [None] * FIELDS, ["t", "s", "g", "tenant", *[1] * (FIELDS - 4)]],
    )
    def test_a_request_without_a_proper_tag_shares_nothing(self, tag: object) -> None:
        for found in (identify({"session_id": "s", IDENTITY_KEY: tag}), identify({}), identify(None)):
            assert (found.scope, found.session, found.principal) == ("none", None, NOBODY)

    @pytest.mark.parametrize(
        ("place", "wrong"), [*product(range(FIELDS), (1.5, ["s"])), (Identity.__slots__.index("scope"), "everyone")]
    )
    def test_a_tag_with_one_wrong_field_shares_nothing(self, place: int, wrong: object) -> None:
        tag = tagger().tag({"session_id": "s"}, sender("ada"))[IDENTITY_KEY]
        assert len(tag) == FIELDS and identify({IDENTITY_KEY: tag}).scope == "tenant"
        found = identify({IDENTITY_KEY: [*tag[:place], wrong, *tag[place + 1 :]]})
        assert (found.scope, found.session, found.principal) == ("none", None, NOBODY)

    @pytest.mark.parametrize(
        "key", [BATCH_KEY, CALL_KEY, DETAIL_KEY, IDENTITY_KEY, LENGTH_KEY, PREDICTION_KEY, QUOTABLE_KEY]
    )
    def test_what_the_server_says_cannot_be_said_by_a_caller(self, key: str) -> None:
        for presented in (None, Presented([], call="this call")):
            honest, forged = (tagger().tag(extra, presented) for extra in ({}, {key: "forged"}))
            assert forged == honest

    def test_what_a_call_shows_reaches_the_engine(self) -> None:
        headers = [(b"x-agentspec-figures", b"detailed")]
        shown = Presented(headers, prediction=(1, 2), quotable=b"1234", batch=True, call="this call")
        expected = {PREDICTION_KEY: [1, 2], QUOTABLE_KEY: b"1234", BATCH_KEY: True, CALL_KEY: "this call"}
        assert tagger().tag({}, shown).items() >= (expected | {DETAIL_KEY: True}).items()
        assert DETAIL_KEY not in tagger().tag({}, Presented([(b"x-agentspec-figures", b"summary")]))

    def test_a_call_that_shows_nothing_is_told_apart_and_nothing_else(self) -> None:
        assert tagger().tag({}, Presented([])).keys() == {CALL_KEY, IDENTITY_KEY}

    def test_only_a_server_that_tells_lengths_lets_the_engine_wait_for_them(self) -> None:
        told = tagger()
        assert LENGTH_KEY not in told.tag({}, may_stop=True)
        told.tells_lengths = True
        assert told.tag({}, may_stop=True)[LENGTH_KEY] is True and LENGTH_KEY not in told.tag({})

    @pytest.mark.parametrize("said", [(b"detailed", b"summary"), (b"summary", b"detailed")])
    def test_of_several_headers_the_first_says_which_figures_are_wanted(self, said: tuple[bytes, ...]) -> None:
        tagged = tagger().tag({}, Presented([(b"x-agentspec-figures", value) for value in said]))
        assert (DETAIL_KEY in tagged) == (said[0] == b"detailed")

    def test_a_caller_without_a_key_among_keys_shares_nothing(self) -> None:
        for tenant in (None, "acme"):
            found = request(key="", tenant=tenant)
            assert (found.scope, found.session, found.group, found.caller) == ("none", None, None, NOBODY)

    def test_an_error_costs_drafts_and_no_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = tagger()
        monkeypatch.setattr(server.callers, "caller_of", lambda presented: 1 / 0)
        assert identify(server.tag({"session_id": "s"})).scope == "none"


class TestWithoutATenant:
    def test_all_callers_are_one_without_keys(self) -> None:
        found = request()
        assert (found.tenant, found.principal, found.caller, found.scope) == (None, None, None, "tenant")

    def test_each_principal_is_a_tenant_of_its_own(self) -> None:
        ada, again, bob = request(key="ada"), request(key="ada"), request(key="bob")
        assert ada == again and ada.session_name == bob.session_name == "s"
        assert_nothing_in_common(ada, bob)
        assert_nothing_in_common(ada, request())

    @pytest.mark.parametrize("key", [None, "ada"])
    def test_a_salt_makes_another_principal_which_is_told_the_same_figures(self, key: str | None) -> None:
        one, again, two, plain = (request(key=key, salt=salt) for salt in ("one", "one", "two", None))
        assert one == again and one.caller == two.caller == plain.caller
        for other in (two, plain):
            assert_nothing_in_common(one, other)
            assert one.principal != other.principal

    @pytest.mark.parametrize("tenant", [None, "acme"])
    def test_two_principals_with_one_salt_are_still_two(self, tenant: str | None) -> None:
        some = [request(key=key, salt="one", tenant=tenant) for key in ("ada", "bob", None)]
        for names in zip(*((found.principal, found.session, found.group) for found in some), strict=True):
            assert len(set(names)) == 3
        assert len({found.tenant for found in some}) == (3 if tenant is None else 1)
        assert request(key="ada", salt="one", tenant=tenant) == some[0]

    @pytest.mark.parametrize("key", [None, "ada"])
    def test_an_adapter_makes_another_tenant_of_the_same_sessions(self, key: str | None) -> None:
        one, again, two, plain = (request(key=key, adapter=name) for name in ("one", "one", "two", None))
        assert one == again and one.session == two.session == plain.session
        assert len({one.tenant, two.tenant, plain.tenant}) == 3

    def test_callers_of_one_adapter_are_still_tenants_of_their_own(self) -> None:
        """Otherwise they would draft from each other's text."""
        callers = (*KEYS_AND_SALTS, (None, None), (None, "salt"))
        found = [request(key=key, salt=salt, adapter="one") for key, salt in callers]
        assert len({identity.tenant for identity in found}) == len(callers)
        assert found[3].tenant is not None and found[3].tenant.endswith("/")  # as stores have such tenants

    @pytest.mark.parametrize("key", ["ada", None])
    def test_salts_and_adapters_count_for_their_caller_when_memory_is_scarce(self, key: str | None) -> None:
        some = [request(key=key), request(key=key, salt="one"), request(key=key, salt="two", adapter="x")]
        owners = {(identity.owner, identity.tenant_owner, identity.log_owner) for identity in some}
        assert len(owners) == 1 and some[0].owner == some[0].log_owner
        assert len({identity.tenant for identity in some}) == 3
        other = request(key="bob")
        assert other.owner != some[0].owner and other.tenant_owner != some[0].tenant_owner

    def test_a_named_tenant_counts_for_itself_and_its_sessions_for_their_callers(self) -> None:
        ada, bob, salted = (request(key=key, salt=salt, tenant="acme") for key, salt in KEYS_AND_SALTS)
        assert ada.tenant_owner == bob.tenant_owner == salted.tenant_owner == "acme" != salted.tenant
        assert ada.owner == salted.owner != bob.owner
        assert ada.log_owner == bob.log_owner == salted.log_owner == "", "the log's name says it"

    def test_a_salt_is_no_adapter_and_no_principal(self) -> None:
        identities = [request(salt="x"), request(adapter="x"), request(key="x")]
        for i, one in enumerate(identities):
            for other in identities[:i]:
                assert (one.tenant, one.session) != (other.tenant, other.session) and one.tenant != other.tenant


class TestWithATenant:
    def test_principals_share_the_tenants_index_and_nothing_else(self) -> None:
        ada, bob = request(key="ada", tenant="acme"), request(key="bob", tenant="acme")
        assert ada.tenant == bob.tenant == "acme"
        assert ada.session != bob.session and ada.group != bob.group

    def test_a_caller_cannot_choose_it(self) -> None:
        assert request({"tenant": "other", "agentspec_tenant": "other"}, tenant="mine").tenant == "mine"

    @pytest.mark.parametrize("name", ["salt", "adapter"])
    def test_a_salt_and_an_adapter_separate_within_it(self, name: str) -> None:
        plain, apart = request(tenant="acme"), request(tenant="acme", **{name: "x"})  # type: ignore[arg-type]
        elsewhere = request(tenant="rival", **{name: "x"})  # type: ignore[arg-type]
        further = request(tenant="acme", **{name: "y"})  # type: ignore[arg-type]
        both = request(tenant="acme", salt="x", adapter="x")
        assert len({found.tenant for found in (plain, apart, elsewhere, further, both)}) == 5

    def test_no_tenant_can_be_named_like_a_principals_or_a_salted_one(self) -> None:
        for taken in (request(key="ada").tenant, request(tenant="acme", salt="x").tenant):
            assert taken is not None and request(tenant=taken).tenant != taken

    def test_a_long_name_stays_within_what_a_cache_takes_and_apart_from_others(self) -> None:
        tenants = {request(tenant=name, salt="x").tenant for name in ("x" * 256, "x" * 255 + "y")}
        assert len(tenants) == 2
        for tenant in tenants:
            check_ids(tenant=tenant)

    def test_a_name_that_fits_is_shown_in_it(self) -> None:
        fits = "x" * (MAX_ID_LENGTH - 33)
        for name, shown in ((fits, True), (f"{fits}x", False)):
            tenant = request(tenant=name, salt="x").tenant
            assert tenant is not None and tenant.endswith(f"/{name}") is shown
            check_ids(tenant=tenant)


class TestNames:
    @pytest.mark.parametrize("field", ["session", "group"])
    def test_each_name_has_a_key_of_its_own(self, field: str) -> None:
        one, again, two = (getattr(request({f"{field}_id": name}, key="ada"), field) for name in ("1", "1", "2"))
        assert one == again != two

    def test_a_sessions_key_is_no_groups_and_no_principals(self) -> None:
        found = request({"session_id": "x", "group_id": "x"}, key="x", salt="x", adapter="x")
        assert len({found.session, found.group, found.principal, found.caller, found.tenant}) == 5

    def test_no_name_can_be_chosen_to_be_anothers(self) -> None:
        ada = request(key="ada")
        for key in (None, "bob"):
            assert request({"session_id": ada.session}, key=key).session != ada.session

    def test_keys_say_nothing_about_names_without_the_secret(self) -> None:
        other = RequestTagger(Callers(Settings(store="memory://"), b"another secret of theirs"), "tenant")
        one, two = request(), identify(other.tag({"session_id": "s", "group_id": "g"}))
        assert one.session != two.session and one.group != two.group and one.session != one.group


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


def assert_nothing_in_common(one: Identity, other: Identity) -> None:
    assert one.tenant != other.tenant
    assert one.session != other.session
    assert one.group != other.group
