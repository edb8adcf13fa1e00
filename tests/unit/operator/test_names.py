from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_operator.desired import names

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def test_short_names_stay_as_they_are() -> None:
    assert names.pipeline_name("chat") == "chat"
    assert names.replica_name("chat", 3) == "chat-3"
    assert names.leader_address("chat", 0, "prod") == "chat-0-0.chat-0.prod.svc"


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True), st.integers(0, 99))
def test_every_name_fits_where_kubernetes_puts_it(name: str, replica: int) -> None:
    child = names.replica_name(name, replica)
    assert LABEL.fullmatch(child)
    assert len(f"{child}-6b5c9d8f7c") <= 63, "controller-revision-hash is a label"
    assert LABEL.fullmatch(names.pipeline_name(name))
    assert len(names.pipeline_label(name)) <= 63


def test_long_names_that_begin_alike_stay_apart() -> None:
    long = "pp-longctx-qwen3-235b-a22b-512k-prod-eu-west-number-"
    found = {names.replica_name(f"{long}{i}", 0) for i in range(100)}
    assert len(found) == 100


@pytest.mark.parametrize(
    ("one", "other"), [("a.b", "a-b"), ("1a", "p1a"), ("a" * 60, "a" * 61)], ids=["dots", "digits", "length"]
)
def test_names_that_must_be_changed_do_not_collide(one: str, other: str) -> None:
    assert names.pipeline_name(one) != names.pipeline_name(other)
