"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import re
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


def test_help_names_unit_and_default_of_every_option_of_ours() -> None:
    groups = {group.title: group for group in parser()._action_groups}
    assert "S: seconds" in (groups[LIMITS].description or "")
    options = groups["resilience's options"]._group_actions
    no_unit = [action.dest for action in options if action.metavar == "S" and "seconds" not in (action.help or "")]
    no_default = [
        action.dest
        for action in [*options, *groups[LIMITS]._group_actions]
        if action.help != SUPPRESS and action.nargs != 0
        if not re.search("default|may be repeated|override it", action.help or "")
    ]
    assert (no_unit, no_default) == ([], [])
