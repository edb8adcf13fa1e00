"""Parts of the supervisor that need no engine: what counts as an error line, which files are leaked."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from prefill_runtime.agent.config import EndReason, LastWords
from prefill_runtime.agent.engine_api import count_requests
from prefill_runtime.agent.settings import Places, leave_last_words, shorten
from prefill_runtime.agent.supervisor import LONGEST_LINE, SHARED_MEMORY, Output, describe_exit, remove_leaked_memory


def output_of(*lines: str) -> Output:
    readable, writable = os.pipe()
    with os.fdopen(writable, "w") as sink:
        sink.write("".join(f"{line}\n" for line in lines))
    output = Output(readable)
    output.settle()
    return output


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: no",
        "torch.OutOfMemoryError: no",
        "(EngineCore pid=7) RuntimeError: no",
        "(Worker_PP1 pid=7) ERROR 11-29 18:07:18 [core.py:1346] huggingface_hub.errors.SomeError: no",
    ],
)
def test_the_first_error_is_remembered(line: str) -> None:
    later = [f"RuntimeError: see above ({i})" for i in range(60)]
    warning = "WARNING 11-29 18:06:00 [utils.py:299] this can cause errors like `OSError: [Errno 24]`"
    output = output_of(warning, line, *later)
    assert output.first_error == line
    assert output.tail() == "\n".join(later[-40:])


def test_an_output_without_errors() -> None:
    output = output_of("one", "two")
    assert (output.first_error, output.tail()) == ("", "one\ntwo")


def test_exits() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -100)] == [
        "exit code 0", "exit code 3", "signal SIGKILL", "signal 100",
    ]  # fmt: skip


def test_shorten_keeps_both_ends() -> None:
    assert shorten("short", 10) == "short"
    text = shorten("a" * 500 + "b" * 500, 100)
    assert (len(text), text[0], text[-1]) == (100, "a", "b")


@pytest.mark.parametrize("character", ["x", "\u2588", "\U0001f600", "\x00", "\n", '"'])
def test_last_words_fit_into_a_termination_message(tmp_path: Path, character: str) -> None:
    """4096 bytes, beyond which the kubelet cuts; progress bars take three bytes a character, binary six."""
    places = Places(termination=tmp_path / "termination")
    leave_last_words(places, EndReason.ENGINE_EXITED, "cause " + character * 5000 + " end", 1)
    text = places.termination.read_bytes()
    assert 2800 < len(text) <= 4096
    message = LastWords.model_validate_json(text).message
    assert (message[:6], message[-4:]) == ("cause ", " end")


def test_progress_bars_colours_and_binary_do_not_hide_the_cause() -> None:
    readable, writable = os.pipe()
    output = Output(readable)
    with os.fdopen(writable, "wb") as sink:
        sink.write(b"\rload  10%\rload  20%\n\x1b[31mValueError: no\x1b[0m\n\x00\xff\x01\n")
        sink.write(b"y" * (3 * LONGEST_LINE))  # a line that never ends must not fill the memory
    output.settle()
    assert output.first_error == "ValueError: no"
    assert output.tail().splitlines() == ["load  20%", "ValueError: no", "\ufffd\ufffd\ufffd", *["y" * 400] * 3]


@pytest.mark.parametrize("kind", ["vllm_dist", "29500-pp:0-[0-1]-cpushm"])  # of vLLM 0.28, of 0.23
def test_only_leaked_files_are_removed(kind: str) -> None:
    started = time.time()
    leaked, mapped, foreign = (SHARED_MEMORY / f"{name}_test_{os.getpid()}" for name in (kind, "psm", "other"))
    names: list[Path] = [leaked, mapped, foreign]
    try:
        for path in names:
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            remove_leaked_memory(started + 100)
            assert leaked.exists()  # older than the engine
            remove_leaked_memory(started)
            assert [path.exists() for path in names] == [False, True, True]
        remove_leaked_memory(started)
        assert [path.exists() for path in names] == [False, False, True]
    finally:
        for path in names:
            path.unlink(missing_ok=True)


def test_a_semaphore_in_use_is_kept() -> None:
    started = time.time()
    lock = multiprocessing.get_context("spawn").Lock()
    path = SHARED_MEMORY / f"sem.{lock._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    remove_leaked_memory(started)
    assert path.exists()


def test_requests_in_work_are_summed_over_engines() -> None:
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\n'
    )
    assert count_requests(text) == 7
    assert count_requests("something_else 1\n") is None
