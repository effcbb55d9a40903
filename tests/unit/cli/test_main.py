"""The command line as a whole: help of every command, and wrong commands."""

from __future__ import annotations

import pytest

from resilience.cli import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_the_options_of_a_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in (["help", verb], [verb, "--help"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"usage: resilience {verb}")


def test_help_alone_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb} " not in shown] == []


def test_help_of_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "reprot"]) == 2
    assert "did you mean 'report'?" in capsys.readouterr().err
