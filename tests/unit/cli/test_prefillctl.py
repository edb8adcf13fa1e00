import json
import re
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.cli.__main__ import main
from prefill_runtime.cli.trace import groups, prompt_class, read_trace, requests
from prefill_runtime.scheduler.actions import parse, validate
from prefill_runtime.scheduler.layout import FoldBack

DATA = Path(__file__).parent / "data"
STAGE = {"k0": 0.7, "k1": 2.42 / 32_768, "k2": 3.64 / 32_768**2, "k3": 0}


@pytest.fixture
def cost(tmp_path: Path) -> str:
    path = tmp_path / "cost.json"
    transfer = {"latency_s": 0, "seconds_per_token": 0}
    whole = {"form": "stage", "model": STAGE, "pass_overhead_s": 0, "shares": None, "transfer": transfer}
    path.write_text(json.dumps(whole))
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def complain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_simulate_prints_the_contract(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    words = "simulate --layout Linear --ranks 2 --policy Fixed --chunk 32768 --min-chunk 4096 --smooth 1 --history 0"
    words += " --prompt 524288 --arrival 0 --transfer async --packing on --order oldest --inflight 2"
    out = ask(capsys, *words.split(), "--cost", cost)
    assert {"ttft_s", "makespan_s", "bubble_ratio", "rank_state_seconds", "chunks", "bound_s"} <= out.keys()
    assert out["ttft_s"] == pytest.approx([287.69], rel=0.005)
    assert out["chunks"] == [[32_768] * 16]
    busy = sum(s["compute"] + s["transfer"] for s in out["rank_state_seconds"])
    assert out["bubble_ratio"] == pytest.approx(1 - busy / (2 * out["makespan_s"]))
    assert busy / 2 < out["bound_s"] <= out["makespan_s"]


@pytest.mark.parametrize(("layout", "default"), [("linear", 4), ("foldback", 7)])
def test_chunks_in_flight_default_to_p_and_2p_minus_1(
    capsys: pytest.CaptureFixture[str], cost: str, layout: str, default: int
) -> None:
    words = ["simulate", "--layout", layout, "--ranks", "4", "--policy", "fixed", "--chunk", "4096", "--cost", cost]
    words += ["--prompt", "131072", "--transfer", "ASYNC", "--packing", "ON", "--order", "Feed-First"]
    unset, same, fewer = (
        ask(capsys, *words, *more) for more in ((), ("--inflight", str(default)), ("--inflight", str(default - 1)))
    )
    assert unset == same
    assert fewer["makespan_s"] != unset["makespan_s"]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--chunk", ("4096", "8192")),
        ("--min-chunk", ("64", "8192")),
        ("--smooth", ("1", "0.5")),
        ("--history", ("0", "8192,0")),
        ("--arrival", ("0,0", "0,9")),
        ("--transfer", ("async", "blocking")),
        ("--packing", ("on", "off")),
        ("--order", ("oldest", "feed-first")),
        ("--inflight", ("1", "3")),
    ],
)
def test_every_option_of_the_contract_counts(
    capsys: pytest.CaptureFixture[str], cost: str, option: str, values: tuple[str, str]
) -> None:
    Path(cost).write_text(json.dumps(json.loads(Path(cost).read_text()) | {"transfer": {"latency_s": 0.1}}))
    given = {"--layout": "FOLDBACK", "--ranks": "2", "--policy": "DYNAMIC", "--chunk": "8192", "--cost": cost}
    given |= {"--prompt": "65536,65536", "--inflight": "5"}
    first, second = (
        ask(capsys, "simulate", *[w for pair in (given | {option: v}).items() for w in pair]) for v in values
    )
    assert first["ttft_s"] != second["ttft_s"]
    for out in (first, second):
        assert list(map(len, (out["ttft_s"], out["chunks"], out["rank_state_seconds"]))) == [2, 2, 2]
        assert out["bound_s"] <= out["makespan_s"]
        assert 0 < out["bubble_ratio"] < 1


