"""One vLLM engine as a process of its own: JSON commands on stdin, JSON answers on stdout.

Run by harness.Engine. When stdin closes, because the tests are done or were killed, the whole process group goes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def read_commands(commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engine processes print to stdout too
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()

    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        command = commands.get()
        params = SamplingParams(
            temperature=0.0, max_tokens=command.get("max_tokens", 8), ignore_eos=True, extra_args=command.get("extra")
        )
        if command["do"] == "generate":
            prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answer = {
                "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "cached": [o.num_cached_tokens for o in outputs],
            }
        elif command["do"] == "submit":
            llm.llm_engine.add_request(command["request"], {"prompt_token_ids": command["prompts"][0]}, params)
            answer = {}
        elif command["do"] == "abort":
            llm.llm_engine.abort_request([command["request"]])
            answer = {}
        else:
            llm.llm_engine.engine_core.shutdown()
            print(json.dumps({}), file=answers, flush=True)
            return


if __name__ == "__main__":
    main()
