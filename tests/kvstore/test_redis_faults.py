"""Rows 11, 14 and 15: a server that is down, slow, frozen, full, read only, or lies.

Whatever it does, no exception leaves the tier, no wrong byte comes back, calls return, the breaker
opens and closes again. Bounds of time are generous here; the `soak` run holds the real ones.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import pytest
import redis
from redis_proxy import Mode, Proxy
from tier_contract import Opened, names_of_chain

from kvstore import record
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_layout import FIRST_BYTES_MAX, part_key, part_sizes, prefix
from kvstore.tiers.redis_wire import Deadline, LinkFault, ServerError, Wire
from seams.clock import SystemClock, VirtualClock

SIZES = {0: 300_000, 1: 4096}
DEADLINE_S = 0.3
HANGS_S = 20.0  # far beyond any deadline here: a call that takes this long hangs
MISSING = {Status.MISS, Status.CORRUPT}


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(64 << 20) as running:
        yield running


@pytest.fixture
def proxy(server: EmbeddedValkey) -> Iterator[Proxy]:
    made = Proxy(server.socket_path)
    yield made
    made.close()


def password_of(server: EmbeddedValkey) -> str:
    return server.url.split(":")[2].split("@")[0]


def through(proxy: Proxy, server: EmbeddedValkey) -> RedisTier:
    return RedisTier(proxy.url(password_of(server)), "bf16-a", namespace="faults")


def until(true: Callable[[], bool], what: str, within_s: float = 60.0) -> float:
    """Seconds it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within_s, what
        time.sleep(0.02)
    return time.monotonic() - began


