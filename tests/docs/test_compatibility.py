"""No name that docs/compatibility.md promises to keep disappears unnoticed."""

from __future__ import annotations

import re

import pytest
import yaml

from resilience.cli import VERBS, main
from tests.generate_docs import DOCS, ROOT, STABLE_NAMES, stable_names

NESTED = (("calibrate", "diff"), ("dashboards", "export"))


def test_no_stable_name_is_gone() -> None:
    listed = set((DOCS / STABLE_NAMES).read_text().splitlines())
    gone = sorted(listed - stable_names())
    assert gone == [], "users rely on these names; if they must go, delete their lines and add a `removed` fragment"


def test_list_of_stable_names_covers_every_kind() -> None:
    kinds = {name.partition(" ")[0] for name in stable_names()}
    assert kinds == {"alert", "command", "config", "event", "field", "file", "metric", "option", "python", "variable"}


@pytest.mark.parametrize("words", [*((verb,) for verb in VERBS if verb != "run"), *NESTED], ids=" ".join)
def test_list_has_the_command_and_each_option_that_its_help_shows(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of `run` are those of docs/config.md; the others of its help are torchrun's."""
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    beginnings = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    options = {
        option for beginning in beginnings for option in re.findall(r"(?:^|(?<=[ ,]))--?[a-z][a-z-]*", beginning)
    }
    assert {"-h", "--help"} <= options
    command = " ".join(words)
    listed = {name for name in stable_names() if re.fullmatch(rf"option {command} -\S+", name)}
    assert listed == {f"option {command} {option}" for option in options - {"-h", "--help"}}
    assert f"command {command}" in stable_names()


def test_list_has_each_alert_of_the_shipped_rules() -> None:
    groups = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alerts.yaml").read_text())["groups"]
    shipped = {f"alert {rule['alert']}" for group in groups for rule in group["rules"]}
    assert shipped == {name for name in stable_names() if name.startswith("alert ")} != set()
