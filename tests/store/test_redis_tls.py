"""Test TLS to Redis: certificates are checked, and errors name the wrong option of the URL."""

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agentspec.cache.store import open_store
from agentspec.errors import StoreUnavailableError, StoreURLError
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import free_port
from tests.store.test_redis_forms import PASSWORD, works

pytestmark = pytest.mark.usefixtures("patience")


def certificate(folder: Path, days: int = 1) -> None:
    """Write key.pem, and cert.pem for 127.0.0.1, which is its own authority. days: how long it will be valid."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=3))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*private))


@pytest.mark.store
def test_a_certificate_is_checked_against_its_authority(tmp_path: Path) -> None:
    certificate(tmp_path)
    port = free_port()
    options = {"tls-port": str(port), "tls-cert-file": str(tmp_path / "cert.pem"), "requirepass": PASSWORD}
    options |= {"tls-key-file": str(tmp_path / "key.pem"), "tls-ca-cert-file": str(tmp_path / "cert.pem")}
    with RedisServer({**options, "tls-auth-clients": "no"}):
        url = f"rediss://:{PASSWORD}@127.0.0.1:{port}/1"
        works(open_store(f"{url}?ssl_ca_certs={tmp_path / 'cert.pem'}"))
        with pytest.raises(StoreUnavailableError, match=r"(?i)certificate") as error:
            open_store(url).ping()
        assert PASSWORD not in str(error.value)
        open_store(f"{url}?ssl_cert_reqs=none").ping()
    with RedisServer({**options, "tls-auth-clients": "yes"}):
        own = f"&ssl_certfile={tmp_path / 'cert.pem'}&ssl_keyfile={tmp_path / 'key.pem'}"
        open_store(f"{url}?ssl_ca_certs={tmp_path / 'cert.pem'}{own}").ping()
        with pytest.raises(StoreUnavailableError):
            open_store(f"{url}?ssl_ca_certs={tmp_path / 'cert.pem'}").ping()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Return a server's TLS port, and a folder: own/ has its certificate, other/ another one, junk.pem none."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        (folder / name).mkdir()
        certificate(folder / name)
    (folder / "junk.pem").write_text("junk")
    port, own = free_port(), folder / "own"
    options = {"tls-port": str(port), "tls-cert-file": str(own / "cert.pem"), "tls-key-file": str(own / "key.pem")}
    with RedisServer({**options, "tls-ca-cert-file": str(own / "cert.pem"), "requirepass": PASSWORD}):
        yield port, folder


OWN = "ssl_ca_certs={}/own/cert.pem"


@pytest.mark.parametrize("form", ["rediss://{}", "rediss+cluster://{}", "rediss+sentinel://{}/master"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("ssl_ca_certs={}/other/cert.pem", r"refused \(self.signed certificate.*option ssl_ca_certs"),
        ("", r"refused \(self.signed certificate.*option ssl_ca_certs"),
        ("ssl_ca_certs={}/none.pem", "ssl_ca_certs=.*none.pem holds no certificates .*No such file.*name a PEM file"),
        ("ssl_ca_certs={}/junk.pem", "ssl_ca_certs=.*junk.pem holds no certificates"),
        (OWN, "options ssl_certfile and ssl_keyfile"),
        (OWN + "&ssl_certfile={}/none.pem", "ssl_certfile=.*none.pem cannot be used .*No such file"),
        (OWN + "&ssl_certfile={}/own/cert.pem&ssl_keyfile={}/other/key.pem", "ssl_keyfile=.*key.pem cannot be used"),
        (OWN + "&ssl_certfile={}/own/cert.pem&ssl_keyfile={}/none.pem", "No such file or directory: '.*none.pem'"),
    ],
)
def test_an_error_names_the_option_and_the_remedy(
    secured: tuple[int, Path], form: str, options: str, says: str
) -> None:
    port, folder = secured
    url = form.format(f":{PASSWORD}@127.0.0.1:{port}") + "?" + options.replace("{}", str(folder))
    store = open_store(url)
    with pytest.raises(StoreUnavailableError, match=says) as error:
        store.ping()
    assert PASSWORD not in str(error.value)


def test_a_certificate_for_another_name_is_told_from_an_unknown_authority(secured: tuple[int, Path]) -> None:
    port, folder = secured
    with pytest.raises(StoreUnavailableError, match=r"mismatch.*write the name") as error:
        open_store(f"rediss://localhost:{port}?ssl_ca_certs={folder}/own/cert.pem").ping()
    assert "ssl_ca_certs" not in str(error.value)


def test_a_certificate_that_has_expired_is_told_from_one_for_another_name(tmp_path: Path) -> None:
    certificate(tmp_path, days=-1)
    port = free_port()
    files = {"tls-cert-file": str(tmp_path / "cert.pem"), "tls-key-file": str(tmp_path / "key.pem")}
    says = r"has expired\); give the server a certificate that is valid now, or set this machine's clock"
    with (
        RedisServer({"tls-port": str(port), **files, "tls-ca-cert-file": str(tmp_path / "cert.pem")}),
        pytest.raises(StoreUnavailableError, match=says),
    ):
        open_store(f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/cert.pem").ping()


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(
    secured: tuple[int, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server would wait at the terminal for ever."""
    port, folder = secured
    key = serialization.load_pem_private_key((folder / "own" / "key.pem").read_bytes(), password=None)
    encrypted = serialization.BestAvailableEncryption(b"password")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*form))
    options = f"ssl_certfile={folder}/own/cert.pem&ssl_keyfile={tmp_path}/key.pem"
    with pytest.raises(StoreUnavailableError, match=r"ssl_keyfile=.*key\.pem cannot be used .*not encrypted"):
        open_store(f"rediss://127.0.0.1:{port}?{OWN.format(folder)}&{options}").ping()
    told = capfd.readouterr()
    assert "pass phrase" not in told.out + told.err


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(StoreURLError, match="ssl_keyfile needs the certificate of the key, in ssl_certfile"):
        open_store("rediss://host?ssl_keyfile=/key.pem")


def test_a_server_that_is_away_is_no_fault_of_the_certificates(secured: tuple[int, Path]) -> None:
    _, folder = secured
    with pytest.raises(StoreUnavailableError, match="refused") as error:
        open_store(f"rediss://127.0.0.1:1?ssl_ca_certs={folder}/own/cert.pem").ping()
    assert "certificate" not in str(error.value)


@pytest.mark.parametrize("form", ["{}://{}", "{}+cluster://{}", "{}+sentinel://{}/master"])
def test_a_server_without_tls_is_told_from_one_with(
    secured: tuple[int, Path], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.client.SOCKET_TIMEOUT", 1.0)  # it never answers
    with RedisServer({}) as plain, pytest.raises(StoreUnavailableError, match="has no TLS, write redis in place of"):
        open_store(form.format("rediss", f"127.0.0.1:{plain.port}")).ping()
    with pytest.raises(StoreUnavailableError, match="wants TLS, write rediss in place of redis"):
        open_store(form.format("redis", f"127.0.0.1:{secured[0]}")).ping()
