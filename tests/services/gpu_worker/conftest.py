"""Which tests of this folder have passed, for the page that says what is proven."""

import pytest

_PASSED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.add(report.nodeid.rpartition("/")[2])


@pytest.fixture
def passed() -> frozenset[str]:
    """File, function and parameters of each test that has passed so far."""
    return frozenset(_PASSED)
