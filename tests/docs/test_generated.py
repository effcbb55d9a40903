"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from importlib import import_module
from types import ModuleType

import pytest

import resilience
from resilience import calibration, errors
from resilience.launcher.arguments import parser
from tests.generate_docs import API, DOCS, PAGES

LIMITS = "limits of the rank monitors"
NOT_RAISED = {
    "CorruptCheckpoint": "only the demonstration raises it",
    "LeftInChild": "it never leaves the wrapper's call",
    "NodeRefused": "only the launcher raises it",
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "stale: run `poe docs`"


def test_config_page_has_every_option_of_ours_that_the_help_shows() -> None:
    groups = [group for group in parser()._action_groups if group.title in ("resilience's options", LIMITS)]
    shown = [action for group in groups for action in group._group_actions if action.help != SUPPRESS]
    page = (DOCS / "config.md").read_text()
    missing = [action.dest for action in shown if not any(f"`{name}`" in page for name in action.option_strings)]
    assert len(groups) == 2 and missing == []


@pytest.mark.parametrize("module", [resilience, calibration])
def test_reference_has_each_public_name_of_a_module_that_loads_them_on_first_use(module: ModuleType) -> None:
    assert sorted(dict(API)[module.__name__]) == sorted(set(module.__all__) - {"__version__"})


def test_reference_has_every_error_that_users_can_catch() -> None:
    defined = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    listed = {getattr(import_module(module), name) for module, names in API for name in names}
    assert {name for name, kind in defined.items() if kind.__module__ == errors.__name__ and kind not in listed} == set(
        NOT_RAISED
    )


def test_reference_names_the_base_of_an_error() -> None:
    reference = PAGES["api.md"]()
    _, _, described = reference.partition("### `ConfigurationError`\n")
    assert "Base: `ResilienceError`, `ValueError`." in described.partition("\n### ")[0]


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
