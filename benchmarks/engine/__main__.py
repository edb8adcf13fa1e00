"""``python -m benchmarks.engine run|trace|render``: stock vLLM against this product's policies on real engines.

run takes suites (toy, foldback, windows, ...; all without a name), prints how long they will take, measures what
the results folder lacks and renders the page. It goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.engine import machine, render, trace
from benchmarks.engine.runner import Progress, Run, awake, calibrations, estimate, profile_estimate
from benchmarks.engine.sites import Arm
from benchmarks.engine.store import Store
from benchmarks.engine.suites import ONCE, STEP, foldback, named, toy
from localcluster import leftovers

SUITES = (*ONCE, "emulated")
REPLAYED = ["stock 512", "stock 2048", "Auto", "Planned", "Auto FoldBack"]
"""The arms of a trace, unless others are named."""


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that engines are ended
    leftovers.mark()
    leftovers.end_leftovers()
    store = Store(options.results)
    if options.step == "render":
        render.write(store)
        return 0
    refusal = machine.refusal()
    if refusal and not options.force:
        print(refusal, file=sys.stderr)
        return 2
    if not getattr(options, "dry_run", False):
        store.set_machine(machine.describe())
    progress = Progress(options.minutes)
    if options.step == "trace":
        replay(options, store, progress)
    elif not measure(options, store, progress):
        return 0
    if options.page:
        render.write(store)
    print(render.document(store))
    return 0


def measure(options: argparse.Namespace, store: Store, progress: Progress) -> bool:
    """False when only the time it would take was asked for."""
    suites = [
        suite.limited(options.lengths, options.rounds, options.arms)
        for name in options.suites or SUITES
        for suite in named(name, options.ranks)
    ]
    for suite in suites:
        progress.say(f"{suite.name}: about {estimate(suite, store) / 60:.0f} minutes")
    profiles = profile_estimate(suites, store)
    total = (profiles + sum(estimate(suite, store) for suite in suites)) / 60
    progress.say(f"profile steps: at most {profiles / 60:.0f} minutes")
    bound = "" if options.minutes is None else f", at most {options.minutes:g}"
    progress.say(f"all of it: about {total:.0f} minutes{bound}; results in {options.results}")
    if options.dry_run:
        return False
    texts = calibrations(suites, store, progress)
    for suite in suites:
        Run(suite, store, progress).run(texts[suite.name])
    return True


def replay(options: argparse.Namespace, store: Store, progress: Progress) -> None:
    """Arms one after the other in alternating order: a trace loads both cores by itself."""
    arms = tuple(dict.fromkeys(toy().arms + foldback().arms))
    suite = replace(toy(), arms=arms).limited(None, None, options.arms or REPLAYED)
    asked = trace.read(options.trace, suite.site, options.rows, options.length_scale, options.load)
    took = asked.arrivals[-1][0]
    progress.say(f"{asked.name}: {asked.tokens} tokens over {took:.0f} s for each arm and round")
    text = calibrations([suite], store, progress)[suite.name]
    rounds = options.rounds or 1
    with ExitStack() as stack:
        engines = Run(suite, store, progress).start(suite.arms, text, stack)
        for number in range(rounds):
            turn: list[Arm] = list(suite.arms)[:: -1 if number % 2 else 1]
            for arm in turn:
                if store.has(asked.name, arm.name, 1, number) or not progress.room_for(1.5 * took + STEP):
                    continue
                with awake([engines[arm]]):
                    answers = trace.keep(store, asked, engines[arm], number)
                mean = sum(answer.seconds for answer in answers) / len(answers)
                progress.say(f"{arm.name}, round {number + 1}: mean TTFT {mean:.2f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    run = steps.add_parser("run", help="measure what is missing")
    run.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="SUITE", help=f"of {', '.join(SUITES)}")
    run.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS")
    run.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=(2, 4, 8), help="of emulated devices")
    run.add_argument("--dry-run", action="store_true", help="only say how long it would take")
    replays = steps.add_parser("trace", help="replay a trace on the toy")
    replays.add_argument("trace", type=Path, help="CSV with arrival_s and input_length")
    replays.add_argument("--rows", type=int, default=40)
    replays.add_argument("--length-scale", type=float, default=0.125)
    replays.add_argument("--load", type=float, default=0.6)
    for step in (run, replays):
        step.add_argument("--arms", nargs="+", metavar="ARM", help="names of arms, as in the tables, or any policy")
        step.add_argument("--rounds", type=int, help="at most so many")
        step.add_argument("--minutes", type=float, help="start nothing that would end later")
        step.add_argument("--force", action="store_true", help="measure on a machine that is not quiet")
        step.add_argument("--no-page", dest="page", action="store_false", help="leave docs/benchmarks.md as it is")
    for step in (run, replays, steps.add_parser("render", help="results into docs/benchmarks.md")):
        step.add_argument("--results", type=Path, default=machine.ROOT / "out" / "benchmarks")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