class Stopped:
    """SIGSTOP of the server itself."""

    def __init__(self, server: EmbeddedValkey) -> None:
        with redis.Redis.from_url(server.url) as client:
            self.pid = client.info("server")["process_id"]

    def begin(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Misled:
    """A mode of the proxy."""

    def __init__(self, proxy: Proxy, mode: Mode) -> None:
        self.proxy, self.mode = proxy, mode

    def begin(self) -> None:
        self.proxy.mode = self.mode

    def end(self) -> None:
        self.proxy.mode = Mode.PASS


FAULTS = ["stopped", *(mode.value for mode in Mode if mode is not Mode.PASS)]


@pytest.mark.parametrize("kind", FAULTS)
def test_trouble_is_felt_shortly_and_ends(kind: str, proxy: Proxy, server: EmbeddedValkey) -> None:
    felt_s, overrun_s, closed_s = trouble(kind, proxy, server)
    print(f"{kind}: felt {felt_s:.2f} s, overrun {overrun_s:.3f} s, closed {closed_s:.2f} s after")


@pytest.mark.soak
@pytest.mark.parametrize("kind", FAULTS)
def test_trouble_within_the_figures(kind: str, proxy: Proxy, server: EmbeddedValkey) -> None:
    felt_s, overrun_s, closed_s = trouble(kind, proxy, server)
    assert felt_s <= 1.0 and overrun_s <= 0.1 and closed_s <= 10.0


def trouble(kind: str, proxy: Proxy, server: EmbeddedValkey) -> tuple[float, float, float]:
    """(seconds callers waited until the breaker opened, the most a call overran its deadline,
    seconds from the fault's end to a hit)."""
    fault = Stopped(server) if kind == "stopped" else Misled(proxy, Mode(kind))
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(1, 3)
    use.keep(names)
    assert use.load(names) == [Status.OK] * 3
    felt_s = overrun_s = 0.0
    fault.begin()
    try:
        for call in range(50):
            began = time.monotonic()
            if call % 3:
                assert len(use.load(names, DEADLINE_S)) == 3
            else:
                use.lookup(names, DEADLINE_S)
            took_s = time.monotonic() - began
            assert took_s < HANGS_S
            felt_s += took_s
            overrun_s = max(overrun_s, took_s - DEADLINE_S)
            if tier.stats().state == "broken":
                break
        assert tier.stats().state == "broken", "callers kept waiting"
        stored = use.store(names_of_chain(2, 2), DEADLINE_S)
        assert set(stored) <= {Status.DROPPED, Status.FAILED, Status.LATE}
    finally:
        fault.end()
    closed_s = until(lambda: use.load(names) == [Status.OK] * 3, "never found again")
    until(lambda: use.store(names_of_chain(2, 2)) == [Status.OK] * 2, "stores never came back")
    assert tier.stats().state == "ok"
    tier.close()
    return felt_s, overrun_s, closed_s


def test_an_open_breaker_calls_nobody(proxy: Proxy, server: EmbeddedValkey) -> None:
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(3, 2)
    use.keep(names)
    proxy.mode = Mode.FROZEN
    while tier.stats().state != "broken":
        use.load(names, DEADLINE_S)
    before = tier.stats()
    accepted = proxy.accepted
    for _ in range(500):
        assert use.load(names) == [Status.MISS] * 2
        assert use.store(names) == [Status.DROPPED] * 2
        assert use.lookup(names) == [False] * 2
    after = tier.stats()
    assert after.failed == before.failed, "none of them waited for anybody"
    assert proxy.accepted - accepted <= 8, "probes, at their own pace"
    tier.close()


def test_a_connection_with_replies_under_way_is_never_used_again(
    proxy: Proxy, server: EmbeddedValkey
) -> None:
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(21, 2)
    use.keep(names)
    assert proxy.accepted == 1
    proxy.mode = Mode.FROZEN
    assert use.load(names[:1], 0.05) == [Status.LATE]
    proxy.mode = Mode.PASS
    assert use.load(names) == [Status.OK] * 2
    assert proxy.accepted == 2 and not tier.stats().corrupt
    tier.close()


@pytest.mark.parametrize("call", ["lookup", "load"])
def test_rare_faults_do_not_add_up(call: str, proxy: Proxy, server: EmbeddedValkey) -> None:
    """A connection cut now and then, between calls that find nothing and are well."""
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(22, 2)
    clean: dict[str, Callable[[], object]] = {
        "lookup": lambda: use.lookup(names),
        "load": lambda: use.load(names),
    }
    for _ in range(6):
        for _ in range(8):
            clean[call]()
        proxy.mode = Mode.FROZEN
        assert use.load(names, 0.05) == [Status.LATE] * 2
        use.load(names, 0.05)
        proxy.mode = Mode.PASS
        assert tier.stats().state == "ok"
    tier.close()


@pytest.mark.parametrize("call", ["lookup", "load", "store"])
def test_a_server_that_answers_with_errors_opens_the_breaker(
    call: str, proxy: Proxy, server: EmbeddedValkey
) -> None:
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(23, 1)
    use.keep(names)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-exists", "-get")
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: use.lookup(names),
        "load": lambda: use.load(names),
        "store": lambda: use.store(names),
    }
    for _ in range(3):
        assert tier.stats().state == "ok"
        calls[call]()
    assert tier.stats().state == "broken"
    tier.close()


def test_no_server_at_the_start_and_one_later(proxy: Proxy, server: EmbeddedValkey) -> None:
    proxy.mode = Mode.DOWN
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(4, 2)
    for _ in range(5):
        assert Status.OK not in use.store(names)
    proxy.mode = Mode.PASS
    until(lambda: use.store(names) == [Status.OK] * 2, "never noticed")
    assert use.load(names) == [Status.OK] * 2
    tier.close()


def test_a_restarted_server_is_an_empty_one(proxy: Proxy, server: EmbeddedValkey) -> None:
    tier = through(proxy, server)
    use = Opened(tier, SIZES)
    names = names_of_chain(5, 3)
    use.keep(names)
    with EmbeddedValkey(64 << 20) as second:
        with redis.Redis.from_url(second.url) as client:
            client.config_set("requirepass", password_of(server))
        proxy.upstream = second.socket_path
        proxy.cut()
        until(lambda: use.load(names) == [Status.MISS] * 3, "misses")
        until(lambda: use.store(names) == [Status.OK] * 3, "stores")
        assert use.load(names) == [Status.OK] * 3
        tier.close()


