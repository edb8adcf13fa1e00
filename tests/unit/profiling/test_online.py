import math

import numpy as np
import pytest
from prefill_runtime.profiling.document import Refusal, RefusalReason
from prefill_runtime.profiling.fitting import Fit
from prefill_runtime.profiling.online import OnlineCalibration
from prefill_runtime.scheduler.cost import HistoryModel, Piece

TRUE = HistoryModel(1e-8, 1e-5, 0.02)


def feed(online: OnlineCalibration, model: HistoryModel, count: int, largest: int = 2048, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for n in range(count):
        pieces: list[Piece] = [
            (int(random.integers(64, largest + 1)), int(random.integers(0, 16_384)))
            for _ in range(int(random.integers(1, 4)))
        ]
        seconds = model.batch_seconds(pieces) * (25 if n % 10 == 9 else math.exp(random.normal(0, 0.01)))
        online.add(pieces, seconds)


def test_batches_of_several_requests_recover_the_model_despite_outliers() -> None:
    online = OnlineCalibration(None, 2048)
    feed(online, TRUE, 200)
    fit = online.refit()
    assert isinstance(fit, Fit), fit
    assert fit.coefficients == pytest.approx({"a": 1e-8, "b": 1e-5, "c": 0.02}, rel=0.05)
    assert online.target_seconds == pytest.approx(TRUE.pass_seconds(2048.0, 0.0), rel=0.05)


def test_drift_shows_a_changed_device_and_a_refit_follows_it() -> None:
    online = OnlineCalibration(TRUE, 2048, window=64)
    feed(online, TRUE, 64)
    assert online.drift == pytest.approx(0.01, abs=0.02)
    slower = HistoryModel(2e-8, 2e-5, 0.04)
    feed(online, slower, 64, seed=1)
    assert online.drift == pytest.approx(0.5, abs=0.02)
    assert online.due
    online.refit()
    assert not online.due
    assert online.drift == pytest.approx(0, abs=0.02)


def test_short_prompts_do_not_move_the_target() -> None:
    online = OnlineCalibration(TRUE, 65_536)
    before = online.target_seconds
    feed(online, HistoryModel(3e-8, 3e-5, 0.06), 100, largest=512)
    assert isinstance(online.refit(), Fit)
    assert online.target_seconds == before


def test_what_cannot_be_is_left_out_and_counted() -> None:
    online = OnlineCalibration(TRUE, 2048)
    for seconds in (math.nan, math.inf, -1.0, 0.0):
        online.add([(64, 0)], seconds)
    online.add([(64, 0)], 0.1, decodes=3)
    online.add([], 0.1)
    assert online.ignored == 6
    refusal = online.refit()
    assert isinstance(refusal, Refusal)
    assert refusal.reason == RefusalReason.TOO_FEW_SAMPLES


def test_identical_batches_are_refused_and_the_model_stays() -> None:
    online = OnlineCalibration(TRUE, 2048)
    for _ in range(100):
        online.add([(512, 0)], 0.1)
    refusal = online.refit()
    assert isinstance(refusal, Refusal)
    assert refusal.reason == RefusalReason.ILL_CONDITIONED
    assert online.model == TRUE
