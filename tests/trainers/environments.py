"""Slots and tasks as environments of TRL's `GRPOTrainer`, by its own package: `make test-trainers`."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from atropos.adapters.sharing import SandboxGoneError
from atropos.adapters.trl import AtroposSlot, AtroposTask
from atropos.errors import ConfigError
from examples.policy.tokenizer import FOLDER
from tests.adapters.hosts.accident import kill_container
from tests.files import write_files
from tests.inference import dialogs
from tests.trainers.packages import tiny_model

POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}
ONE = {**POOL, "slots_per_container": 1}
QUESTION = [{"role": "user", "content": ""}]
SOLVE, WRONG = "echo said > answer", "echo wrong > answer; ls"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n[verifier]\nenvironment_mode = "shared"\n',
        "instruction.md": "Say it.",
        "environment/Dockerfile": "FROM debian:13\nWORKDIR /app\nRUN touch note\n",
        "tests/test.sh": "#!/bin/sh\ngrep -qs said answer; [ $? = 0 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }
    return write_files(tmp_path / "one", files)


def qwen3_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    return tokenizer


def trainer(tmp_path: Path, commands: list[str], accident=lambda: None, **settings) -> GRPOTrainer:
    """One whose model calls `bash` with the command of its place in the batch, and is done."""
    tokenizer = qwen3_tokenizer()
    model = tiny_model(tokenizer)

    def generate(input_ids, **_):
        said = []
        for command, ids in zip(commands, input_ids, strict=False):
            if "tool_response" in tokenizer.decode(ids):
                said.append("done<|im_end|>")
            else:
                call = json.dumps({"name": "bash", "arguments": {"command": command}})
                said.append(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
        if said[0].startswith("done"):
            accident()
        ids = tokenizer(said, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids.to(input_ids.device)], dim=1)

    model.generate = generate
    return grpo(tmp_path, model, tokenizer, **settings)


def grpo(tmp_path: Path, model: PreTrainedModel, tokenizer, **settings) -> GRPOTrainer:
    """Two batches of four rollouts each."""
    args = GRPOConfig(
        str(tmp_path / "out"), num_generations=4, per_device_train_batch_size=4, max_steps=2, learning_rate=1e-2, use_cpu=True,
        bf16=False, logging_steps=1, report_to=[], save_strategy="no", max_completion_length=2000,
    )  # fmt: skip
    return GRPOTrainer(model=model, args=args, processing_class=tokenizer, **settings)


@dataclass
class Batch:
    """What was known of a batch once it was scored."""

    rewards: dict[str, list[float]]
    advantages: list[float]
    prompts: list[list[dict[str, str]]]
    shown: list[list[str]]


def trained(training: GRPOTrainer) -> list[Batch]:
    """Train, and keep each batch."""
    seen: list[Batch] = []
    scored = training._generate_and_score_completions

    def score(inputs):
        batch, logs = scored(inputs), training._logs
        shown = [[each["content"] for each in one if each["role"] == "tool"] for one in logs["completion"]]
        rewards = {name: [*values] for name, values in logs["rewards"].items()}
        seen.append(Batch(rewards, batch["advantages"].tolist(), [*logs["prompt"]], shown))
        return batch

    training._generate_and_score_completions = score
    training.train()
    return seen


def rows(task: Path) -> Dataset:
    return Dataset.from_dict({"prompt": [QUESTION] * 8, "task_dir": [str(task)] * 8})


def test_a_trainers_steps_are_attempts_at_a_task(task: Path, tmp_path: Path):
    training = trainer(
        tmp_path, [SOLVE, WRONG, SOLVE + "; exit 3", "true"], train_dataset=rows(task), environment_factory=partial(AtroposTask, pool=POOL)
    )  # fmt: skip
    before = training.model.lm_head.weight.detach().clone()
    batches = trained(training)
    rewards = [batch.rewards["AtroposTask"] for batch in batches]
    assert rewards == [[1.0, 0.0, 1.0, 0.0]] * 2, "each rollout has a slot of its own, in which nothing was done before"
    assert [[value > 0 for value in batch.advantages] for batch in batches] == [[True, False, True, False]] * 2
    assert not torch.equal(before, training.model.lm_head.weight.detach())
    assert batches[0].shown == [[""], ["answer\nnote\n"], ["\n[exit code 3]"], [""]]
    assert "Say it." in str(batches[0].prompts[0])


def test_a_lost_slot_has_no_reward(task: Path, tmp_path: Path):
    two = {**POOL, "slots_per_container": 2, "max_containers": 2, "min_containers": 2}
    happened: list[bool] = []

    def accident():
        if not happened:
            happened.append(True)
            kill_container()

    training = trainer(
        tmp_path, [SOLVE, WRONG] * 2, accident, train_dataset=rows(task), environment_factory=partial(AtroposTask, pool=two)
    )  # fmt: skip
    first, second = trained(training)
    rewards = first.rewards["AtroposTask"]
    lost = [math.isnan(reward) for reward in rewards]  # TRL's None
    assert sum(lost) == 2
    assert all(gone or reward == right for reward, gone, right in zip(rewards, lost, [1.0, 0.0] * 2, strict=True))
    assert [value for value, gone in zip(first.advantages, lost, strict=True) if gone] == [0.0, 0.0]
    assert second.rewards["AtroposTask"] == [1.0, 0.0, 1.0, 0.0], "the next batch is as ever"


class Counting(AtroposSlot):
    """A slot with a tool, and no reward of its own."""

    def reset(self, start: int, **row) -> str:
        super().reset(**row)
        self.slot.write_file("count", str(start))
        return "Count."

    def up(self) -> str:
        """Count one up.

        Returns:
            The number.
        """
        return self.slot.exec("expr $(cat count) + 1 | tee next && mv next count").output


def test_a_slot_has_tools_of_ones_own(tmp_path: Path):
    def counted(environments, **_):
        return [None if each.lost else float(each.slot.read_file("count")) for each in environments]

    data = Dataset.from_dict({"prompt": [QUESTION] * 4, "start": [5] * 4})
    commands = ["true", "echo 6 > count", "sleep 60", "head -c 100000 /dev/zero | tr '\\0' x"]
    factory = partial(Counting, pool=POOL, timeout_s=1, output_chars=500)
    training = trainer(tmp_path, commands, reward_funcs=counted, train_dataset=data, environment_factory=factory)
    batch = trained(training)[-1]
    assert batch.rewards["counted"] == [5.0, 6.0, 5.0, 5.0]
    assert batch.shown[2] == ["\n[it took longer than 1 seconds, and was killed]"]
    assert "characters left out" in batch.shown[3][0]
    assert Counting(pool=POOL).lost is False


@pytest.fixture(scope="module")
def acting_model() -> Path:
    """The tiny model of `make test-inference`, which calls a terminal by itself; where it isn't there, it is trained."""
    kept = os.environ.get("ATROPOS_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/atropos"
    folder = Path(kept) / "inference"
    if not (folder / "model/model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        conversations = folder / "conversations.jsonl"
        subprocess.run([sys.executable, "-m", "tests.inference.dialogs", conversations], check=True)
        training = [sys.executable, "tests/inference/tiny_model.py", conversations, FOLDER, folder / "model", "900"]
        subprocess.run(training, check=True)
    return folder / "model"


class Terminal(AtroposSlot):
    """A slot with the files that the tiny model looks at, and the tool that it knows."""

    def reset(self, **row) -> None:
        super().reset(**row)
        for name in dialogs.FILES:
            self.slot.write_file(name, f"{name} of a slot\n")

    def terminal(self, command: str) -> str:
        """Run a command.

        Args:
            command: The command line.
        """
        return self.bash(command)


def test_a_model_calls_tools_by_itself(acting_model: Path, tmp_path: Path):
    """TRL samples every token and reads every call; nothing is put into the model's mouth."""

    def looked(completions, **_):
        return [float(sum(message["role"] == "tool" for message in one)) for one in completions]

    task = [{"role": "system", "content": dialogs.SYSTEM}, {"role": "user", "content": dialogs.task(random.Random(1))}]
    model = Qwen3ForCausalLM.from_pretrained(acting_model)
    training = grpo(
        tmp_path, model, qwen3_tokenizer(), reward_funcs=looked,
        train_dataset=Dataset.from_dict({"prompt": [task] * 4}), environment_factory=partial(Terminal, pool=POOL),
    )  # fmt: skip
    first, *_ = trained(training)
    shown = [text for one in first.shown for text in one]
    assert len(shown) >= 4, first.shown
    assert sum(" of a slot" in text or text.split()[-1:] == ["1"] for text in shown) >= 2, shown
    assert any(len(one) > 2 for one in first.shown), "it goes on after what it was shown"


def test_an_agent_that_breaks_the_tests_scores_0(task: Path):
    one = AtroposTask(pool=ONE)
    assert one.reset(prompt=QUESTION, task_dir=str(task)) == "Say it."
    one.bash("rm /bin/sh")
    assert one.get_reward() == 0.0
    (task / "tests/test.sh").write_text("#!/bin/sh\ntrue\n")
    one.reset(task_dir=str(task))
    assert (one.get_reward(), one.get_reward()) == (None, None), "the task's own fault, and asked for twice"


def test_a_batch_needs_a_slot_for_each_rollout(task: Path):
    first, second = (AtroposTask(pool={**ONE, "acquire_timeout_s": 2}) for _ in range(2))
    first.reset(task_dir=str(task))
    with pytest.raises(SandboxGoneError, match="needs a slot for each of its rollouts"):
        second.reset(task_dir=str(task))
    assert (second.get_reward(), first.get_reward()) == (None, 0.0)


def test_rows_without_a_task_are_refused(task: Path):
    one = AtroposTask(pool=ONE)
    with pytest.raises(ConfigError, match="task_dir: the data set needs this column"):
        one.reset(prompt=QUESTION)
    (task / "task.toml").write_text('version = "1.0"\n[environment]\nmemory_mb = 9000000\n')
    with pytest.raises(ConfigError, match="memory"):
        one.reset(task_dir=task)
