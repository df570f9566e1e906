"""MemoryTransport: what it delivers without faults, and that its faults are the ones asked for."""

from seams.clock import VirtualClock
from seams.rng import SeededRng
from seams.transport import Faults, MemoryTransport


def network(faults: Faults) -> tuple[MemoryTransport, VirtualClock, list[tuple[str, bytes]]]:
    clock = VirtualClock()
    transport = MemoryTransport(clock, SeededRng(3), faults)
    got: list[tuple[str, bytes]] = []
    transport.bind("b", lambda sender, payload: got.append((sender, payload)))
    return transport, clock, got


def test_messages_arrive_whole_and_in_order() -> None:
    transport, _, got = network(Faults())
    sender = transport.sender("a")
    assert all(sender.send("b", bytes([i])) for i in range(50))
    assert transport.deliver() == 50
    assert got == [("a", bytes([i])) for i in range(50)]


def test_an_unknown_peer_is_said_at_once_and_a_lost_one_swallows() -> None:
    transport, _, got = network(Faults())
    assert not transport.sender("a").send("nobody", b"x")
    assert transport.sender("a").send("b", b"x")
    transport.unbind("b")
    assert transport.deliver() == 0
    assert got == []


def test_nothing_is_delivered_early() -> None:
    transport, clock, got = network(Faults(delay_s_max=1.0))
    for i in range(100):
        transport.sender("a").send("b", bytes([i]))
    clock.advance(1.0)
    transport.deliver()
    order = [payload[0] for _, payload in got]
    assert sorted(order) == list(range(100))
    assert order != sorted(order), "delays must reorder"


def test_loss_and_duplication_have_their_shares() -> None:
    transport, _, got = network(Faults(loss=0.1, duplication=0.2))
    for i in range(2000):
        transport.sender("a").send("b", i.to_bytes(2, "big"))
    transport.deliver()
    counts = {payload: 0 for _, payload in got}
    for _, payload in got:
        counts[payload] += 1
    assert 0.07 < 1 - len(counts) / 2000 < 0.13
    assert 0.15 < sum(c == 2 for c in counts.values()) / len(counts) < 0.25


def test_a_payload_is_copied() -> None:
    transport, _, got = network(Faults())
    payload = bytearray(b"abc")
    transport.sender("a").send("b", payload)  # type: ignore[arg-type]
    payload[0] = 0
    transport.deliver()
    assert got == [("a", b"abc")]