def test_threads_in_the_middle_of_everything(proxy: Proxy, server: EmbeddedValkey) -> None:
    """Four threads at work while the network does one thing after the other: exact or nothing."""
    seed = 6
    print(f"seed {seed}")
    tier = through(proxy, server)
    escaped: list[BaseException] = []
    done = threading.Event()

    def work(number: int) -> None:
        rng = random.Random(seed * 10 + number)
        use = Opened(tier, SIZES)
        try:
            while not done.is_set():
                names = names_of_chain(rng.randrange(6), 3)
                rng.choice([use.store, use.load, use.lookup])(names, rng.choice([0.02, 0.2]))
        except BaseException as error:
            escaped.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for mode in (Mode.RESET, Mode.PASS, Mode.DRIP, Mode.PASS, Mode.DOWN, Mode.PASS):
        time.sleep(0.3)
        proxy.mode = mode
    done.set()
    for thread in threads:
        thread.join(HANGS_S)
    assert not any(thread.is_alive() for thread in threads) and not escaped, escaped
    use, names = Opened(tier, SIZES), names_of_chain(7, 2)
    until(lambda: use.store(names) == [Status.OK] * 2, "recovers")
    tier.close()


# -- a server that takes no stores ---------------------------------------------------------------


def test_a_full_server_drops_stores_and_serves_loads() -> None:
    with EmbeddedValkey(12 << 20, evict=False) as server:
        tier = RedisTier(server.url, "bf16-a", namespace="full")
        use = Opened(tier, SIZES)
        kept: list[BlockName] = []
        for name in names_of_chain(8, 100):
            (status,) = use.store([name])
            if status is Status.DROPPED:
                break
            kept.append(name)
        assert 3 < len(kept) < 99 and tier.stats().state == "full"
        assert use.load(kept) == [Status.OK] * len(kept), "loads go on"
        assert set(use.store(names_of_chain(9, 5))) == {Status.DROPPED}
        assert tier.stats().failed == 0
        tier.discard(kept[:-1])
        fresh = names_of_chain(10, 2)
        until(lambda: use.store(fresh) == [Status.OK] * 2, "room again")
        assert tier.stats().state == "ok"
        assert use.load([*fresh, kept[-1]]) == [Status.OK] * 3
        tier.close()


def test_a_read_only_server_serves_loads(server: EmbeddedValkey) -> None:
    tier = RedisTier(server.url, "bf16-a", namespace="readonly")
    use = Opened(tier, SIZES)
    names, more = names_of_chain(11, 3), names_of_chain(12, 3)
    use.keep(names)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")
        assert use.store(more) == [Status.DROPPED] * 3
        assert tier.stats().state == "readonly" and tier.stats().failed == 0
        assert use.load(names) == [Status.OK] * 3
        client.replicaof("NO", "ONE")
    until(lambda: use.store(more) == [Status.OK] * 3, "writes again")
    assert tier.stats().state == "ok"
    tier.close()


def test_a_login_that_may_only_read(server: EmbeddedValkey) -> None:
    names = names_of_chain(13, 2)
    owner = RedisTier(server.url, "bf16-a", namespace="acl")
    Opened(owner, SIZES).keep(names)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "reader", "reset", "on", ">pw", "~banyan:*", "+get", "+exists"
        )
    tier = RedisTier(f"unix://reader:pw@{server.socket_path}", "bf16-a", namespace="acl")
    use = Opened(tier, SIZES)
    assert use.store(names_of_chain(14, 2)) == [Status.DROPPED] * 2
    assert tier.stats().state == "readonly"
    assert use.load(names) == [Status.OK] * 2
    tier.discard(names)
    assert use.load(names) == [Status.OK] * 2, "it could not, and that was no trouble"
    owner.close()
    tier.close()


# -- wrong values --------------------------------------------------------------------------------


