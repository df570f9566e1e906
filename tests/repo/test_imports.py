"""Who may import whom (docs/architecture.md): the picture of the house, held by a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# room -> what of this project it may import besides itself; "a.b" allows that part of a only
ALLOWED = {
    "seams": set[str](),
    "kernels": {"seams"},
    "kvstore": {"seams", "kernels"},
    "worker": {"seams", "kernels", "kvstore", "banyan.v1"},
    "router": {"seams", "kvstore.keys", "banyan.v1"},
    "simulate": {"seams", "kvstore", "worker", "router", "banyan.v1"},
    "loadtest": {"seams", "kvstore", "banyan", "router", "worker"},
    "banyan": {"seams", "kvstore", "kernels", "router", "worker", "loadtest", "simulate"},
}
# The synchronous core knows no asyncio, no gRPC, no wall clock and no global chance.
CORE = [
    "router/index.py",
    "router/events.py",
    "router/cost.py",
    "router/estimates.py",
    "router/fleet.py",
    "router/bookings.py",
    "router/core.py",
    "router/stream.py",
    "worker/engine/block_pool.py",
    "worker/engine/radix.py",
    "worker/engine/scheduler.py",
    "worker/engine/waiting.py",
    "worker/engine/request.py",
    "worker/engine/core.py",
    "worker/engine/paging.py",
    "worker/engine/admission.py",
    "worker/engine/timing.py",
    "worker/engine/radix_tree.py",
    "worker/engine/radix_node.py",
    "worker/engine/radix_window.py",
    "worker/engine/promotion.py",
    "worker/engine/deadlines.py",
    "worker/engine/packing.py",
    "worker/engine/compaction.py",
    "worker/engine/pruning.py",
    "worker/engine/derived.py",
    "worker/engine/derived_state.py",
    "worker/engine/retention/base.py",
    "worker/engine/retention/policies.py",
    "kvstore/record.py",
    "kvstore/tiers/host_slots.py",
    "router/provisional.py",
    "router/outbox.py",
    "router/text/stops.py",
    "router/text/detokenize.py",
    "kvstore/keys.py",
]
FORBIDDEN_IN_CORE = {"asyncio", "grpc", "time", "random", "secrets", "threading", "datetime"}


def modules(room: str) -> Iterator[Path]:
    for path in sorted((REPOSITORY / room).rglob("*.py")):
        if "_pb2" not in path.name:
            yield path


def imported(path: Path, *, eager_only: bool = False) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if eager_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def permitted(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in modules(room)
        for name, line in imported(path)
        if name.split(".")[0] in ALLOWED and not permitted(name, ALLOWED[room] | {room})
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ALLOWED)
def test_packages_import_nothing_eagerly(room: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in modules(room)
        if path.name == "__init__.py"
        for name, line in imported(path, eager_only=True)
        if not name.startswith(("__future__", "typing"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", CORE)
def test_core_knows_no_world(module: str) -> None:
    names = {name.split(".")[0] for name, _ in imported(REPOSITORY / module)}
    assert not names & FORBIDDEN_IN_CORE


def test_proto_is_no_python_package() -> None:
    assert not list((REPOSITORY / "proto").rglob("__init__.py"))


def test_kernels_version_is_outside_what_transformers_accepts() -> None:
    # transformers looks `kernels` up by import name; our folder must not pass for that package
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
