"""What an environment's start doesn't load, and what is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[3] / "examples/policy/tokenizer"
PROGRAM = f"""
import sys
models = []
sys.addaudithook(lambda event, about: event == "open" and "transformers/models/" in str(about[0]) and models.append(about))
from atropos.envs import AgentEnv
from transformers import AutoTokenizer, PreTrainedTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(TOKENIZER)!r})
assert tokenizer.decode(tokenizer.encode("a word")) == "a word"
assert len(models) < 100, len(models)
assert "wandb.sdk" not in sys.modules

import transformers, transformers.models.auto, wandb
early = transformers
from transformers import AutoConfig, PreTrainedTokenizerFast
assert isinstance(tokenizer, PreTrainedTokenizerFast)
import transformers
for package in early, transformers:
    assert package.AutoTokenizer is AutoTokenizer
    assert package.AutoConfig is AutoConfig
    assert package.models.auto.AutoTokenizer is AutoTokenizer
    assert package.__version__.count(".") >= 2
    assert not hasattr(package, "no_such_name")
assert wandb.Table(columns=["a"], data=[["b"]]).columns == ["a"]
assert wandb.sdk is sys.modules["wandb.sdk"]
assert not hasattr(wandb, "no_such_name")
"""


def test_transformers_and_wandb_load_when_used() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_the_program_imported_itself_stays() -> None:
    program = "import wandb; before = wandb.init; from atropos.envs import AgentEnv; assert wandb.init is before"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
