"""Test who sent a request: API keys, a gateway's headers, a file of keys, and which of them stay secret."""

import errno
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agentspec.errors import ConfigurationError
from agentspec.server_ext.identity.callers import NOBODY, ApiKeysFile, Caller, Callers, Presented, shows_admin_key
from agentspec.server_ext.settings import Settings, load_settings

SECRET = b"the secret of these tests"


def sent(*headers: tuple[str, str], key: str | None = None, verified: bool | None = None) -> Presented:
    """Return what a request with these headers presents."""
    given = [*headers, *([] if key is None else [("Authorization", f"Bearer {key}")])]
    return Presented([(name.lower().encode(), value.encode("latin-1")) for name, value in given], verified)


def callers(secret: bytes = SECRET, **settings: str) -> Callers:
    return Callers(Settings(store="memory://", **settings), secret)  # type: ignore[arg-type]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class TestKeys:
    def test_without_keys_all_callers_are_one(self) -> None:
        for presented in (None, sent(), sent(key="unchecked"), sent(("X-Principal", "ada"), ("X-Tenant", "acme"))):
            assert callers().caller_of(presented) == Caller(None, None)

    def test_each_checked_key_is_a_principal(self) -> None:
        found = callers()
        ada, again, bob = (found.caller_of(sent(key=key, verified=True)) for key in ("ada", "ada", "bob"))
        assert ada == again != bob and None not in (ada.principal, bob.principal)

    def test_a_caller_without_a_checked_key_is_nobody_where_keys_are_checked(self) -> None:
        for presented in (sent(verified=False), sent(key="wrong", verified=False)):
            assert callers(tenant="acme").caller_of(presented).principal == NOBODY

    def test_a_principal_is_no_digest_of_its_key_that_can_be_tried_without_the_secret(self) -> None:
        one = callers().caller_of(sent(key="ada", verified=True)).principal
        other = callers(b"another secret of theirs").caller_of(sent(key="ada", verified=True)).principal
        assert one != other and one is not None
        assert one not in digest("ada") and "ada" not in one

    def test_the_first_of_two_keys_counts_as_with_vllm(self) -> None:
        two = sent(("Authorization", "Bearer ada"), ("Authorization", "Bearer bob"), verified=True)
        assert callers().caller_of(two) == callers().caller_of(sent(key="ada", verified=True))
        assert sent(("Authorization", "Basic ada"), ("Authorization", "Bearer bob")).bearer() is None

    def test_only_a_bearers_key_is_a_key(self) -> None:
        assert sent(("Authorization", "bearer ada")).bearer() == sent(key="ada").bearer() == "ada"
        for value in ("Basic ada", "Bearer", "Bearer ", "ada", ""):
            assert sent(("Authorization", value)).bearer() is None

    def test_of_white_space_only_https_own_is_no_part_of_a_value(self) -> None:
        assert Presented([(b"x-cache-salt", "\t \u00a0salt\u2003 ".encode())]).all("X-Cache-Salt") == [
            "\u00a0salt\u2003"
        ]

    def test_a_request_that_did_not_come_by_http_has_the_servers_tenant(self) -> None:
        assert callers(tenant="acme").caller_of(None) == Caller(None, "acme")


