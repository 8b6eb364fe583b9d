"""What an env counts: groups, trajectories, faults by code, seconds by phase, call latencies. Bounded."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from atropos.envs.running.activity import Activity
from atropos.metrics import Histogram, percentiles

KEPT = 20_000
"""Latency samples kept, the latest."""


@dataclass
class EnvMetrics:
    """Counted since the env started; `wandb` gets it with every log.

    Attributes:
        calls: tool calls that were run, those of the env's own hooks included.
        tool_errors: results that were errors, in the conversations of finished agents; `train/tool_errors_count` of a
            Hermes env adds up to the same.
        groups / dropped: groups completed; dropped whole, by the failure's code.
        items_left_out: on which no trajectory could score here.
        unsent: complete groups that are left out, by reason (same_scores, too_long, wrong_size, bad_scores,
            bad_lengths).
        maybe_sent_twice: groups that the trajectory API may have taken more than once.
        verifier_zeros: trajectories scored 0 because they left their verifier without a reward.
        retries: new attempts of trajectories, by the failure's code.
        scores: of completed groups; evaluations have their own mean.
        hook_errors: by hook.
        activity: the trajectories in flight.
        verify: the verifying hook, by result: ok, or the failure's code.
        trajectory_seconds: scored trajectories, from their slot to their score.
    """

    groups: int = 0
    trajectories: int = 0
    calls: int = 0
    tool_errors: int = 0
    cancelled_groups: int = 0
    maybe_sent_twice: int = 0
    verifier_zeros: int = 0
    items_left_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    unsent: Counter[str] = field(default_factory=Counter[str])
    retries: Counter[str] = field(default_factory=Counter[str])
    hook_errors: Counter[str] = field(default_factory=Counter[str])
    stop_reasons: Counter[str] = field(default_factory=Counter[str])
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    call_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT))
    scores: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT))
    activity: Activity = field(default_factory=Activity)
    verify: Histogram = field(
        default_factory=lambda: Histogram("atropos_env_verify_seconds", "Time of the verifying hook.", "result")
    )
    trajectory_seconds: Histogram = field(
        default_factory=lambda: Histogram("atropos_env_trajectory_seconds", "Time of scored trajectories.")
    )

    @property
    def mean_score(self) -> float | None:
        """Of the latest `scores`; None before the first."""
        return sum(self.scores) / len(self.scores) if self.scores else None

    def as_dict(self) -> dict[str, object]:
        """Flat names and numbers, as wandb wants them."""
        call_p50_s, call_p99_s = percentiles(self.call_s, 0.5, 0.99)
        values: dict[str, object] = {
            "env/groups": self.groups,
            "env/trajectories": self.trajectories,
            "env/tool_calls": self.calls,
            "env/tool_errors": self.tool_errors,
            "env/groups_cancelled": self.cancelled_groups,
            "env/groups_maybe_sent_twice": self.maybe_sent_twice,
            "env/verifier_zeros": self.verifier_zeros,
            "env/items_left_out": self.items_left_out,
            "env/groups_dropped": sum(self.dropped.values()),
            "env/trajectory_retries": sum(self.retries.values()),
            "env/call_p50_s": call_p50_s,
            "env/call_p99_s": call_p99_s,
        }
        if self.mean_score is not None:
            values["env/score_mean"] = self.mean_score
        named = {
            "groups_dropped": self.dropped,
            "groups_unsent": self.unsent,
            "retries": self.retries,
            "hook_errors": self.hook_errors,
            "stop": self.stop_reasons,
        }
        for prefix, counter in named.items():
            values.update({f"env/{prefix}/{name}": count for name, count in counter.items()})
        values.update({f"env/phase_{name}_s": seconds for name, seconds in self.phases.items()})
        return values
