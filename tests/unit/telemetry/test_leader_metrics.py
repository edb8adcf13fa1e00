"""What the leader measures of requests and passes, and says of its calibration."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest
from prefill_runtime.telemetry.events import Chunk, Fallback, FallbackReason, Pass, Request, Served, Stamp, encode
from prefill_runtime.telemetry.first_tokens import FirstTokens
from prefill_runtime.telemetry.hub import Hub
from prefill_runtime.telemetry.metrics import TTFT_BUCKETS

from tests.documents import calibration


def series(hub: Hub, name: str) -> dict[str, float]:
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", hub.metrics_text().decode(), re.M)
    return {labels: float(value) for labels, value in found}


def model_pass(seconds: float, *chunks: Chunk, stage: int = 0) -> Pass:
    return Pass(stamp=Stamp(batch=1, period=1, chunks=chunks), stage=stage, call=0.0, start=1.0, end=1.0 + seconds,
                sent=9.0, rank=stage)  # fmt: skip


def test_a_pass_is_compared_with_the_calibration_in_force() -> None:
    hub = Hub(0, 2, True)
    chunk = Chunk("a", 3000, 1000, 9000)
    predicted = 0.003 + 1000 * (2e-5 + 2e-9 * 3500)
    hub.feed(model_pass(predicted, chunk))
    assert series(hub, "prefill_chunk_prediction_error_ratio_count") == {}, "there is no calibration yet"
    hub.set_calibration(calibration())
    hub.feed(model_pass(0.75 * predicted, chunk))
    hub.feed_remote(1, [json.loads(encode(model_pass(1.5 * predicted, chunk, stage=1)))], 0.0)
    sums = series(hub, "prefill_chunk_prediction_error_ratio_sum")
    assert sums == {'stage="0"': pytest.approx(0.25), 'stage="1"': pytest.approx(0.5)}
    hub.set_calibration(calibration(k0=2 * 0.003, k1=4e-5, k2=4e-9))
    hub.feed(model_pass(2 * predicted, chunk))
    assert series(hub, "prefill_chunk_prediction_error_ratio_sum")['stage="0"'] == pytest.approx(0.25)
    hub.set_calibration(None)
    hub.feed(model_pass(predicted, chunk))
    assert series(hub, "prefill_chunk_prediction_error_ratio_count") == {'stage="0"': 2.0, 'stage="1"': 1.0}


def test_chunks_of_one_pass_share_its_fixed_part() -> None:
    hub = Hub(0, 1, True)
    hub.set_calibration(calibration(stages=1))
    seconds = 0.003 + 500 * (2e-5 + 2e-9 * 250) + 300 * (2e-5 + 2e-9 * 1150)
    hub.feed(model_pass(seconds, Chunk("a", 0, 500, 500), Chunk("b", 1000, 300, 2000)))
    assert series(hub, "prefill_chunk_prediction_error_ratio_sum") == {'stage="0"': pytest.approx(0.0, abs=1e-9)}


def test_a_pass_with_decode_steps_says_nothing_about_the_calibration() -> None:
    hub = Hub(0, 1, True)
    hub.set_calibration(calibration(stages=1))
    hub.feed(model_pass(0.5, Chunk("a", 0, 500, 500), Chunk("b", 700, 1, 600)))
    hub.feed(model_pass(0.5, Chunk("b", 700, 1, 600)))
    assert series(hub, "prefill_chunk_prediction_error_ratio_count") == {}
    assert series(hub, "prefill_chunk_seconds_count") == {'stage="0"': 1.0}


def test_every_reason_to_fall_back_is_there_before_it_happens() -> None:
    hub = Hub(0, 1, True)
    assert series(hub, "prefill_policy_fallback_total") == {f'reason="{r}"': 0.0 for r in FallbackReason}
    hub.feed(Fallback(reason="PolicyFailed"))
    assert series(hub, "prefill_policy_fallback_total")['reason="PolicyFailed"'] == 1.0
    for number in range(100):
        hub.feed(Fallback(reason=f"chunk-{number}"))
    reasons = series(hub, "prefill_policy_fallback_total")
    assert len(reasons) <= 33
    assert sum(reasons.values()) == 101


def test_drift_is_shown_once_it_is_known() -> None:
    hub = Hub(0, 1, True)
    assert series(hub, "prefill_calibration_drift_ratio") == {}
    hub.set_drift(0.125)
    assert series(hub, "prefill_calibration_drift_ratio") == {"": 0.125}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_first_token_is_its_prompts_whichever_side_tells_first(order: tuple[int, ...]) -> None:
    now = time.time()
    arrivals = [now, now + 0.0007]
    # As the stat logger gets it: the time of the step minus what vLLM says the first token took.
    served = [Served(arrival=(a + ttft) - ttft, ttft=ttft) for a, ttft in zip(arrivals, (31.0625013, 2.7), strict=True)]
    asked = [Request(request="r", prompt_tokens=n, ttft=1.0, queue=0.1, at=1.0, arrival=a) for n, a in
             zip((500_000, 900), arrivals, strict=True)]  # fmt: skip
    tokens, pairs = FirstTokens(), []
    for event in [(*asked, *served)[k] for k in order]:
        pairs += tokens.request(event) if isinstance(event, Request) else tokens.served(event)
    assert sorted(pairs) == [(900, 2.7), (500_000, 31.0625013)]


def test_parallel_samples_of_one_prompt_each_have_a_first_token() -> None:
    tokens = FirstTokens()
    request = Request(request="r", prompt_tokens=70_000, ttft=1.0, queue=0.1, at=1.0, arrival=5.0)
    pairs = tokens.request(request) + tokens.served(Served(arrival=5.0, ttft=1.0))
    pairs += tokens.served(Served(arrival=5.0, ttft=1.5)) + tokens.request(request)
    assert pairs == [(70_000, 1.0), (70_000, 1.5)]


def test_first_tokens_that_are_never_matched_are_forgotten() -> None:
    tokens = FirstTokens()
    for n in range(10_000):
        assert tokens.served(Served(arrival=float(n), ttft=1.0)) == []
    request = Request(request="r", prompt_tokens=1, ttft=1.0, queue=0.1, at=1.0, arrival=0.0)
    assert tokens.request(request) == []
    assert len(tokens._served) == 4096


def test_ttft_buckets_are_fine_where_users_look() -> None:
    steps = list(itertools.pairwise(TTFT_BUCKETS))
    assert max(b / a for a, b in steps if 1 <= a < 120) <= 1.25
    assert TTFT_BUCKETS[0] <= 0.05
    assert TTFT_BUCKETS[-1] >= 600
