"""Values of options and variables with the name of a secret are masked, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.facts.masking import masked, masked_text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py --hf-token abc --lr 1", "train.py --hf-token *** --lr 1"),
        ("train.py --hf_token=abc --lr=1", "train.py --hf_token=*** --lr=1"),
        ("train.py --wandb-api-key abc", "train.py --wandb-api-key ***"),
        ("train.py -password abc --api_key=x=y", "train.py -password *** --api_key=***"),
        ("train.py model.apiKey=abc +db.password=x", "train.py model.apiKey=*** +db.password=***"),
        ("env HF_TOKEN=abc CLIENT_SECRET=x python train.py", "env HF_TOKEN=*** CLIENT_SECRET=*** python train.py"),
        ("train.py --secret --verbose", "train.py --secret --verbose"),
        ("train.py --password -abc --lr 1", "train.py --password *** --lr 1"),
        ("train.py -q -password abc", "train.py -q -password ***"),
        ("train.py --verbose -token abc x", "train.py --verbose -token *** x"),
        ("train.py -token -password abc", "train.py -token -password ***"),
        ("train.py --db postgres://me:abc@host/db", "train.py --db postgres://me:***@host/db"),
    ],
)
def test_value_of_a_secret_is_masked(command: str, shown: str) -> None:
    assert " ".join(masked(command.split(" "))) == shown
    assert masked_text(command) == shown


@pytest.mark.parametrize(
    "command",
    [
        "train.py --tokenizer bpe --max-tokens 4096 --calibration-key k --key=7 --api v1",
        "train.py --tokens_per_step=8 passwords=2 secretary=x api=1 SECRETS_DIR=/run",
        "train.py https://host:8080/path user@host:22 --monkey-patch x",
        'train.py tcp://token:8080/secret password:22 --config={"tokenizer":"bpe","max_tokens":4}',
    ],
)
def test_other_names_stay(command: str) -> None:
    assert " ".join(masked(command.split(" "))) == command
    assert masked_text(command) == command


def test_secrets_within_one_argument_are_masked() -> None:
    assert masked(["sh", "-c", "HF_TOKEN='a b' run --password \"c d\" && x"]) == (
        "sh",
        "-c",
        "HF_TOKEN=*** run --password *** && x",
    )
    assert masked(['--config={"api_key": "abc", "lr": 1}']) == ('--config={"api_key": ***, "lr": 1}',)
    assert masked(["--token", "a b c"]) == ("--token", "***")


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ('{"api_key":"abc","lr":1}', '{"api_key":***,"lr":1}'),
        ('{"lr":1,"hub":{"token" :"a b,c"}}', '{"lr":1,"hub":{"token" :***}}'),
        (r"{\"token\":\"a, b\",\"lr\":1}", r"{\"token\":***,\"lr\":1}"),
        ("{'password':'a b'}", "{'password':***}"),
        ("a=1,token=abc", "a=1,token=***"),
        ("http://host/?token=abc", "http://host/?token=***"),
    ],
)
def test_secrets_within_a_value_are_masked(config: str, shown: str) -> None:
    assert masked([f"--config={config}"]) == (f"--config={shown}",)
    assert masked(["--config", config]) == ("--config", shown)
    if "'" not in config:
        assert masked_text(f"train.py --config='{config}' x") == f"train.py --config='{shown}' x"


@given(st.text(alphabet="abcXYZ0189+/_", min_size=12, max_size=40), st.sampled_from(["=", " "]))
def test_no_secret_is_left(secret: str, between: str) -> None:
    for name in ("--token", "--my-token", "--hf.token", "--API-KEY", "--x_secret_y", "--password"):
        assert secret not in " ".join(masked(f"a.py {name}{between}{secret}".split(" ")))
