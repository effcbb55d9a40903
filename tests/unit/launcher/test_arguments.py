"""The command line of `resilience run` is torchrun's, with options of ours beside."""

from __future__ import annotations

import pytest

from resilience.launcher.arguments import parse


@pytest.mark.parametrize("own", ["--timeout", "--same", "--ft", "--cold", "--rank", "--max-restart"])
def test_scripts_own_option_may_begin_as_one_of_ours(own: str) -> None:
    command = parse(["--nproc-per-node", "2", "train.py", own, "3"])
    assert command.torchrun.training_script_args == [own, "3"]


def test_torchruns_options_may_be_abbreviated_as_ever_and_ours_may_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--max_r", "4", "--stand", "--run-dir", "here", "train.py"]).torchrun.max_restarts == 4
    with pytest.raises(SystemExit):
        parse(["--run-di", "here", "train.py"])
    assert "unrecognized arguments: --run-di" in capsys.readouterr().err
