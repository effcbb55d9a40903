"""Pages that are made from the code say what the code says."""

from __future__ import annotations

from argparse import SUPPRESS

import pytest

from resilience.launcher.arguments import parser
from tests.generate_docs import DOCS, PAGES

LIMITS = "limits of the rank monitors"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "stale: run `poe docs`"


def test_config_page_has_every_option_of_ours_that_the_help_shows() -> None:
    groups = [group for group in parser()._action_groups if group.title in ("resilience's options", LIMITS)]
    shown = [action for group in groups for action in group._group_actions if action.help != SUPPRESS]
    page = (DOCS / "config.md").read_text()
    missing = [action.dest for action in shown if not any(f"`{name}`" in page for name in action.option_strings)]
    assert len(groups) == 2 and missing == []


def test_reference_lists_the_members_of_an_enum_and_not_its_constructor() -> None:
    reference = PAGES["api.md"]()
    for name, member in (("Status", "ABORTING"), ("Fault", "SEGFAULT"), ("Interruption", "UNRESPONSIVE")):
        _, _, described = reference.partition(f"### `{name}`\n")
        block = described.partition("\n### ")[0]
        assert f"`{member}`" in block and "boundary" not in block and f"{name}(" not in block