class TestGateway:
    def test_headers_count_only_where_the_settings_name_them(self) -> None:
        forged = sent(("X-Principal", "ada"), ("X-Tenant", "acme"), key="bob", verified=True)
        assert callers().caller_of(forged) == callers().caller_of(sent(key="bob", verified=True))

    @pytest.mark.parametrize("verified", [None, True])
    def test_a_header_names_the_principal_with_and_without_keys(self, verified: bool | None) -> None:
        found = callers(principal_header="X-Principal")
        ada, again, bob = (
            found.caller_of(sent(("x-principal", name), key="gateway", verified=verified))
            for name in ("ada", "ada", "bob")
        )
        assert ada == again != bob and None not in (ada.principal, bob.principal)

    def test_a_key_of_ones_own_does_not_make_one_the_gateways_principal(self) -> None:
        found = callers(principal_header="X-Principal")
        by_gateway, by_hand = (
            found.caller_of(sent(("X-Principal", "ada"), key=key, verified=True)) for key in ("gateway", "bob")
        )
        assert by_gateway.principal != by_hand.principal

    @pytest.mark.parametrize("values", [(), ("",), (" ",), ("x" * 257,), ("a\tb",), ("ada", "bob"), ("ada", "ada")])
    def test_a_header_that_is_missing_unusable_or_given_twice_makes_nobody(self, values: tuple[str, ...]) -> None:
        presented = sent(*(("X-Principal", value) for value in values), key="gateway", verified=True)
        assert callers(principal_header="X-Principal", tenant="acme").caller_of(presented) == Caller(NOBODY)

    @pytest.mark.parametrize(
        "other", ["alice\u00a0", "alice\u3000", "alice\u2003", "alice\x1f", "alice\x85", "\x1calice", "\ufeffalice"]
    )
    def test_no_two_names_are_one_principal(self, other: str) -> None:
        """Only spaces and tabs around a header's value are dropped. A name that cannot be used names no principal."""
        found = callers(principal_header="X-P")
        shown = [(b"x-p", name.encode()) for name in ("alice", f" {other}\t")]
        alice, another = (found.caller_of(Presented([each])) for each in shown)
        assert alice != another and NOBODY != alice.principal != another.principal

    def test_a_name_that_is_not_utf_8_is_not_another_that_is(self) -> None:
        found = callers(principal_header="X-P")
        ways = [found.caller_of(Presented([(b"x-p", "é".encode(code))])) for code in ("utf-8", "latin-1")]
        assert ways[1].principal == NOBODY != ways[0].principal

    def test_a_gateway_that_sends_no_header_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """Otherwise nothing but missing drafts would show it."""
        found = callers(principal_header="X-Principal", tenant_header="X-Tenant")
        found.caller_of(sent(("X-Principal", "ada")))
        assert not caplog.messages
        for _ in range(3):
            found.caller_of(sent(("X-Tenant", "acme")))
            found.caller_of(sent(("X-Principal", "ada"), ("X-Tenant", "")))
        assert [
            ("X-Principal (principal_header)" in line, "X-Tenant (tenant_header)" in line) for line in caplog.messages
        ] == [
            (True, False),
            (False, True),
        ]

    def test_a_header_names_the_tenant_and_tells_equal_principals_of_two_tenants_apart(self) -> None:
        found = callers(principal_header="X-Principal", tenant_header="X-Tenant", tenant="default")
        acme, rival, none = (
            found.caller_of(sent(("X-Principal", "ada"), *tenant))
            for tenant in ([("X-Tenant", "acme")], [("X-Tenant", "rival")], [])
        )
        assert (acme.tenant, rival.tenant, none.tenant) == ("acme", "rival", "default")
        assert len({acme.principal, rival.principal, none.principal}) == 3

    @pytest.mark.parametrize("values", [("",), ("x" * 257,), ("acme", "rival")])
    def test_an_unusable_tenant_makes_nobody(self, values: tuple[str, ...]) -> None:
        presented = sent(*(("X-Tenant", value) for value in values))
        assert callers(tenant_header="X-Tenant").caller_of(presented) == Caller(NOBODY)

    @pytest.mark.parametrize("setting", ["principal_header", "tenant_header", "api_keys_file"])
    def test_without_http_nobody_said_who_it_is(self, setting: str, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("")
        found = callers(SECRET, tenant="acme", **{setting: str(keys) if setting == "api_keys_file" else "X-Name"})
        assert found.caller_of(None) == Caller(NOBODY, "acme")

    @pytest.mark.parametrize("name", ["", "X Principal", "x:y", "x\n"])
    def test_an_impossible_header_name_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="principal_header"):
            load_settings({"agentspec": {"principal_header": name}}, environ={})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# whose keys these are\n\n{digest('ada')} acme\n{digest('bob').upper()}   rival corp \n")
    return file