@pytest.mark.parametrize("policy", ["fixed", "Dynamic", "seq1f1b", "TeraPipe", "TokenThrottle", "PLANNED", "auto"])
@pytest.mark.parametrize("layout", ["linear", "FoldBack"])
def test_every_policy_runs_on_every_layout(
    capsys: pytest.CaptureFixture[str], cost: str, policy: str, layout: str
) -> None:
    words = f"simulate --layout {layout} --ranks 4 --policy {policy} --chunk 16384 --prompt 100000,3000 --arrival 0,1"
    out = ask(capsys, *words.split(), "--history", "1000,0", "--cost", cost)
    assert [sum(c) for c in out["chunks"]] == [99_000, 3000]
    assert max(out["chunks"][0]) <= 16_384
    assert out["makespan_s"] >= out["bound_s"]


def test_planned_runs_in_its_own_order_unless_told_otherwise(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    words = [
        "simulate",
        "--layout",
        "foldback",
        "--ranks",
        "2",
        "--policy",
        "planned",
        "--prompt",
        "524288",
        "--cost",
        cost,
    ]
    own, oldest = ask(capsys, *words), ask(capsys, *words, "--order", "oldest")
    assert own["ttft_s"][0] < 259.6
    assert own["ttft_s"][0] < oldest["ttft_s"][0] < 259.6 * 1.005


def test_plan_explains_itself(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    (plan,) = ask(capsys, "plan", "--ranks", "2", "--prompt", "131072", "--cost", cost)
    assert sum(plan["chunks"]) == 131_072
    assert plan["bound"] <= plan["seconds"] < plan["fixed"][1]
    assert "no cut can beat" in plan["explanation"]
    assert main(["plan", "--ranks", "2", "--prompt", "131072", "--cost", cost]) == 0
    assert "less than the best fixed size" in " ".join(capsys.readouterr().out.split())


def test_the_printed_schedule_is_valid(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    words = ["simulate", "--layout", "foldback", "--ranks", "2", "--chunk", "8192", "--prompt", "65536", "--cost", cost]
    assert main([*words, "--schedule"]) == 0
    printed = capsys.readouterr().out
    schedule = "\n".join(re.findall(r"^rank \d: \d[RSV].*$", printed, re.M))
    validate(FoldBack(2), parse(schedule), [8], 3)
    assert "seconds of every rank" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "ranks is 0, allowed: 1 to 256"),
        (["--layout", "ring"], "layout is ring, allowed: linear | foldback"),
        (["--policy", "magic"], "policy is magic, allowed: fixed | dynamic"),
        (["--prompt", "0"], "prompt tokens is 0, allowed: >= 1"),
        (["--prompt", "nan"], "prompt is nan, allowed: finite"),
        (["--prompt", "1,x"], "prompt is '1,x', allowed: numbers with commas"),
        (["--prompt", "10.5"], "prompt is 10.5, allowed: whole tokens"),
        (["--history", "1000"], "prompt tokens is 1000, allowed: >= 1001"),
        (["--arrival", "1,2"], "number of arrival values is 2, allowed: 1 or 1"),
        (["--arrival", "-1"], "arrival is -1.0, allowed: >= 0"),
        (["--chunk", "32"], "chunk is 32, allowed: >= 64, the alignment"),
        (["--chunk", "8192", "--budget", "4096"], "chunk is 8192, allowed: <= budget = 4096"),
        (["--min-chunk", "0"], "min-chunk is 0, allowed: 1 to chunk = 32768"),
        (["--smooth", "1.5"], "smooth is 1.5, allowed: 0 < smooth <= 1"),
        (["--smooth", "nan"], "smooth is nan"),
        (["--inflight", "0"], "inflight is 0, allowed: >= 1"),
        (["--transfer", "maybe"], "transfer is maybe, allowed: async | blocking"),
        (["--packing", "half"], "packing is half, allowed: on | off"),
        (["--order", "newest"], "order is newest, allowed: oldest | feed-first"),
        (["--kv-tokens", "10"], "prompt tokens is 1000, allowed: <= kv_tokens = 10"),
        (["--ranks", "two"], "ranks is two, allowed: a whole number, 1 to 256"),
        (["--ranks=2.5"], "ranks is 2.5, allowed: a whole number, 1 to 256"),
        (["--ranks", "nan"], "ranks is nan, allowed: a whole number, 1 to 256"),
        (["--ranks", "-1"], "ranks is -1, allowed: 1 to 256"),
        (["--chunk", "-5"], "chunk is -5, allowed: >= 64"),
        (["--chunk", "1e5"], "chunk is 1e5, allowed: a whole number >= 1"),
        (["--smooth", "x"], "smooth is x, allowed: a number, 0 < smooth <= 1"),
        (["--history", "-5"], "history is -5, allowed: >= 0"),
        (["--decodes", "-1"], "decodes is -1, allowed: >= 0"),
        (["--record", "/nowhere/x.json"], "record is /nowhere/x.json, allowed: a file that can be written"),
        (["--colour", "red"], "No such option: --colour"),
    ],
)
def test_impossible_values_end_with_one_line(
    capsys: pytest.CaptureFixture[str], cost: str, arguments: list[str], message: str
) -> None:
    error = complain(capsys, "simulate", "--ranks", "2", "--prompt", "1000", "--cost", cost, *arguments)
    assert error.startswith(f"prefillctl: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": STAGE | {"k2": -1}}, "k2 is -1.0, allowed: >= 0"),
        ({"model": STAGE | {"k1": float("nan")}}, "k1 is nan"),
        ({"shares": [0.5, 0.25, 0.25]}, "number of shares is 3, allowed: 2, one per stage of the layout"),
        ({"model": {"k0": 1, "k1": 0, "k2": 0}}, "f(base) - f(0) is 0.0, allowed: > 0"),
    ],
)
def test_an_impossible_cost_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], cost: str, change: dict[str, object], message: str
) -> None:
    Path(cost).write_text(json.dumps(json.loads(Path(cost).read_text()) | change))
    error = complain(capsys, "simulate", "--ranks", "2", "--prompt", "9000", "--policy", "dynamic", "--cost", cost)
    assert error.startswith(f"prefillctl: {message}")


