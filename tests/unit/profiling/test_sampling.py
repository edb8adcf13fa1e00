import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.profiling.sampling import plan, points, settled
from prefill_runtime.scheduler.errors import ParameterError


def test_sizes_go_evenly_from_base_to_one_quantum() -> None:
    sizes = sorted(p[0] for p in plan(8192, 64, 0, 131_072, 64).prompts[:64])
    assert len(set(sizes)) == 64
    assert sizes[-1] == 8192
    assert {b - a for a, b in itertools.pairwise(sizes)} <= {128, 192}
    assert sizes[0] == 64


def test_a_round_has_every_prompt_once_and_warm_ups_come_first() -> None:
    made = plan(2048, 64, 4, 32_768, 64)
    assert len(made.prompts) == len(set(made.prompts)) == 33
    assert len(made.warmups) >= 2
    assert made.warmups[0] == (2048,)


def test_rounds_go_on_until_the_quickest_repeats_stay() -> None:
    before = dict.fromkeys(range(20), 1.0)
    assert not settled({}, before)
    assert settled(before, before)
    assert settled(before, before | dict.fromkeys(range(4), 0.5))
    assert not settled(before, before | dict.fromkeys(range(5), 0.97))
    assert settled(before, dict.fromkeys(range(20), 0.99))


def test_one_long_prompt_reaches_several_depths() -> None:
    made = plan(2048, 64, 4, 32_768, 64)
    deep = max(made.prompts, key=len)
    assert len(deep) == 20
    assert deep == deep[::-1]
    assert (deep[0], min(deep), deep.count(128)) == (2048, 128, 2)
    assert all(0.5 <= b / a <= 2 for a, b in itertools.pairwise(deep))
    histories = {h for _, h, _ in points(deep, [1.0] * len(deep))}
    assert max(histories) == sum(deep) - 2048 > 4 * 2048


def test_depth_shrinks_to_what_the_model_length_allows() -> None:
    made = plan(32_768, 64, 4, 131_072, 128)
    deep = max(made.prompts, key=len)
    assert len(deep) == 20
    assert 100_000 < sum(deep) < 131_072


def test_whatever_was_measured_when_time_runs_out_covers_the_range() -> None:
    made = plan(8192, 64, 4, 131_072, 64)
    first = made.prompts[:10]
    sizes = sorted(p[0] for p in first if len(p) == 1)
    assert sizes[0] == 64
    assert sizes[-1] == 8192
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 8192 / 4
    assert any(len(p) > 1 for p in first)


def test_neighbours_are_of_similar_size() -> None:
    sizes = [p[0] for p in plan(8192, 64, 0, 131_072, 64).prompts]
    assert max(abs(a - b) for a, b in itertools.pairwise(sizes)) <= 8192 / 8 + 64


def test_the_lone_prompt_has_many_small_chunks() -> None:
    assert plan(2048, 64, 4, 32_768, 64).lone == (128,) * 32
    assert plan(512, 8, 2, 1024, 64).lone == (64,) * 15


def test_the_plan_prints_as_json() -> None:
    made = plan(512, 8, 2, 4096, 64)
    assert json.loads(made.to_json())["prompts"] == [list(p) for p in made.prompts]
    assert made.tokens == sum(sum(p) for p in (*made.warmups, *made.prompts, made.lone))


def test_points_count_history_along_the_prompt() -> None:
    assert points((512, 256, 64), [0.3, 0.2, 0.1]) == [(512, 0, 0.3), (256, 512, 0.2), (64, 768, 0.1)]
    with pytest.raises(ParameterError, match="seconds is 1, allowed: 2 values"):
        points((512, 256), [0.1])


@given(
    base=st.integers(64, 65_536),
    samples=st.integers(8, 256),
    depths=st.integers(0, 16),
    length=st.integers(129, 1 << 20),
    align=st.sampled_from([1, 8, 16, 64]),
)
def test_every_prompt_fits_the_model_and_every_chunk_is_aligned(
    base: int, samples: int, depths: int, length: int, align: int
) -> None:
    made = plan(base, samples, depths, length, align)
    for prompt in (*made.warmups, *made.prompts):
        assert sum(prompt) < length
        assert all(0 < c <= base and c % align == 0 for c in prompt)


def test_a_model_too_short_for_one_chunk_is_refused() -> None:
    with pytest.raises(ParameterError, match="max_model_len is 64, allowed: >= 65"):
        plan(512, 64, 0, 64, 64)