class TestApiKeysFile:
    @pytest.mark.parametrize("verified", [None, True])
    def test_a_key_brings_its_tenant_with_and_without_vllms_keys(self, path: Path, verified: bool | None) -> None:
        found = callers(api_keys_file=str(path), tenant="default")
        ada, bob = (found.caller_of(sent(key=key, verified=verified)) for key in ("ada", "bob"))
        assert (ada.tenant, bob.tenant) == ("acme", "rival corp")
        assert ada.principal != bob.principal and None not in (ada.principal, bob.principal)

    def test_a_key_that_it_does_not_name_has_the_servers_tenant(self, path: Path) -> None:
        found = callers(api_keys_file=str(path), tenant="default")
        checked = found.caller_of(sent(key="eve", verified=True))
        assert checked.tenant == "default" and checked.principal not in (None, NOBODY)
        unchecked = found.caller_of(sent(key="eve"))
        assert unchecked == Caller(None, "default") == found.caller_of(sent())

    def test_a_key_of_the_file_that_vllm_refused_is_nobody(self, path: Path) -> None:
        assert callers(api_keys_file=str(path)).caller_of(sent(key="ada", verified=False)) == Caller(NOBODY)

    def test_a_header_cannot_move_a_key_to_another_tenant(self, path: Path) -> None:
        found = callers(api_keys_file=str(path), tenant_header="X-Tenant")
        assert found.caller_of(sent(("X-Tenant", "rival"), key="ada", verified=True)).tenant == "acme"
        assert found.caller_of(sent(("X-Tenant", "rival"), key="eve", verified=True)).tenant == "rival"

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ("sk-very-secret acme", "SHA-256"),
            (f"{'0' * 63} acme", "SHA-256"),
            ("0" * 64, "no tenant; name it behind the digest"),
            (f"{'0' * 64} {'x' * 300}", "tenant: at most 256"),
            (f"{hashlib.sha256(b'ada').hexdigest()} rival", "another tenant"),
        ],
    )
    def test_an_error_names_file_and_line_and_quotes_nothing(self, path: Path, line: str, what: str) -> None:
        path.write_text(path.read_text() + line)
        with pytest.raises(ConfigurationError, match=rf"{path}, line 5: .*{what}") as error:
            ApiKeysFile(path)
        assert "secret" not in str(error.value)

    def test_a_tab_divides_key_and_tenant_as_a_space_does(self, path: Path) -> None:
        path.write_text(f"{hashlib.sha256(b'tabbed').hexdigest()}\tacme\n")
        assert ApiKeysFile(path).tenant_of("tabbed") == "acme"

    def test_a_comment_may_be_indented(self, path: Path) -> None:
        path.write_text(f"  # of ada\n\t#\n{digest('ada')} acme\n")
        assert ApiKeysFile(path).tenant_of("ada") == "acme"

    def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(self, path: Path) -> None:
        path.write_bytes(b"\xef\xbb\xbf" + f"{digest('ada')} acme".encode())
        assert ApiKeysFile(path).tenant_of("ada") == "acme"

    def test_a_missing_file_and_one_of_bytes_are_clear_errors(self, tmp_path: Path) -> None:
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        for name, why in (("none", "No such file"), ("bytes", "not UTF-8")):
            with pytest.raises(ConfigurationError, match=rf"api_keys_file .*{name}.*{why}"):
                ApiKeysFile(tmp_path / name)

    def test_a_change_is_seen_within_a_second_and_a_wrong_one_leaves_what_was(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        caplog.set_level("INFO")
        found = ApiKeysFile(path)
        for tenant in ("moved", "again"):
            before = found.tenant_of("ada")
            path.write_text(f"{digest('ada')} {tenant}\n")
            os.utime(path, ns=(0, int(now[0] * 1e9)))  # both versions have the same size, and the clock may be coarse
            now[0] += 0.9
            assert found.tenant_of("ada") == before
            now[0] += 0.2
            assert (found.tenant_of("ada"), found.tenant_of("bob")) == (tenant, None)
        assert [line.endswith("has changed: 1 keys in force") for line in caplog.messages] == [True, True]
        caplog.clear()
        path.write_text("sk-secret moved again\n")
        for _ in range(5):
            now[0] += 1.1
            assert found.tenant_of("ada") == "again"
        assert [record.getMessage().count("line 1") for record in caplog.records] == [1]
        assert "sk-secret" not in caplog.text
        path.unlink()
        now[0] += 1.1
        assert found.tenant_of("ada") == "again"

    def test_another_file_in_its_place_is_read_though_its_size_and_time_are_the_same(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Programs that copy files keep their times, and a line of one key is as long as that of another."""
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        found, before = ApiKeysFile(path), path.stat()
        other = path.with_name("other")
        other.write_text(path.read_text().replace(digest("ada"), digest("eve")))
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        now[0] += 1.1
        assert (found.tenant_of("ada"), found.tenant_of("eve")) == (None, "acme")

    def test_a_change_while_it_is_read_at_the_start_is_seen(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        read = Path.read_text

        def changed_at_once(file: Path, **options: Any) -> str:
            text = read(file, **options)
            file.write_text(f"{digest('bob')} moved\n")
            return text

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Path, "read_text", changed_at_once)
            found = ApiKeysFile(path)
        now[0] += 1.1
        assert (found.tenant_of("ada"), found.tenant_of("bob")) == (None, "moved")

    def test_its_keys_stay_in_force_where_its_folder_has_become_a_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        folder = path.with_name("folder")
        folder.mkdir()
        found = ApiKeysFile(path.rename(folder / "keys"))
        shutil.rmtree(folder)
        folder.write_text("a file")
        now[0] += 1.1
        assert found.tenant_of("ada") == "acme"

    def test_a_file_that_is_being_written_takes_no_key_away(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Programs empty a file before they write it. Meanwhile, callers must not become one principal."""
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        found = callers(api_keys_file=str(path))
        ada = found.caller_of(sent(key="ada"))
        path.write_bytes(b"")
        for _ in range(3):
            now[0] += 1.1
            assert found.caller_of(sent(key="ada")) == ada != Caller(None, None)
        assert [record.getMessage().count(f"{path}: empty") for record in caplog.records] == [1]
        path.write_text("# nobody any more\n")
        now[0] += 1.1
        assert found.caller_of(sent(key="ada")) == Caller(None, None)

    def test_a_file_that_is_empty_at_the_start_names_no_key(self, path: Path) -> None:
        path.write_bytes(b"")
        assert not ApiKeysFile(path).has("ada")

    def test_a_folder_of_a_user_who_does_not_exist_is_a_wrong_setting(self) -> None:
        with pytest.raises(ConfigurationError, match=r"api_keys_file ~no-such-user/keys: .*; write the path out"):
            ApiKeysFile("~no-such-user/keys")

    def test_a_file_that_may_be_read_at_last_is_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """New permissions change neither time nor size. Keys that the file no longer has must not stay valid."""
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        found = ApiKeysFile(path)
        path.write_text(f"{digest('bob')} moved\n")
        with monkeypatch.context() as denied:
            denied.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
            now[0] += 1.1
            assert found.tenant_of("ada") == "acme"
        time.sleep(0.05)  # a file's clock is coarse
        path.chmod(0o640)
        now[0] += 1.1
        assert (found.tenant_of("ada"), found.tenant_of("bob")) == (None, "moved")

    def test_a_file_that_could_not_be_read_for_a_while_is_read_without_another_change(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A process with too many open files missed the change for ever: keys that were taken out stayed in force."""
        now = [1000.0]
        monkeypatch.setattr("agentspec.server_ext.identity.callers.time.monotonic", lambda: now[0])
        found = ApiKeysFile(path)
        path.write_text(f"{digest('bob')} moved\n")
        with monkeypatch.context() as full:
            full.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
            for _ in range(3):
                now[0] += 1.1
                assert found.tenant_of("ada") == "acme"
        assert [record.getMessage().count("Too many open files") for record in caplog.records] == [1]
        now[0] += 1.1
        assert (found.tenant_of("ada"), found.tenant_of("bob")) == (None, "moved")
        path.write_text(f"{digest('ada')} back again\n")
        with monkeypatch.context() as full:
            full.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
            now[0] += 1.1
            assert found.tenant_of("bob") == "moved"
        assert len(caplog.records) == 2, "each time that it cannot be read is logged once"


class TestAdminKey:
    def test_only_the_whole_admin_key_is_the_admin_key(self) -> None:
        environ = {"AGENTSPEC_ADMIN_KEY": "0123456789abcdef"}
        assert shows_admin_key(sent(key="0123456789abcdef", verified=False), environ)
        for presented in (None, sent(), sent(key="0123456789abcde"), sent(("X-Admin", "0123456789abcdef"))):
            assert not shows_admin_key(presented, environ)
        assert not shows_admin_key(sent(key=""), {}) and not shows_admin_key(sent(), {"AGENTSPEC_ADMIN_KEY": ""})
        assert not shows_admin_key(sent(key="0123456789abcdef"), {})


def test_a_file_without_an_end_counts_once_it_has_stopped_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a tenant that is only half written may be another tenant's."""
    monkeypatch.setattr("agentspec.server_ext.identity.callers._LOOK_AGAIN_SECONDS", 0.0)
    path, digest = tmp_path / "keys", hashlib.sha256(b"key").hexdigest()
    path.write_text("# no key yet\n")
    unnamed = ApiKeysFile(path)
    path.write_text(f"{digest} team-1")
    assert unnamed.tenant_of("key") is None
    path.write_text(f"{digest} team-12\n")
    keys = ApiKeysFile(path)
    assert unnamed.tenant_of("key") == "team-12"
    path.write_text(f"{digest} team-1")
    assert keys.tenant_of("key") == "team-12"
    path.write_text(f"{digest} team-13")
    assert keys.tenant_of("key") == "team-12"
    assert keys.tenant_of("key") == "team-13"
