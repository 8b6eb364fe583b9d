"""A view, over every backend of this run; all of it is in `tests/security/test_views`."""

import pytest

from tests.security.test_views import (
    test_only_workspace_is_shown,
    test_servers_answer_in_view,
    test_writes_pass_one_way,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = [
    "test_only_workspace_is_shown",
    "test_servers_answer_in_view",
    "test_writes_pass_one_way",
]
