"""The shared tier on a real Valkey: contract suite, layout, logins, errands of an operator."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis_proxy import Proxy
from tier_contract import SOON, Opened, TierContract, TierFactory, content, names_of_chain

from kvstore.tiers import redis_admin
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_layout import (
    PART_BYTES_MAX,
    REST_BYTES_MAX,
    part_key,
    part_sizes,
    prefix,
    set_requests,
)
from seams.errors import LaunchError

PATIENT_S = 30.0  # a busy machine's server is not a failing one
SIZES: Mapping[int, int] = {0: 1 << 16, 1: 4096, 2: 20000}  # 2 parts, 1 and 2
_places = count()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(256 << 20) as running:
        yield running


class RedisFactory(TierFactory):
    """Each `fresh` is a namespace of its own in one server."""

    sizes = SIZES
    persistent = True
    shared = True
    bounded = False
    verifies = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.namespace = ""

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> RedisTier:
        self.namespace = f"test{next(_places)}"
        return self.reopen(representation)

    def reopen(self, representation: str = "bf16-a") -> RedisTier:
        return RedisTier(
            self.url, representation, namespace=self.namespace, threads=4, stall_s=PATIENT_S
        )

    def damage(self, name: BlockName) -> None:
        with redis.Redis.from_url(self.url) as client:
            key = part_key(prefix(self.namespace, "bf16-a"), name, 1)
            value = bytearray(client.get(key) or b"")
            value[len(value) // 2] ^= 1
            client.set(key, bytes(value))

    def close(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


@pytest.fixture
def factory(server: EmbeddedValkey) -> Iterator[RedisFactory]:
    made = RedisFactory(server.url)
    yield made
    made.close()


class TestRedisContract(TierContract):
    pass


# -- layout --------------------------------------------------------------------------------------


@given(st.integers(0, 40 << 20))
def test_parts_make_up_the_payload(payload_bytes: int) -> None:
    rest, *front = part_sizes(payload_bytes)
    assert rest + sum(front) == payload_bytes
    assert 0 <= rest <= REST_BYTES_MAX
    assert all(REST_BYTES_MAX // 2 < size <= PART_BYTES_MAX for size in front)


@pytest.mark.parametrize("kib", [256, 1024, 2048])
def test_a_block_of_a_power_of_two_wastes_nothing(kib: int) -> None:
    rest, *front = part_sizes(kib << 10)
    assert rest <= 64 and all((size + 16) & (size + 15) == 0 for size in front)


@given(st.integers(0, 3 << 20), st.integers(1, 10**6))
def test_requests_are_well_formed_and_carry_every_byte_once(size: int, ttl_s: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (name,) = names_of_chain(1, 1)
    buffers, replies = set_requests(b"p:", name, b"HEADER", memoryview(payload), ttl_s)
    stream = b"".join(bytes(buffer) for buffer in buffers)
    values = []
    while stream:
        words = []
        line, _, stream = stream.partition(b"\r\n")
        for _ in range(int(line[1:])):
            line, _, stream = stream.partition(b"\r\n")
            length = int(line[1:])
            words.append(stream[:length])
            assert stream[length : length + 2] == b"\r\n"
            stream = stream[length + 2 :]
        assert words[0] == b"SET" and words[3:] == [b"EX", b"%d" % ttl_s]
        values.append((words[1], words[2]))
    assert len(values) == replies
    assert values[-1][0] == part_key(b"p:", name, 0), "the part that makes it exist comes last"
    assert values[-1][1].startswith(b"HEADER")
    joined = b"".join(value for _, value in values[:-1]) + values[-1][1][len(b"HEADER") :]
    assert joined == payload


def test_keys_say_nothing_but_the_salted_key(server: EmbeddedValkey) -> None:
    names = names_of_chain(60, 2)
    with_tier(server.url, "keys", names)
    with redis.Redis.from_url(server.url) as client:
        keys = sorted(bytes(key) for key in client.scan_iter(match=b"banyan:keys:*"))
        ttls = [client.ttl(key) for key in keys]
    expected = sorted(
        f"banyan:keys:bf16-a:{name.key.hex()}:0.0:{part}".encode()
        for name in names
        for part in range(len(part_sizes(SIZES[0])))
    )
    assert keys == expected
    assert all(0 < ttl <= 24 * 3600 for ttl in ttls)


@pytest.mark.parametrize("bad", ["a b", "a*", "a:b", "", "x" * 101])
def test_a_namespace_is_a_plain_word(bad: str) -> None:
    with pytest.raises(AssertionError):
        prefix(bad, "bf16-a")


def with_tier(url: str, namespace: str, names: list[BlockName]) -> None:
    tier = RedisTier(url, "bf16-a", namespace=namespace, stall_s=PATIENT_S)
    Opened(tier, SIZES).keep(names)
    tier.close()


def test_a_large_load_takes_several_round_trips(server: EmbeddedValkey) -> None:
    sizes = {0: 3 << 20}
    names = names_of_chain(61, 6)
    tier = RedisTier(server.url, "bf16-a", namespace="large", stall_s=PATIENT_S)
    use = Opened(tier, sizes)
    use.keep(names)
    assert use.load([names[5], *names]) == [Status.OK] * 7
    assert tier.stats().stored_bytes >= 6 * sizes[0]
    tier.close()


# -- logging in ----------------------------------------------------------------------------------


def test_a_login_may_be_forbidden_everything_but_four_commands(server: EmbeddedValkey) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "kv", "reset", "on", ">s3cret/%", "~banyan:acl:*",
            "+get", "+set", "+exists", "+del",
        )  # fmt: skip
    url = f"unix://kv:s3cret%2F%25@{server.socket_path}"
    names = names_of_chain(62, 3)
    tier = RedisTier(url, "bf16-a", namespace="acl", stall_s=PATIENT_S)
    use = Opened(tier, SIZES)
    use.keep(names)
    assert use.lookup(names) == [True] * 3
    assert use.load(names) == [Status.OK] * 3
    tier.discard(names[:1])
    assert use.load(names) == [Status.MISS, Status.OK, Status.OK]
    assert tier.stats().state == "ok"
    tier.close()
    elsewhere = RedisTier(url, "bf16-a", namespace="other", stall_s=PATIENT_S)
    assert Status.OK not in Opened(elsewhere, SIZES).store(names)
    elsewhere.close()


@pytest.mark.parametrize("login", ["wrong", ""])
def test_a_wrong_password_is_a_broken_tier_and_no_exception(
    server: EmbeddedValkey, login: str
) -> None:
    tier = RedisTier(f"unix://:{login}@{server.socket_path}", "bf16-a", namespace="x")
    use = Opened(tier, SIZES)
    names = names_of_chain(63, 3)
    for _ in range(5):
        assert Status.OK not in use.store(names)
        assert use.lookup(names) == [False] * 3
    assert tier.stats().state == "broken"
    tier.close()


def test_a_database_of_its_own(server: EmbeddedValkey) -> None:
    names = names_of_chain(64, 1)
    with_tier(f"{server.url}?db=3", "db", names)
    tier = RedisTier(server.url, "bf16-a", namespace="db", stall_s=PATIENT_S)
    assert Opened(tier, SIZES).load(names) == [Status.MISS]
    tier.close()


def test_over_tls(server: EmbeddedValkey, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    proxy = Proxy(server.socket_path, context)
    password = server.url.split(":")[2].split("@")[0]
    trusted = proxy.url(password, scheme="rediss", query=f"?ssl_ca_certs={cert}")
    names = names_of_chain(65, 3)
    tier = RedisTier(trusted, "bf16-a", namespace="tls", stall_s=PATIENT_S)
    use = Opened(tier, {0: 1 << 20})
    use.keep(names)
    assert use.load(names) == [Status.OK] * 3
    tier.close()
    stranger = RedisTier(proxy.url(password, scheme="rediss"), "bf16-a", namespace="tls")
    assert Status.OK not in Opened(stranger, {0: 1 << 20}).load(names)
    stranger.close()
    proxy.close()


@pytest.mark.parametrize(
    "url", ["", "http://host", "redis://host?frobnicate=1", "redis://host:port", "redis://[::1"]
)
def test_what_is_no_url_of_ours_is_said_at_once(url: str) -> None:
    with pytest.raises(LaunchError):
        RedisTier(url, "bf16-a", namespace="x")


# -- the operator's errands ----------------------------------------------------------------------


def test_survey_verify_and_clear(server: EmbeddedValkey) -> None:
    names = names_of_chain(66, 5)
    factory = RedisFactory(server.url)
    one, other = factory.fresh(), factory.reopen("fp8-b")
    Opened(one, SIZES).keep(names)
    Opened(other, SIZES).keep(names[:2])
    space = factory.namespace
    held = redis_admin.survey(server.url, space)
    assert {key: value.blocks for key, value in held.items()} == {"bf16-a": 5, "fp8-b": 2}
    assert held["bf16-a"].bytes >= 5 * SIZES[0]
    assert redis_admin.verify(server.url, space) == redis_admin.Verified(7, 0, {})
    factory.damage(names[1])
    start = prefix(space, "bf16-a")
    with redis.Redis.from_url(server.url) as client:
        client.delete(part_key(start, names[2], 1))
        client.rename(part_key(start, names[3], 0), part_key(start, names[4], 0))
        client.lpush(start + b"00:0.0:0", b"x")
    seen = redis_admin.verify(server.url, space, remove=True)
    assert (seen.blocks, seen.partial) == (3, 1)
    assert dict(seen.corrupt) == {"payload": 1, "key": 1, "magic": 1}
    assert redis_admin.verify(server.url, space) == redis_admin.Verified(3, 0, {})
    one.clear()
    assert set(redis_admin.survey(server.url, space)) == {"fp8-b"}
    assert redis_admin.clear(server.url, space) > 0
    assert redis_admin.survey(server.url, space) == {}
    one.close()
    other.close()


@pytest.mark.parametrize("errand", [redis_admin.survey, redis_admin.verify, redis_admin.clear])
def test_an_errand_without_a_server_is_one_error(errand: object) -> None:
    assert callable(errand)
    with pytest.raises(LaunchError):
        errand("unix:///nowhere/valkey.sock", "x")


# -- the server of our own -----------------------------------------------------------------------


def test_the_embedded_server_lets_nobody_in_and_leaves_nothing() -> None:
    with EmbeddedValkey(32 << 20) as running:
        folder = running.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "valkey.conf").stat().st_mode) == 0o600
        with redis.Redis.from_url(running.url) as client:
            pid = client.info("server")["process_id"]
            assert client.config_get("maxmemory")["maxmemory"] == str(32 << 20)
            assert client.config_get("port")["port"] == "0"
            assert client.config_get("save")["save"] == ""
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists():
            assert running.url.split(":")[2].split("@")[0].encode() not in command.read_bytes()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(running.socket_path))
            stranger.sendall(b"GET x\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")
        names = names_of_chain(67, 3)
        with_tier(running.url, "mine", names)
    assert not folder.exists()
    gone(pid)
    running.close()


def test_the_embedded_server_evicts_when_it_is_full() -> None:
    with EmbeddedValkey(16 << 20) as running:
        tier = RedisTier(running.url, "bf16-a", namespace="x", stall_s=PATIENT_S)
        use = Opened(tier, {0: 1 << 20})
        names = names_of_chain(68, 40)
        for name in names:
            assert use.store([name]) == [Status.OK]
        assert set(use.load(names)) == {Status.OK, Status.MISS}, "some evicted, nothing wrong"
        tier.close()


def test_the_embedded_server_dies_with_its_owner() -> None:
    program = (
        "import redis, time\n"
        "from kvstore.tiers.embedded import EmbeddedValkey\n"
        "running = EmbeddedValkey(16 << 20)\n"
        "pid = redis.Redis.from_url(running.url).info('server')['process_id']\n"
        "print(pid, running.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    assert Path(folder).is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    gone(int(pid))
    for _ in range(500):
        if not Path(folder).exists():
            break
        time.sleep(0.02)
    assert not Path(folder).exists()


def gone(pid: int) -> None:
    for _ in range(500):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail("still running")


def test_an_embedded_server_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        EmbeddedValkey(16 << 20, parent=tmp_path / "missing")
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(LaunchError):
        EmbeddedValkey(16 << 20, parent=deep)
    assert not any(deep.iterdir())


def test_content_is_what_the_suite_says(factory: RedisFactory) -> None:
    """The multi-part sizes of this file do reach the server."""
    tier = factory.fresh()
    (name,) = names_of_chain(69, 1)
    Opened(tier, SIZES).keep([name])
    sizes = part_sizes(SIZES[0])
    with redis.Redis.from_url(factory.url) as client:
        start = prefix(factory.namespace, "bf16-a")
        values = [client.get(part_key(start, name, part)) or b"" for part in range(len(sizes))]
    assert len(sizes) > 1
    rest = values[0][len(values[0]) - sizes[0] :]
    assert b"".join(values[1:]) + rest == content(name, SIZES)
    assert tier.lookup([name], SOON) == [True]
    tier.close()
