from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.harness import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for rank in made.ranks:
        rank.clean_up()
