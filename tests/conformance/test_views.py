"""A view, over every backend of this run; all of it is in `tests/security/test_views`."""

import pytest

from tests.security.test_views import (
    test_a_server_of_the_slot_answers_in_its_view,
    test_a_view_shows_the_workspace_and_nothing_else_that_was_written,
    test_programs_of_the_slot_see_nothing_that_a_view_writes_and_the_view_sees_what_they_write,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = [
    "test_a_server_of_the_slot_answers_in_its_view",
    "test_a_view_shows_the_workspace_and_nothing_else_that_was_written",
    "test_programs_of_the_slot_see_nothing_that_a_view_writes_and_the_view_sees_what_they_write",
]
