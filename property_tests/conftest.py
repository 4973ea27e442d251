"""The backends that every law is checked on."""

from __future__ import annotations

import pytest

BACKENDS = ["reference"]


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    """Return the body under test; a law is the same for all of them."""
    return request.param
