"""What the engine benchmark computes from its measurements, and what it measures next."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from prefill_runtime.agent.command import engine_command
from prefill_runtime.agent.config import RankConfig
from prefill_runtime.scheduler.costfile import parse_cost

from benchmarks.engine import render, targets, trace
from benchmarks.engine.engines import Answer, Engine
from benchmarks.engine.runner import Progress, Run
from benchmarks.engine.sites import EMULATED, Arm, K
from benchmarks.engine.stats import paired_ratio
from benchmarks.engine.store import Measurement, Store, best_stock
from benchmarks.engine.suites import ablation, emulated, foldback, overhead, smollm2, toy

PORTS = {"enginePort": 1, "controlPort": 2, "groupPort": 3, "storePort": 4}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def fill(store: Store, suite: str, length: int, **seconds: list[float]) -> None:
    for name, values in seconds.items():
        arm = name.replace("stock_", "stock ")
        for number, value in enumerate(values):
            store.add(Measurement(suite, arm, length, number, value, [7]))


def command(arm: Arm, suite_of: object = toy) -> list[str]:
    config = arm.rank_config(suite_of().site, "/models/m", PORTS)  # type: ignore[operator]
    return engine_command(RankConfig.model_validate(config), 0, telemetry_socket="/s")


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_stock_arms_run_vllms_own_scheduler_with_their_chunk() -> None:
    words = command(Arm(None, 512))
    assert "--scheduler-cls" not in words
    assert "--worker-cls" not in words
    assert value(words, "--max-num-batched-tokens") == "512"


def test_our_arms_differ_from_stock_in_nothing_but_the_plugin() -> None:
    plugin = {"--scheduler-cls", "--worker-cls", "--no-async-scheduling", "--additional-config"}
    ours, theirs = command(Arm("Auto", 512)), command(Arm(None, 512))
    assert {w for w in ours if w.startswith("--")} - plugin == {w for w in theirs if w.startswith("--")} - plugin
    prefill = json.loads(value(ours, "--additional-config"))["prefill"]
    assert (prefill["policy"], prefill["maxTokens"], prefill.get("emulate")) == ("Auto", 512, None)


@pytest.mark.parametrize("arm", [Arm(None, 12288), Arm("Planned", 32768)])
def test_every_arm_on_an_emulated_device_has_its_cost(arm: Arm) -> None:
    words = command(arm, lambda: emulated(4))
    prefill = json.loads(value(words, "--additional-config"))["prefill"]
    assert parse_cost(json.dumps(prefill["emulate"])) == EMULATED
    assert value(words, "--worker-cls").endswith("PrefillCPUWorker")
    assert ("--scheduler-cls" in words) == (not arm.stock)


@pytest.mark.parametrize(
    "suite", [toy(), foldback(), smollm2(), overhead(), ablation(), *(emulated(p) for p in (2, 4, 8))]
)
def test_prompts_and_their_cache_fit(suite) -> None:  # type: ignore[no-untyped-def]
    per_layer = {"toy": 2 * 64, "smollm2": 3 * 64, "emu": 64}[suite.site.model] * 2 * 2
    layers = {"toy": 8, "smollm2": 30, "emu": 2 * suite.site.ranks}[suite.site.model]
    assert max(suite.rounds) + 16 <= suite.site.max_model_len <= suite.site.cached_tokens
    assert suite.queued * max(suite.rounds) <= suite.site.cached_tokens
    assert -(-layers // suite.site.ranks) * per_layer * suite.site.cached_tokens <= 1 << 30  # the agent's default


def test_folded_arms_have_two_stages_per_rank_and_run_in_their_order() -> None:
    seen = {}
    for arm in ablation().arms:
        words = command(arm, ablation)
        seen[arm.name] = json.loads(value(words, "--additional-config"))["prefill"]
        layers = json.loads(value(words, "--hf-overrides"))["num_hidden_layers"]
        assert layers == 2 * arm.virtual
    vanilla, only_async, full = (seen[name] for name in targets.STEPS)
    assert vanilla["virtualStages"] == only_async["virtualStages"] == full["virtualStages"] == 2
    assert [x.get("foldBlocking", False) for x in (vanilla, only_async, full)] == [True, False, False]
    assert [x.get("foldPacking", True) for x in (vanilla, only_async, full)] == [False, False, True]


def test_prompts_that_are_asked_together_are_different_and_all_are_answered() -> None:
    engine = object.__new__(Engine)
    engine.ask = lambda tokens, answer=1: Answer(tokens[0] / 10, [tokens[0]])  # type: ignore[method-assign]
    assert engine.ask_all([[3], [9], [5]]) == Answer(0.9, [3, 9, 5])


def test_ratios_are_paired_by_round() -> None:
    slow_machine = {0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0, 4: 16.0}
    found = paired_ratio({n: 0.9 * s for n, s in slow_machine.items()}, slow_machine)
    assert found is not None
    assert (found.median, found.low, found.high) == (pytest.approx(0.9),) * 3
    few = paired_ratio({0: 1.0, 1: 3.0}, {0: 2.0, 2: 1.0})
    assert few is not None
    assert (few.median, few.low, few.pairs) == (0.5, None, 1)
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


def test_an_interval_holds_what_most_rounds_say() -> None:
    ours = dict(enumerate([0.90, 0.92, 0.91, 0.93, 0.89, 1.40]))
    found = paired_ratio(ours, dict.fromkeys(ours, 1.0))
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.median == pytest.approx(0.915)
    assert 0.89 <= found.low < found.median < found.high < 1.40


def test_a_later_run_measures_only_what_is_missing(store: Store) -> None:
    suite = toy().limited([4 * K, 8 * K], 2, ["stock 512", "Auto"])
    run = Run(suite, store, Progress(None))
    assert list(run.missing(suite.arms, 2)) == [(4 * K, 0), (8 * K, 0), (4 * K, 1), (8 * K, 1)]
    fill(store, "toy", 4 * K, stock_512=[1.0, 1.0], Auto=[1.0])
    again = Run(suite, Store(store.folder), Progress(None))
    assert list(again.missing(suite.arms, 2)) == [(8 * K, 0), (4 * K, 1), (8 * K, 1)]
    assert [arm.name for arm in suite.arms if again.wanted(arm, 4 * K, 1)] == ["Auto"]


def test_the_lives_of_the_engines_share_the_rounds(store: Store) -> None:
    run = Run(overhead(), store, Progress(None))
    assert run.lives() == [6, 12, 18, 24]
    assert len(list(run.missing(run.suite.arms, 6))) == 6
    assert Run(toy(), store, Progress(None)).lives() == [9]


def test_a_torn_line_is_measured_again(store: Store) -> None:
    fill(store, "toy", 4 * K, Auto=[1.0])
    with (store.folder / "measurements.jsonl").open("a") as file:
        file.write('{"suite": "toy", "arm": "Au')
    again = Store(store.folder)
    assert len(again.all) == 1
    again.add(Measurement("toy", "Auto", 4 * K, 1, 1.0, [7]))
    assert len(Store(store.folder).all) == 2


def test_long_prompts_are_for_sizes_near_the_best_at_the_length_before(store: Store) -> None:
    suite = toy()
    run = Run(suite, store, Progress(None))
    assert all(run.wanted(arm, 32 * K, 0) for arm in suite.arms if arm.stock)  # nothing is known yet
    fill(store, "toy", 16 * K, stock_256=[8.2], stock_512=[8.0], stock_1024=[8.4], stock_2048=[9.3], stock_4096=[10.0])
    wanted = [arm.name for arm in suite.arms if run.wanted(arm, 32 * K, 0)]
    assert wanted == ["stock 256", "stock 512", "stock 1024", "Auto"]


def test_waves_together_hold_every_arm_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = emulated(8)
    run = Run(suite, store, Progress(None))
    monkeypatch.setattr("benchmarks.engine.machine.available_gigabytes", lambda: 3.5 * suite.site.engine_gigabytes + 2)
    waves = run.waves(2)
    assert [len(wave) for wave in waves] == [3, 3, 2]
    assert sorted(arm.name for wave in waves for arm in wave) == sorted(arm.name for arm in suite.arms)


def test_the_best_stock_arm_is_that_with_the_least_median(store: Store) -> None:
    fill(store, "toy", 4 * K, stock_512=[1.0, 1.1, 1.2], stock_256=[0.5, 1.2, 1.3], Auto=[0.1])
    assert best_stock(store.of("toy", 4 * K)) == "stock 512"


def test_targets_say_whether_they_are_met(store: Store) -> None:
    fill(store, "toy", 16 * K, stock_512=[8.0] * 3, stock_2048=[9.3] * 3, Auto=[8.3] * 3)
    fill(store, "emulated-p2", 128 * K, **{"stock_12288": [26.8], "Planned": [25.9]})
    met = {row[0]: row[3] for row in targets.rows(store)}
    assert met == {
        "toy, 16K: Auto / stock at its best fixed chunk": "**no**",
        "toy, 16K: Auto / stock at a chunk of 2048": "yes",
        "emulated, P = 2, 128K: Planned / 25.2 s of a search on the bare model": "yes",
        "emulated, P = 2, 128K: Planned / stock at its best fixed chunk": "yes",
    }


def test_windows_are_planned_against_the_best_fixed_size(store: Store) -> None:
    arms = {"stock 512": [3.0], "Fixed 512 FoldBack": [2.0], "Fixed 1024 FoldBack": [4.0], "Planned FoldBack": [1.5]}
    fill(store, "windows", 16 * K, **arms)
    assert ["toy with windows, 16K: Planned FoldBack / Fixed 512 FoldBack", "<= 1.000", "0.750", "yes"] in targets.rows(
        store
    )


def test_targets_of_folded_pipelines(store: Store) -> None:
    both = {"stock_512": [8.0], "stock_2048": [9.3], "Planned FoldBack": [7.7], "Fixed 2048 FoldBack": [8.6]}
    fill(store, "foldback", 16 * K, **both)
    fill(store, "foldback", 2 * K, stock_512=[1.0], **{"Auto FoldBack": [1.03]})
    fill(store, "emulated-p4", 128 * K, **{"stock_8192": [16.3], "Planned FoldBack": [13.9]})
    for arm, took, computed in zip(targets.STEPS, (9.0, 8.0, 8.1), (6.0, 7.0, 7.2), strict=True):
        states = {"compute": computed, "transfer": 1.0, "bubble_drain": 9.0 - computed}
        store.add(Measurement("ablation", arm, 128 * K, 0, took, [7], states))
    met = {row[0]: row[3] for row in targets.rows(store)}
    assert met == {
        "toy, 2K: Auto FoldBack / stock at its best fixed chunk": "**no**",
        "toy, 16K: Fixed 2048 FoldBack / stock 2048": "yes",
        "toy, 16K: Planned FoldBack / stock 512": "**no**",
        "toy, 16K: Planned FoldBack / stock 2048": "yes",
        "emulated, P = 4, 128K: Planned FoldBack / 13.53 s of a search on the bare model": "yes",
        "emulated, P = 4, 128K: Planned FoldBack / stock at its best fixed chunk": "**no**",
        f"three prompts, P = 2, slow transfers: {targets.STEPS[1]} / {targets.STEPS[0]}": "yes",
        f"the same, share of time in which ranks do not compute: {targets.STEPS[1]}": "yes",
        f"three prompts, P = 2, slow transfers: {targets.STEPS[2]} / {targets.STEPS[1]}": "**no**",
        f"the same, share of time in which ranks do not compute: {targets.STEPS[2]}": "yes",
    }


def test_the_page_keeps_what_is_around_the_results(store: Store, tmp_path: Path) -> None:
    (store.folder / "machine.json").write_text(json.dumps({
        "processor": "a processor", "cores": 2, "memory_gib": 24, "kernel": "6", "vllm": "0", "torch": "2",
        "python": "3", "commit": "abc", "load_before": 0.1,
    }))  # fmt: skip
    states = {"compute": 7.0, "transfer": 1.0, "bubble_fill": 0.5, "bubble_imbalance": 1.0, "bubble_drain": 0.5}
    fill(store, "toy", 4 * K, stock_512=[1.0, 1.2])
    store.add(Measurement("toy", "Auto", 4 * K, 0, 0.9, [8], states))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    render.write(store, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 4K | Auto | 0.900 |  | 1 | 0.900 | 4,551 | 20.0 (5.0 + 10.0 + 5.0) | 10.0 |" in text
    assert "agree among the arms: 2 of 3" in text
    render.write(store, page)
    assert page.read_text() == text


def test_a_traces_table_has_throughput_and_classes_of_length(tmp_path: Path) -> None:
    store, name = Store(tmp_path), "trace t"
    for arm, seconds in (("stock 512", 2.0), ("Auto", 1.0)):
        for index, length in enumerate((100, 2000, 9000, 1000)):
            store.add(Measurement(name, arm, index + 1, 0, seconds * (index + 1), [length]))
        store.add(Measurement(name, arm, trace.WHOLE, 0, 10 * seconds, [12_100]))
    lines = trace.table_of(store, name, render.table).splitlines()
    assert "mean, 0-1023 tokens | mean, 1024-4095 tokens | mean, 4096 and more" in lines[0]
    assert "| stock 512 | 4 | 605 | 5.00 | 5.00 | 6.00 | 5.00 (2) | 4.00 (1) | 6.00 (1) |" in lines
    assert "| Auto | 4 | 1,210 | 2.50 | 2.50 | 3.00 | 2.50 (2) | 2.00 (1) | 3.00 (1) |" in lines


def test_a_trace_is_scaled_to_the_load(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_length,output_length\n5,8000,1\n6,100,1\n9,800000,1\n11,16000,1\n")
    site = replace(toy().site, longest=4000)
    replay = trace.read(path, site, 4, 0.125, 0.5)
    assert [length for _, length in replay.arrivals] == [1000, 16, 4000, 2000]
    busy = sum(site.guess(length) for _, length in replay.arrivals)
    assert replay.arrivals[0][0] == 0
    assert replay.arrivals[-1][0] == pytest.approx(busy / 0.5)
    path.write_text("arrival_s,input_length\n0,80\n3,800\n3,160\n3,240\n99,80\n")
    together = trace.read(path, site, 5, 1.0, 0.5).arrivals[1:4]
    assert [length for _, length in together] == [800, 160, 240]
    assert [b[0] - a[0] for a, b in pairwise(together)] == pytest.approx([trace.GAP, trace.GAP])
    with pytest.raises(SystemExit, match="1 rows that take no time"):
        trace.read(path, site, 1, 1.0, 0.5)
