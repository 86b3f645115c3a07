"""Redis over TCP and TLS, and addresses as they are written."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from redis import Redis

from deploy.servers import Server
from services.kv_tier.resp import Address
from shared.testing import MemoryBroker
from tests.services.kv_tier.kit import Lender, content, serving, tier_on


def certificate(folder: Path) -> tuple[Path, Path]:
    """Of localhost, signed by itself."""
    paths = folder / "certificate.pem", folder / "key.pem"
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to make a certificate with")
    words = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run([openssl, *words, *name, *files], check=True, capture_output=True)
    return paths


@pytest.mark.parametrize(
    ("scheme", "trusted"), [("redis", True), ("rediss", True), ("rediss", False)]
)
async def test_blocks_come_over_tcp_and_tls(
    scheme: str,
    trusted: bool,
    redis: Redis,
    redis_server: Server,
    broker: MemoryBroker,
    worker: Lender,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose certificate nobody vouches for is not talked to."""
    tls = None
    if scheme == "rediss":
        public, private = certificate(tmp_path)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(public, private)
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(public))

    async def pump(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
        while some := await one.read(1 << 16):
            other.write(some)
            await other.drain()
        other.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = unquote(urlsplit(redis_server.url).path)
        back, forth = await asyncio.open_unix_connection(path)
        both = pump(reader, forth), pump(back, writer)
        await asyncio.gather(*both, return_exceptions=True)

    async with await asyncio.start_server(relay, "localhost", 0, ssl=tls) as listener:
        port = listener.sockets[0].getsockname()[1]
        url = f"{scheme}://:{redis_server.password}@localhost:{port}/0"
        async with serving(tier_on(broker, url)) as tier:
            assert await worker.store(0, 1) == (2 if trusted else 0)
            assert await worker.load([0, 1]) == [content(0), content(1)][: 2 * trusted]
            assert (tier.stats()["failures"] > 0) != trusted


def test_an_address_is_read_whole() -> None:
    """User, password and path are quoted in it; what is logged has no password."""
    address = Address("rediss://me:p%40ss@host:7/3")
    assert (address.user, address.password, address.tls) == ("me", "p@ss", True)
    assert (address.host, address.port, address.database) == ("host", 7, 3)
    assert str(address) == "host:7/3"
    local = Address("unix://:secret@/a%20b/redis.sock?db=2")
    assert (local.path, local.password, local.database) == ("/a b/redis.sock", "secret", 2)
    assert "secret" not in str(local)


@pytest.mark.parametrize("url", ["", "http://host", "redis://", "redis://host/x", "redis://host:x"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Address(url)
