"""One vLLM engine as a process of its own: JSON commands on stdin, JSON answers on stdout.

Run by harness.Engine. When stdin closes, because the tests are done or were killed, the whole process group goes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

from tests.engine.guard import end_group


def read_commands(commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    end_group()


class Host:
    """Requests that were submitted and never asked for again go on in the engine; their answers are dropped."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(**config).llm_engine
        self.count = 0

    def submit(self, request: str, prompt: list[int], command: dict[str, Any]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=command.get("max_tokens", 8), ignore_eos=True, extra_args=command.get("extra")
        )
        self.engine.add_request(request, {"prompt_token_ids": prompt}, params, priority=command.get("priority", 0))

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        names = [f"asked-{self.count}-{number}" for number in range(len(command["prompts"]))]
        for name, prompt in zip(names, command["prompts"], strict=True):
            self.submit(name, prompt, command)
        outputs: dict[str, Any] = {}
        while not outputs.keys() >= set(names):
            outputs |= {output.request_id: output for output in self.engine.step() if output.finished}
        return {
            "names": names,
            "tokens": [list(outputs[name].outputs[0].token_ids) for name in names],
            "cached": [outputs[name].num_cached_tokens for name in names],
        }

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "generate":
            return self.generate(command)
        if command["do"] == "submit":
            self.submit(command["request"], command["prompts"][0], command)
        else:
            self.engine.abort_request([command["request"]])
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engine processes print to stdout too
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    host = Host(json.loads(sys.argv[1]))
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        answer = host.do(commands.get())


if __name__ == "__main__":
    main()
