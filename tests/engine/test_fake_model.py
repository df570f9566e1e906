"""FakeModel: any wrong, stale, torn, foreign or mis-ordered visible byte changes its output."""

import random

import pytest
import torch

from kvstore.groups import GroupKind
from seams.errors import ModelLoadError
from worker.engine.plan import BlockCopy, SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.fake import CANARY, SHAPES, FakeModel, fake_model

BLOCK = 4
BLOCKS = 32
EVERY = [*SHAPES, *(f"{shape}/inverted" for shape in SHAPES)]
PROMPT = [(11 * i + 3) % 250 for i in range(39)]  # longer than the window of 13


def build(shape: str) -> FakeModel:
    model = fake_model(shape, context_tokens=128, block_tokens=BLOCK)
    model.allocate(tuple(BLOCKS for _ in model.spec.groups))
    return model


def plan(model: FakeModel, ids: list[int], start: int, table: list[int]) -> StepPlan:
    """Compute ids[start:], with the same table for every group, and sample from the last row."""
    rows = range(start, len(ids))
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in rows]
    groups = model.spec.groups
    return StepPlan.of_lists(
        step=1,
        token_ids=ids[start:],
        positions=list(rows),
        starts=[0, len(rows)],
        lengths=[len(ids)],
        tables=[[table[: -(-len(ids) // BLOCK)]] for _ in groups],
        slots=[slots for _ in groups],
        samples=[SampleRow(len(rows) - 1, 0, 0, 0, SamplingParams(0, 1))],
    )


def run(model: FakeModel, ids: list[int], table: list[int], chunk: int = 1000) -> torch.Tensor:
    logits = torch.empty(0)
    for start in range(0, len(ids), chunk):
        logits = model.execute(plan(model, ids[: start + chunk], start, table))
    return logits[0]


def shuffled_table(seed: int = 1) -> list[int]:
    return random.Random(seed).sample(range(BLOCKS), 12)


@pytest.mark.parametrize("shape", EVERY)
@pytest.mark.parametrize("chunk", [1, 3, 4, 17, 1000])
def test_paged_and_chunked_equals_the_oracle(shape: str, chunk: int) -> None:
    model = build(shape)
    expected = model.oracle_logits(PROMPT)
    assert torch.equal(run(model, PROMPT, shuffled_table(), chunk), expected)
    assert expected.std() > 1  # not a constant


@pytest.mark.parametrize("shape", EVERY)
def test_decoding_equals_the_oracle(shape: str) -> None:
    model, table, ids = build(shape), shuffled_table(), list(PROMPT[:10])
    logits = run(model, ids, table)
    for _ in range(20):
        ids.append(int(logits.argmax()))
        logits = model.execute(plan(model, ids, len(ids) - 1, table))[0]
    assert ids[10:] == model.oracle(ids[:10], 20, ignore_eos=True)


def test_the_oracle_ends_at_an_end_token() -> None:
    model = fake_model("full", vocab_tokens=8)
    full = model.oracle([1, 2, 3], 100, ignore_eos=True)
    stopped = model.oracle([1, 2, 3], 100)
    assert 7 in full and stopped == full[: full.index(7) + 1]


@pytest.mark.parametrize("shape", EVERY)
def test_every_visible_byte_matters(shape: str) -> None:
    """Flip one byte of each (group, rank, position): the next token's logits change exactly when
    the position is visible."""
    table = shuffled_table()
    ids = [*PROMPT, 5]
    model = build(shape)
    run(model, PROMPT, table)
    step = plan(model, ids, len(PROMPT), table)
    expected = model.execute(step).clone()
    for group in model.spec.groups:
        width = group.block_bytes // BLOCK
        first = len(ids) - group.window_tokens if group.kind is GroupKind.WINDOW else 0
        for rank in range(group.ranks):
            for position in range(len(PROMPT) + 3):
                block, at = table[position // BLOCK], position % BLOCK * width + width // 2
                kept = model.read_block(group.id, block, rank)
                torn = kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :]
                model.write_block(group.id, block, torn, rank)
                changed = not torch.equal(model.execute(step), expected)
                visible = first <= position < len(PROMPT) or position < group.sink_tokens
                assert changed == visible, (group.id, rank, position)
                model.write_block(group.id, block, kept, rank)


@pytest.mark.parametrize("shape", EVERY)
def test_wrong_tables_change_the_output(shape: str) -> None:
    model, table = build(shape), shuffled_table()
    run(model, PROMPT, table)
    ids = [*PROMPT, 5]
    expected = model.execute(plan(model, ids, len(PROMPT), table)).clone()
    swapped = [*table[:7], table[8], table[7], *table[9:]]
    stale = [*table[:8], 31 if 31 not in table else 30, *table[9:]]
    for wrong in (swapped, stale):
        assert not torch.equal(model.execute(plan(model, ids, len(PROMPT), wrong)), expected)


def test_absent_visible_blocks_are_refused() -> None:
    model, table = build("window"), shuffled_table()
    run(model, PROMPT, table)
    step = plan(model, [*PROMPT, 5], len(PROMPT), table)
    step.tables[1][0][:6] = [-1] * 6  # positions below 24; the window of 13 begins at 27
    model.execute(step)
    step.tables[1][0][6] = -1
    with pytest.raises(AssertionError, match="absent"):
        model.execute(step)


def test_layouts_differ_in_bytes_and_representation_only() -> None:
    plain, inverted = build("full"), build("full/inverted")
    table = shuffled_table()
    assert torch.equal(run(plain, PROMPT, table), run(inverted, PROMPT, table))
    assert plain.spec.fingerprint == inverted.spec.fingerprint
    assert plain.spec.representation.id != inverted.spec.representation.id
    blocks = [m.read_block(0, table[0]) for m in (plain, inverted)]
    assert blocks[0] != blocks[1]
    assert bytes(b ^ 0xA5 for b in blocks[1]) == blocks[0]


@pytest.mark.parametrize("shape", EVERY)
def test_blocks_can_move_to_a_model_of_one_representation(shape: str) -> None:
    """What a tier does: bytes out of one pool, into another place of another pool."""
    source, target = build(shape), build(shape)
    table, ids = shuffled_table(), [*PROMPT, 5]
    run(source, PROMPT, table)
    expected = source.execute(plan(source, ids, len(PROMPT), table)).clone()
    moved = table[::-1]
    for group in source.spec.groups:
        for rank in range(group.ranks):
            for old, new in zip(table, moved, strict=True):
                target.write_block(group.id, new, source.read_block(group.id, old, rank), rank)
    assert torch.equal(target.execute(plan(target, ids, len(PROMPT), moved)), expected)


def test_a_foreign_representation_is_wrong_not_silent() -> None:
    source, target = build("full"), build("full/inverted")
    table, ids = shuffled_table(), [*PROMPT, 5]
    run(source, PROMPT, table)
    expected = source.execute(plan(source, ids, len(PROMPT), table)).clone()
    for block in table:
        target.write_block(0, block, source.read_block(0, block))
    assert not torch.equal(target.execute(plan(target, ids, len(PROMPT), table)), expected)


@pytest.mark.parametrize("shape", ["full", "ranks", "full/inverted"])
def test_copies_take_only_their_first_positions(shape: str) -> None:
    model = build(shape)
    width = model.spec.groups[0].block_bytes // BLOCK
    model.write_block(0, 1, bytes(range(4 * width)))
    step = plan(model, [1], 0, [9])
    step.copies.append(BlockCopy(0, 1, 2, 3))
    model.execute(step)
    assert model.read_block(0, 2) == bytes(range(3 * width)) + bytes([CANARY]) * width


def test_poison_fills_every_rank_and_only_those_blocks() -> None:
    model = build("ranks")
    size = model.spec.groups[0].block_bytes
    for block in (3, 4, 5):
        for rank in (0, 1):
            model.write_block(0, block, bytes(size), rank)
    model.poison(0, [3, 5])
    for rank in (0, 1):
        found = [model.read_block(0, block, rank) for block in (3, 4, 5)]
        assert found == [bytes([CANARY]) * size, bytes(size), bytes([CANARY]) * size]


def test_identity_is_weights_and_meaning_only() -> None:
    one, other = fake_model("full"), fake_model("full", weights=1)
    assert other.spec.fingerprint != one.spec.fingerprint
    assert other.oracle(PROMPT, 9) != one.oracle(PROMPT, 9)
    for same in (fake_model("ranks"), fake_model("full", name="x", context_tokens=9)):
        assert same.spec.fingerprint == one.spec.fingerprint
        assert same.oracle(PROMPT, 9) == one.oracle(PROMPT, 9)
    assert fake_model("window").spec.fingerprint != one.spec.fingerprint
    assert one.spec.eos_token_ids == (255,)


def test_kv_of_other_weights_is_wrong() -> None:
    source, target = build("full"), FakeModel(fake_model("full", block_tokens=4, weights=1).spec)
    target.allocate((BLOCKS,))
    table, ids = shuffled_table(), [*PROMPT, 5]
    run(source, PROMPT, table)
    for block in table:
        target.write_block(0, block, source.read_block(0, block))
    logits = target.execute(plan(target, ids, len(PROMPT), table))[0]
    assert not torch.equal(logits, target.oracle_logits(ids))


@pytest.mark.parametrize("shape", ["", "fall", "full/sideways"])
def test_unknown_shapes_are_refused(shape: str) -> None:
    with pytest.raises(ModelLoadError, match="no such fake model"):
        fake_model(shape)