class Vandal:
    """Changes what lies in the server, in every way row 14 names."""

    def __init__(self, client: redis.Redis, names: list[BlockName], rng: random.Random) -> None:
        self.client, self.names, self.rng = client, names, rng
        self.start = prefix("vandal", "bf16-a")

    def key(self, name: BlockName, part: int | None = None) -> bytes:
        parts = len(part_sizes(SIZES[name.group]))
        return part_key(self.start, name, self.rng.randrange(parts) if part is None else part)

    def other(self, name: BlockName) -> BlockName:
        same = [n for n in self.names if n.group == name.group and n != name]
        return self.rng.choice(same)

    def value(self, key: bytes) -> bytearray:
        value = self.client.get(key)
        assert isinstance(value, bytes)
        return bytearray(value)

    def flip(self, name: BlockName) -> None:
        key = self.key(name)
        value = self.value(key)
        value[self.rng.randrange(len(value))] ^= 1 << self.rng.randrange(8)
        self.client.set(key, bytes(value))

    def truncate(self, name: BlockName) -> None:
        key = self.key(name)
        value = self.value(key)
        self.client.set(key, bytes(value[: self.rng.randrange(len(value))]))

    def lengthen(self, name: BlockName) -> None:
        extra = self.rng.choice([1, 16, 4096, 70_000])
        self.client.append(self.key(name), self.rng.randbytes(extra))

    def swap(self, name: BlockName) -> None:
        other = self.other(name)
        for part in range(len(part_sizes(SIZES[name.group]))):
            self._exchange(self.key(name, part), self.key(other, part))

    def swap_part(self, name: BlockName) -> None:
        part = self.rng.randrange(len(part_sizes(SIZES[name.group])))
        self._exchange(self.key(name, part), self.key(self.other(name), part))

    def _exchange(self, one: bytes, two: bytes) -> None:
        first, second = bytes(self.value(one)), bytes(self.value(two))
        self.client.set(one, second)
        self.client.set(two, first)

    def foreign_string(self, name: BlockName) -> None:
        size = self.rng.choice([0, 1, 7, 88, 300, 5000, 200_000])
        self.client.set(self.key(name), self.rng.randbytes(size))

    def foreign_type(self, name: BlockName) -> None:
        key = self.key(name)
        self.client.delete(key)
        if self.rng.random() < 0.5:
            self.client.rpush(key, b"x", b"y")
        else:
            self.client.hset(key, "field", "value")

    def giant(self, name: BlockName) -> None:
        self.client.setrange(self.key(name), 3 << 20, b"x")

    def lost_part(self, name: BlockName) -> None:
        self.client.delete(self.key(name))

    def old_layout(self, name: BlockName) -> None:
        key = self.key(name, 0)
        value = self.value(key)
        value[8:10] = (record.VERSION + 1).to_bytes(2, "little")
        self.client.set(key, bytes(value))

    def whole_record(self, name: BlockName, representation: str, written: BlockName) -> None:
        """An intact record, at the place of another."""
        payload = self.rng.randbytes(SIZES[name.group])
        sizes = part_sizes(len(payload))
        offset = 0
        for part, size in enumerate(sizes[1:], 1):
            self.client.set(self.key(name, part), payload[offset : offset + size])
            offset += size
        header = record.encode(written, representation, payload)
        self.client.set(self.key(name, 0), header + payload[offset:])

    def other_model(self, name: BlockName) -> None:
        self.whole_record(name, self.rng.choice(["fp8-b", "bf16-b", "bf16-aa", ""]), name)

    def other_tenant(self, name: BlockName) -> None:
        _, stranger = names_of_chain(self.rng.randrange(1 << 30), 2, name.group)
        field = self.rng.choice(["key", "parent", "tokens"])
        written = name._replace(**{field: getattr(stranger, field)})
        self.whole_record(name, "bf16-a", written)

    def other_rank(self, name: BlockName) -> None:
        self.whole_record(name, "bf16-a", name._replace(rank=name.rank + 1))

    def two_writers(self, name: BlockName) -> None:
        """The header of one payload over the parts of another."""
        payload = self.rng.randbytes(SIZES[name.group])
        rest = payload[len(payload) - part_sizes(len(payload))[0] :]
        header = record.encode(name, "bf16-a", payload)
        self.client.set(self.key(name, 0), header + rest)
        if len(part_sizes(len(payload))) == 1:
            self.flip(name)

    def acts(self) -> list[Callable[[BlockName], None]]:
        return [
            self.flip, self.truncate, self.lengthen, self.swap, self.swap_part,
            self.foreign_string, self.foreign_type, self.giant, self.lost_part, self.old_layout,
            self.other_model, self.other_tenant, self.other_rank, self.two_writers,
        ]  # fmt: skip


SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=SOAK)])
def test_mutated_values_are_never_a_hit(server: EmbeddedValkey, rounds: int) -> None:
    seed = 14
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = [*names_of_chain(15, 4), *names_of_chain(16, 4, 1)]
    tier = RedisTier(server.url, "bf16-a", namespace="vandal", stall_s=30)
    use = Opened(tier, SIZES)
    corrupt = 0
    with redis.Redis.from_url(server.url) as client:
        vandal = Vandal(client, names, rng)
        acts = vandal.acts()
        for turn in range(rounds):
            assert use.store(names) == [Status.OK] * 8, "what was odd is gone and stored again"
            name, act = rng.choice(names), acts[turn % len(acts)]
            act(name)
            status = use.load(names)[names.index(name)]  # and every OK to the byte
            assert status is not Status.OK, act.__name__
            assert status in {*MISSING, Status.FAILED}, act.__name__
            corrupt += status is Status.CORRUPT
            use.load(names)
    stats = tier.stats()
    print(f"{rounds} values: {dict(stats.corrupt)}")
    assert sum(stats.corrupt.values()) >= corrupt > rounds // 2
    assert set(stats.corrupt) <= set(record.FAULTS)
    tier.close()


def test_another_cluster_finds_nothing(server: EmbeddedValkey) -> None:
    names = names_of_chain(17, 3)
    mine = RedisTier(server.url, "bf16-a", namespace="one", stall_s=30)
    Opened(mine, SIZES).keep(names)
    for namespace, representation in (("two", "bf16-a"), ("one", "bf16-b")):
        other = RedisTier(server.url, representation, namespace=namespace, stall_s=30)
        assert Opened(other, SIZES).lookup(names) == [False] * 3
        assert Opened(other, SIZES).load(names) == [Status.MISS] * 3
        other.close()
    same = RedisTier(server.url, "bf16-a", namespace="one", stall_s=30)
    assert Opened(same, SIZES).load(names) == [Status.OK] * 3
    same.close()
    mine.close()


# -- the protocol --------------------------------------------------------------------------------


@contextmanager
def wire_with(reply: bytes) -> Iterator[Wire]:
    """A wire whose server says `reply` and hangs up."""
    ours, theirs = socket.socketpair()

    def say() -> None:
        with suppress(OSError):
            theirs.sendall(reply)
            theirs.shutdown(socket.SHUT_WR)

    speaker = threading.Thread(target=say)
    with theirs:
        with ours:
            speaker.start()
            yield Wire(ours, Deadline.within(HANGS_S, SystemClock()))
        speaker.join()


ODD = [
    b"", b"\r\n", b"+OK", b":1\r\n", b"*1\r\n$1\r\nx\r\n", b"$\r\n", b"$x\r\n", b"$-\r\n",
    b"$1\xb2\r\n", b"$1_0\r\n", b"$99999999999999999999\r\n", b"$999999999999\r\n", b"$5\r\nab\r\n",
    b"$2\r\nabXX", b"$2\r\nab", b"x" * 100_000, b"_\r\n", b"%1\r\n", b"HTTP/1.1", b"$ 2\r\nab\r\n",
]  # fmt: skip


@pytest.mark.parametrize("reply", [*ODD, b"+OK\r\n"])
def test_what_is_no_value_ends_the_connection(reply: bytes) -> None:
    with wire_with(reply) as wire, pytest.raises(LinkFault):
        wire.bulk(memoryview(bytearray(100)))


@pytest.mark.parametrize("reply", [*ODD, b"+NO\r\n"])
def test_what_is_no_ok_ends_the_connection(reply: bytes) -> None:
    with wire_with(reply) as wire, pytest.raises(LinkFault):
        wire.done()


def test_good_replies() -> None:
    replies = [
        b"$3\r\nabc\r\n", b"$-1\r\n", b"$0\r\n\r\n", b"-OOM no room\r\n", b":12\r\n", b"+OK\r\n",
        b"$9\r\n123456789\r\n",
    ]  # fmt: skip
    into = memoryview(bytearray(4))
    with wire_with(b"".join(replies)) as wire:
        assert wire.bulk(into) == 3 and into[:3] == b"abc"
        assert wire.bulk(into) == -1
        assert wire.bulk(into) == 0
        error = wire.bulk(into)
        assert isinstance(error, ServerError) and error.code == "OOM" and not wire.suspect
        assert wire.integer() == 12
        assert wire.done() is None
        assert wire.bulk(into) == 9 and into == b"1234" and wire.suspect, "skipped, remembered"


