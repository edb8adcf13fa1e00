"""What an engine must do whatever its policy, layout and number of ranks: bodies of tests that many modules have."""

from __future__ import annotations

from prefill_runtime.telemetry.events import Finish, Issue, Request

from tests.engine.harness import Engine, finished, issued, prompt

SIZES = (1, 33, 511, 512, 513, 1500, 4096, 16_000)


def check_alone(engine: Engine, truth: list[list[int]]) -> None:
    """Each prompt while nobody else is there. truth: what stock vLLM answers on one rank to prompts of ``SIZES``."""
    assert [engine.tokens([prompt(size)])[0] for size in SIZES] == truth


def check_together(engine: Engine, truth: list[list[int]]) -> None:
    since = engine.agent.mark()
    assert engine.tokens([prompt(size) for size in reversed(SIZES)]) == truth[::-1]
    assert engine.agent.wait(finished(len(SIZES)), since) == ["length"] * len(SIZES)
    answered = {x.prompt_tokens for x in engine.agent.events[since:] if isinstance(x, Request)}
    assert answered == set(SIZES)


def check_abort(engine: Engine, truth: list[list[int]], chunks: int) -> None:
    """A long prompt is left after so many of its chunks."""
    since, name = engine.agent.mark(), f"victim-{chunks}"
    engine.submit(name, prompt(16_000, seed=chunks))
    engine.agent.wait(lambda events: len(issued(events, name)) >= chunks, since)
    engine.abort(name)
    assert engine.agent.wait(finished(1), since) == ["abort"]
    done = sum(tokens for _, tokens in issued(engine.agent.events[since:], name))
    assert 0 < done < 16_000, "the abort came too late to test anything"
    assert engine.tokens([prompt(size) for size in SIZES[:6]]) == truth[:6]


def check_cached_prefix(engine: Engine, cached: bool) -> list[int]:
    """What the engine has of a prompt counts as its history. Returns the chunks of the rest, of 3948 tokens."""
    shared, history = prompt(2048, seed=5), 2048 if cached else 0
    engine.tokens([shared])
    since = engine.agent.mark()
    assert engine.generate([shared + prompt(1900, seed=6)])["cached"] == [history]
    engine.agent.wait(finished(1), since)
    chunks = issued(engine.agent.events[since:])
    assert chunks[0][0] == history
    sizes = [tokens for _, tokens in chunks]
    assert sum(sizes) == 3948 - history
    return sizes


def check_preempted(engine: Engine) -> None:
    """Prompts fit an engine with 67 blocks of KV cache, their answers do not."""
    prompts = [prompt(1020, seed=seed) for seed in range(70, 78)]
    alone = [engine.tokens([one], max_tokens=40)[0] for one in prompts]
    since = engine.agent.mark()
    assert engine.tokens(prompts, max_tokens=40) == alone
    reached, again = dict[str, int](), set[str]()
    for event in engine.agent.events[since:]:
        for chunk in event.stamp.chunks if isinstance(event, Issue) else ():
            if chunk.history < reached.get(chunk.request, 0):
                again.add(chunk.request)
            reached[chunk.request] = chunk.history + chunk.tokens
    assert again, "nobody was preempted, so nothing was tested"
    assert [x.outcome for x in engine.agent.events[since:] if isinstance(x, Finish)] == ["length"] * len(prompts)