def test_a_missing_cost_file_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = complain(capsys, "simulate", "--ranks", "2", "--prompt", "9000", "--cost", "/nowhere.json")
    assert "cost is /nowhere.json, allowed: a readable file (No such file or directory)" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,input_length,output_length\n", "rows of t.csv is 0, allowed: >= 1"),
        ("", "rows of t.csv is 0"),
        ("a,b\n1,2\n", "columns of t.csv is a, b, allowed: with arrival_s, input_length, output_length"),
        ("arrival_s,input_length,output_length\n0,x,1\n", "t.csv line 2 input_length is 'x', allowed: a number"),
        ("arrival_s,input_length,output_length\n0,0,1\n", "t.csv line 2 input_length is 0.0, allowed: >= 1"),
        ("arrival_s,input_length,output_length\nnan,5,1\n", "t.csv line 2 arrival_s is nan"),
        ("arrival_s,input_length,output_length\n0,5\n", "t.csv line 2 output_length is None"),
    ],
)
def test_a_broken_trace_names_line_and_column(
    capsys: pytest.CaptureFixture[str], cost: str, tmp_path: Path, text: str, message: str
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    assert message in complain(capsys, "replay", str(trace), "--ranks", "2", "--cost", cost)


def test_the_prefix_cache_holds_what_the_session_had() -> None:
    rows = groups(read_trace(DATA / "agentic.csv"))[0]
    cold, warm = requests(rows, cached=False), requests(rows, cached=True)
    assert {r.history for r in cold} == {0}
    assert warm[0].history == 0
    known = rows[0].tokens + rows[0].output
    assert rows[1].tokens >= known or warm[1].history == 0
    assert all(w.history % 128 == 0 and w.history < w.tokens for w in warm)
    assert sum(w.history for w in warm) > 0.5 * sum(w.tokens for w in warm)


def test_replay_is_faster_with_the_prefix_cache(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    words = ["replay", str(DATA / "agentic.csv"), "--ranks", "2", "--cost", cost, "--limit", "12"]
    cold, warm = ask(capsys, *words), ask(capsys, *words, "--cached")
    assert cold["requests"] == warm["requests"] == 12
    assert warm["computed_tokens"] < cold["computed_tokens"] / 2
    assert sum(c["count"] for c in cold["ttft_s"].values()) == 12
    assert set(cold["ttft_s"]) == {prompt_class(r.tokens) for r in read_trace(DATA / "agentic.csv", 12)}
    for name, seconds in warm["ttft_s"].items():
        assert seconds["p50"] < cold["ttft_s"][name]["p50"]


def test_compare_runs_all_policies_on_all_traces(capsys: pytest.CaptureFixture[str], cost: str, tmp_path: Path) -> None:
    traces = [str(DATA / "agentic.csv"), str(DATA / "mooncake.csv")]
    out = tmp_path / "compare.svg"
    words = ["compare", *traces, "--ranks", "2", "--cost", cost, "--limit", "30", "--load", "0.5", "--out", str(out)]
    results = ask(capsys, *words)
    assert list(results) == ["agentic, cold", "agentic, prefix cache", "mooncake, cold"]
    for arms in results.values():
        labels = [re.sub(r" \(\d+\)", "", arm["label"]) for arm in arms]
        assert labels[:2] == ["fixed linear", "dynamic linear"]
        assert labels[-1] == "auto foldback"
        assert len(set(labels)) == 10
    assert {p.name for p in tmp_path.glob("*.svg")} == {"compare-1.svg", "compare-2.svg", "compare-3.svg"}


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], cost: str
) -> None:
    words = ["compare", str(DATA / "mooncake.csv"), "--ranks", "2", "--cost", cost, "--out"]
    assert "a name ending in .png or .svg" in complain(capsys, *words, "x.gif")
    assert "a name in a folder that exists" in complain(capsys, *words, "/nowhere/x.png")