def read_on(
    wire: Wire, asks: list[Callable[[Wire], int | ServerError | None]], rng: random.Random
) -> None:
    while True:  # until the server hangs up, at the latest
        answer = rng.choice(asks)(wire)
        assert answer is None or isinstance(answer, int | ServerError)


@pytest.mark.parametrize("rounds", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_any_bytes_are_replies_until_a_fault(rounds: int) -> None:
    seed = 18
    print(f"seed {seed}")
    rng = random.Random(seed)
    words = [b"$", b":", b"+OK", b"-ERR", b"\r\n", b"*", b"-1", b"0", b"7", b"4096", b"99999999"]
    into = memoryview(bytearray(FIRST_BYTES_MAX))
    asks: list[Callable[[Wire], int | ServerError | None]] = [
        lambda wire: wire.bulk(into), Wire.integer, Wire.done,
    ]  # fmt: skip
    for _ in range(rounds):
        reply = b"".join(
            rng.choice(words) if rng.random() < 0.8 else rng.randbytes(rng.randrange(9))
            for _ in range(rng.randrange(30))
        )
        with wire_with(reply) as wire, pytest.raises(LinkFault) as raised:
            read_on(wire, asks, rng)
        assert raised.value.cause in ("odd", "closed")


class Trickle:
    """Stands for a socket: each read takes a while and brings some zeros."""

    def __init__(self, clock: VirtualClock, read_s: float, read_bytes: int) -> None:
        self.clock, self.read_s, self.read_bytes = clock, read_s, read_bytes
        self.reads = 0

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 0.5

    def recv_into(self, into: memoryview) -> int:
        if self.reads == 0:
            into[:11] = b"$30000000\r\n"
        self.reads += 1
        self.clock.advance(self.read_s)
        return 11 if self.reads == 1 else min(len(into), self.read_bytes)


@pytest.mark.parametrize(
    ("read_bytes", "cause", "reads"), [(1 << 20, "late", 20), (1 << 10, "stalled", 5)]
)
def test_time_is_over_however_steadily_bytes_come(read_bytes: int, cause: str, reads: int) -> None:
    """A deadline of 2 s, a tenth of a second for each read."""
    clock = VirtualClock()
    trickle = Trickle(clock, 0.1, read_bytes)
    wire = Wire(cast(socket.socket, trickle), Deadline.within(2.0, clock))
    into = memoryview(bytearray(30_000_000))
    with pytest.raises(LinkFault, match=cause):
        wire.bulk(into)
    assert abs(trickle.reads - reads) <= 1


class Liar:
    """A server that lets everybody in and answers every GET of a value with one and the same."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while asked := client.recv(1 << 16):
                    for _ in range(asked.count(b"\r\nEXISTS\r\n")):
                        client.sendall(b":1\r\n")
                    for _ in range(asked.count(b"\r\nGET\r\n")):
                        client.sendall(self.reply)
                    for _ in range(asked.count(b"\r\nDEL\r\n")):
                        client.sendall(b":0\r\n")
            except OSError:
                return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n", b":1\r\n", b"*1\r\n$1\r\nx\r\n", b"$5\r\nhello\r\n", b"-ERR what\r\n",
        b"-LOADING\r\n", b"-NOAUTH\r\n", b"$99999999999\r\n", b"\x00" * 50, b"$3\r\nabcdef\r\n",
        b"$-1\r\n$-1\r\n$-1\r\n",
    ],
)  # fmt: skip
def test_a_server_that_lies_is_a_miss(reply: bytes) -> None:
    liar = Liar(reply)
    tier = RedisTier(liar.url, "bf16-a", namespace="liar")
    use = Opened(tier, SIZES)
    names = [*names_of_chain(19, 2), *names_of_chain(20, 2, 1)]
    for _ in range(6):
        assert Status.OK not in use.load(names, 2.0)
    tier.close()
    liar.close()
