"""Asking leaders for their calibration, over real connections on the loopback interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefill_operator.reconcile.group import Group, Rank
from prefill_operator.reconcile.offers import ANSWER_BYTES, Leader, Offers, leaders
from prefill_operator.reconcile.queue import Key

from tests.leader import Leader as Server

KEY = ("ns", "a")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


class Asking:
    """Offers whose news can be awaited, on a clock that a test moves."""

    def __init__(self, interval: float) -> None:
        self.now, self.news = 0.0, asyncio.Queue[Key]()
        self.offers = Offers(interval, self.news.put_nowait, lambda: self.now)

    async def quiet(self) -> None:
        """Until no request is under way."""
        while tasks := [task for task in asyncio.all_tasks() if task.get_name().startswith("calibration of")]:
            await asyncio.wait(tasks)


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    found = Asking(60)
    yield found
    await found.offers.close()


async def test_an_answer_is_known_at_the_next_look_and_told_once(server: Server, asking: Asking) -> None:
    server.offer = "first"
    leader = Leader(0, "uid", server.address)
    assert asking.offers.latest(KEY, [leader]) == {}
    assert await asyncio.wait_for(asking.news.get(), 10) == KEY
    assert asking.offers.latest(KEY, [leader]) == {0: "first"}
    server.offer = "second"
    asking.now = 59
    assert asking.offers.latest(KEY, [leader]) == {0: "first"}
    await asking.quiet()
    assert server.count == 1, "asked once a minute"
    asking.now = 60
    assert asking.offers.latest(KEY, [leader]) == {0: "first"}
    await asking.quiet()
    assert asking.offers.latest(KEY, [leader]) == {0: "second"}
    asking.now = 120
    asking.offers.latest(KEY, [leader])
    await asking.quiet()
    assert (server.count, asking.news.qsize()) == (3, 1), "the same again is no news"


async def test_another_pod_is_asked_at_once_and_one_that_went_is_forgotten(server: Server, asking: Asking) -> None:
    server.offer = "x"
    asking.offers.latest(KEY, [Leader(0, "one", server.address)])
    await asking.quiet()
    assert asking.offers.latest(KEY, [Leader(0, "two", server.address)]) == {}
    await asking.quiet()
    assert server.count == 2
    assert asking.offers.latest(KEY, []) == {}
    assert asking.offers.latest(KEY, [Leader(0, "two", server.address)]) == {}


async def test_nothing_offered_is_no_trouble(server: Server, asking: Asking, caplog: pytest.LogCaptureFixture) -> None:
    asking.offers.latest(KEY, [Leader(0, "uid", server.address)])
    await asking.quiet()
    assert (asking.offers.latest(KEY, [Leader(0, "uid", server.address)]), caplog.text) == ({}, "")


@pytest.mark.parametrize(
    ("status", "headers", "body", "trouble"),
    [
        (500, {}, "boom", "answers with status 500"),
        (302, {"Location": "http://127.0.0.1:1/calibration"}, "x", "answers with status 302"),
        (200, {}, "x" * (ANSWER_BYTES + 1), f"answers with more than {ANSWER_BYTES} bytes"),
    ],
)
async def test_a_bad_answer_is_logged_once(
    server: Server, asking: Asking, caplog: pytest.LogCaptureFixture, status: int, headers: dict[str, str], body: str,
    trouble: str,
) -> None:  # fmt: skip
    server.offer, server.status, server.headers = body, status, headers
    for now in (0, 60):
        asking.now = now
        assert asking.offers.latest(KEY, [Leader(3, "uid", server.address)]) == {}
        await asking.quiet()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"ns/a: replica 3 gives no calibration: http://{server.address}:9400/calibration {trouble}" in record.message


async def test_what_was_offered_stays_while_the_leader_is_silent(server: Server, asking: Asking) -> None:
    server.offer = "x"
    leader = Leader(0, "uid", server.address)
    asking.offers.latest(KEY, [leader])
    await asking.quiet()
    server.released.clear()
    asking.now = 60
    asking.offers.latest(KEY, [leader])
    await asking.quiet()
    assert asking.offers.latest(KEY, [leader]) == {0: "x"}


async def test_nobody_waits_for_a_silent_leader(server: Server, asking: Asking) -> None:
    server.offer = "x"
    server.released.clear()
    loop = asyncio.get_running_loop()
    asking.offers.latest(KEY, [Leader(0, "uid", server.address)])
    await loop.run_in_executor(None, server.wait_asked, 0)
    asking.now = 60
    assert asking.offers.latest(KEY, [Leader(0, "uid", server.address)]) == {}
    server.released.set()
    assert await asyncio.wait_for(asking.news.get(), 10) == KEY
    assert server.count == 1, "not asked again while it is being asked"


async def test_an_address_nobody_listens_at(asking: Asking, caplog: pytest.LogCaptureFixture) -> None:
    with Server() as gone:
        pass
    asking.offers.latest(KEY, [Leader(0, "uid", gone.address)])
    await asking.quiet()
    assert "Cannot connect" in caplog.text


def test_only_leaders_of_serving_groups_are_asked() -> None:
    def group(replica: int, ready: bool, address: str | None, index: int = 0) -> Group:
        status: dict[str, Any] = {"podIP": address} if address else {}
        rank = Rank(index, {"metadata": {"uid": f"pod-{replica}"}, "status": status})
        return cast(Group, SimpleNamespace(replica=replica, ready=ready, ranks=(rank,)))

    found = leaders(
        [group(0, True, "10.0.0.1"), group(1, False, "10.0.0.2"), group(2, True, None), group(3, True, "x", 1)]
    )
    assert found == [Leader(0, "pod-0", "10.0.0.1")]
