"""Which arms run on which site, at which lengths, how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefill_runtime.cli.paper import EXPOSED_PER_TOKEN, deepseek

from benchmarks.engine.sites import EMULATED, ORDERS, Arm, K, Site

STEP = 1.0
"""Seconds between measurements: what vLLM's idle processes spin before they sleep, and what telemetry takes."""


@dataclass(frozen=True)
class Suite:
    """rounds: how often each length is measured. together: arms are asked at the same time, which only emulated devices
    allow. lives: how often the engines are started anew, for differences so small that where an engine's memory lies
    matters. sweep_below: from that length on few arms are measured: of stock the size that was best at the length
    before and ``neighbours`` beside it, of ours the first ``deep_policies``. queued: prompts that are asked at once, of
    which the last answer's time counts. samples, depths, profile_seconds, base: the profile step.
    """

    site: Site
    arms: tuple[Arm, ...]
    rounds: dict[int, int]
    sweep_below: int = 1 << 62
    neighbours: int = 1
    deep_policies: int = 1
    queued: int = 1
    together: bool = False
    lives: int = 1
    samples: int = 24
    depths: int = 4
    profile_seconds: int = 180
    base: int = 2048

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def calibrated(self) -> list[int]:
        """Stages per rank of the arms that need a calibration."""
        return sorted({arm.virtual for arm in self.arms if arm.calibrated})

    def guess(self, length: int) -> float:
        """Seconds of one measurement."""
        return self.queued * self.site.guess(length)

    def limited(self, lengths: list[int] | None, rounds: int | None, arms: list[str] | None) -> Suite:
        kept = {n: min(r, rounds or r) for n, r in self.rounds.items() if lengths is None or n in lengths}
        chosen = tuple(a for a in self.arms if arms is None or a.name in arms)
        if arms is not None:
            known = {a.name for a in self.arms}
            chosen += tuple(Arm(name, self.base) for name in arms if name not in known)
        return replace(self, rounds=kept, arms=chosen)


def stock(*sizes: int) -> tuple[Arm, ...]:
    return tuple(Arm(None, size) for size in sizes)


def ours(chunk: int, *policies: str) -> tuple[Arm, ...]:
    return tuple(Arm(policy, chunk) for policy in policies)


def folded(chunk: int, *policies: str) -> tuple[Arm, ...]:
    return tuple(Arm(policy, chunk, virtual=2) for policy in policies)


def toy() -> Suite:
    site = Site("toy", "toy", 2, 64 * K, 96 * K, (5.2e-8, 1e-4))
    return Suite(
        site,
        stock(256, 512, 1024, 2048, 4096) + ours(2048, "Auto", "Dynamic"),
        {4 * K: 9, 8 * K: 9, 16 * K: 5, 32 * K: 3, 64 * K: 4},
        sweep_below=32 * K,
    )


def foldback() -> Suite:
    site = replace(toy().site, name="foldback")
    return Suite(
        site,
        stock(256, 512, 1024, 2048) + folded(2048, "Planned", "Auto", "Fixed"),
        {2 * K: 5, 4 * K: 5, 16 * K: 5, 32 * K: 6},
    )


def windows() -> Suite:
    """Every other layer of the model has a sliding window: chunks of one size grow less and less with their history."""
    site = replace(toy().site, name="windows", model="windowed")
    fixed = tuple(Arm("Fixed", size, virtual=2) for size in (512, 1024, 2048))
    return Suite(site, stock(512) + fixed + folded(2048, "Planned"), {16 * K: 5})


def smollm2() -> Suite:
    site = Site("smollm2", "smollm2", 2, 8064, 16 * K, (1.5e-7, 1e-3))
    return Suite(site, stock(256, 512, 1024, 2048) + ours(2048, "Auto", "Dynamic"), {2 * K: 3, 4 * K: 3, 8064: 2})


def overhead() -> Suite:
    site = Site("overhead", "toy", 1, 8 * K, 16 * K, (5.2e-8, 1e-4))
    return Suite(site, stock(2048) + ours(2048, "Fixed"), {8 * K: 24}, lives=4)


SLOW = deepseek(transfer=EXPOSED_PER_TOKEN / 4)
"""Transfers as ``prefillctl paper`` has them: a quarter of what the paper's straight pipeline has exposed."""
BEST_FIXED = {2: 12 * K, 4: 8 * K, 8: 6 * K}
"""By the model (benchmarks/planner.py), at 128K and at 512K alike."""


def emulated(ranks: int, longest: int = 512 * K) -> Suite:
    site = Site(
        f"emulated-p{ranks}", "emu", ranks, longest, longest + K,
        (EMULATED.model.k2 / 2, EMULATED.model.k1 * 1.35), EMULATED,  # type: ignore[attr-defined]
    )  # fmt: skip
    best = BEST_FIXED[ranks]
    return Suite(
        site, stock(best * 3 // 4, best, best * 4 // 3, best * 16 // 9) + ours(32 * K, "Planned", "Auto")
        + folded(32 * K, "Planned") + folded(best, "Fixed"), {128 * K: 3, 512 * K: 1},
        sweep_below=512 * K, neighbours=0, deep_policies=3, together=True,
        samples=8, depths=2, profile_seconds=360 if ranks < 8 else 900, base=32 * K,
    )  # fmt: skip


def ablation() -> Suite:
    """The steps of seeds/004 on the emulated device: three prompts in the queue, one size, transfers that count."""
    site = replace(emulated(2).site, name="ablation", emulate=SLOW)
    size = 16 * K  # divides the prompts, so that none begins in the last chunk of the one before
    orders = tuple(Arm("Fixed", size, 2, order) for order in (*ORDERS, ""))
    return Suite(site, stock(size) + orders, {128 * K: 3}, queued=3, together=True)


ONCE = {
    "toy": toy, "foldback": foldback, "windows": windows, "smollm2": smollm2, "overhead": overhead, "ablation": ablation
}  # fmt: skip


def named(name: str, ranks: list[int]) -> list[Suite]:
    if name == "emulated":
        return [emulated(count) for count in ranks]
    return [ONCE[name]()]