def test_auto_loses_to_none_of_the_policies_it_chooses_from(capsys: pytest.CaptureFixture[str], cost: str) -> None:
    """On a queue: whole prompts with one clock, at 80% of what the ranks can do."""
    words = ["compare", str(DATA / "mooncake.csv"), "--ranks", "2", "--cost", cost, "--load", "0.8"]
    (arms,) = ask(capsys, *words).values()
    mean = {a["label"]: sum(c["count"] * c["mean"] for c in a["ttft_s"].values()) / a["requests"] for a in arms}
    assert mean["auto foldback"] <= min(mean.values()) * 1.01


def test_a_recorded_run_becomes_pictures_and_a_trace(
    capsys: pytest.CaptureFixture[str], cost: str, tmp_path: Path
) -> None:
    record = tmp_path / "run.json"
    words = ["simulate", "--layout", "foldback", "--ranks", "2", "--chunk", "8192", "--cost", cost]
    ask(capsys, *words, "--prompt", "65536,9000", "--arrival", "0,3", "--record", str(record))
    data = json.loads(record.read_text())
    (period,) = data["periods"]
    assert [c["chunks"][0]["tokens"] for c in period["batches"]].count(8192) == 9
    for rank in period["ranks"]:
        clock = period["start"]
        for segment in rank["segments"]:
            assert segment["start"] == pytest.approx(clock)
            clock = segment["end"]
        assert clock == pytest.approx(period["end"])
    for name in ("a.svg", "a.png", "a.json"):
        assert main(["timeline", str(record), "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert "bubble" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(e["name"] == "compute" for e in events) == 4 * 10
    assert "ending in .svg, .png or .json" in complain(capsys, "timeline", str(record), "--out", "x.gif")
    assert "period is 9, allowed: one of 1" in complain(
        capsys, "timeline", str(record), "--out", "x.svg", "--period", "9"
    )


def test_paper_shows_published_beside_model(capsys: pytest.CaptureFixture[str]) -> None:
    tables = ask(capsys, "paper")
    text = json.dumps(tables)
    for published in (
        "27.0",
        "22.5",
        "61.4",
        "53.5",
        "22,424",
        "16,150",
        "18,197",
        "18,875",
        "307.90",
        "322.22",
        "11.0%",
    ):
        assert published in text
    assert all(t["cost"] and t["reproduced"] and t["unexplained"] for t in tables)
    ttft = {row[1]: row for row in tables[0]["rows"][:2]}
    assert float(ttft["static 32K"][3]) == pytest.approx(27.0, rel=0.005)
    dcpp = {row[0]: row for row in tables[2]["rows"]}
    assert dcpp["512K"][2].startswith("-4")
    assert dcpp["128K"][2].startswith("+4")
    assert dcpp["512K"][3].startswith("+")
    best = {row[0]: row[2] for row in tables[5]["rows"]}
    assert set(best.values()) == {"24K"}
    assert main(["paper"]) == 0
    assert "not explained:" in capsys.readouterr().out
