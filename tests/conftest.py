"""Fixtures for all packages."""

from collections.abc import Iterator

import pytest

from tests.harness import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of living ranks: `ranks(2).run(fn, *args)`."""
    pools = RankPools()
    yield pools
    pools.close()
