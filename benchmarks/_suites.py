"""Named sets of shapes, and where a run stands against the speed goals.

speed = t(peer) / t(ours), both medians of one run; above 1 is ours faster. "Best BF16" is the fastest of the BF16 arms that ran.
"""

from typing import NamedTuple

BF16 = ("cudnn_bf16", "fa3", "fa4")
HEADLINE = ("1,64,8,128,16384", "1,64,8,128,4096", "2,16,16,128,8192", "1,32,8,256,16384", "1,64,8,64,16384")
SUITES = {
    "headline": HEADLINE,
    "growth": (
        *(f"1,64,8,128,{t}" for t in (2048, 4096, 8192, 16384, 32768, 65536, 131072)),
        *(f"1,{h},{g},128,8192" for h, g in ((8, 1), (16, 2), (32, 4), (128, 16))),
        *(f"{b},16,2,128,4096" for b in (1, 2, 4, 8)),
    ),
}


class Goal(NamedTuple):
    """The speed that one kind of pass (fwd, bwd, fwd_bwd) of one shape has to reach against a peer."""

    shape: str
    kind: str
    peer: str
    bar: float


GOALS = (
    Goal(HEADLINE[0], "fwd", "bf16", 1.25),
    Goal(HEADLINE[0], "bwd", "bf16", 1.05),
    Goal(HEADLINE[0], "fwd_bwd", "bf16", 1.10),
    Goal(HEADLINE[0], "fwd_bwd", "te_fp8", 1.45),
    Goal(HEADLINE[0], "bwd", "dm_stale", 0.80),
    Goal(HEADLINE[1], "fwd_bwd", "bf16", 1.0),
    Goal(HEADLINE[2], "fwd_bwd", "bf16", 1.0),
    Goal(HEADLINE[3], "fwd_bwd", "bf16", 1.25),
    Goal(HEADLINE[4], "fwd_bwd", "bf16", 0.95),
)


class Standing(NamedTuple):
    """A goal, the peer arm that it was held against, and the speed; both None when no such arm ran."""

    goal: Goal
    arm: str | None
    speed: float | None

    @property
    def text(self) -> str:
        goal = self.goal
        if self.speed is None:
            return f"{goal.shape:18s} {goal.kind:8s} {goal.peer + ' did not run':16s} bar {goal.bar:.2f}"
        verdict = "met" if self.speed >= goal.bar else "MISSED"
        return f"{goal.shape:18s} {goal.kind:8s} {self.arm:16s} bar {goal.bar:.2f}  speed {self.speed:.2f}  {verdict}"


def standing(shape: str, ms: dict[str, float]) -> list[Standing]:
    """The goals of one shape, given the median ms of each arm (names as bench_attention writes them: `cudnn_bf16.fwd`, `dm.bwd_matched`)."""
    return [_stand(goal, ms) for goal in GOALS if goal.shape == shape]


def _stand(goal: Goal, ms: dict[str, float]) -> Standing:
    ours = ms["dm.fwd" if goal.kind == "fwd" else f"dm.{goal.kind}_matched"]
    if goal.peer == "dm_stale":
        names = [f"dm.{goal.kind}_stale"]
    else:
        names = [f"{peer}.{goal.kind}" for peer in (BF16 if goal.peer == "bf16" else (goal.peer,))]
    arm = min((n for n in names if n in ms), key=lambda n: ms[n], default=None)
    return Standing(goal, arm, None if arm is None else ms[arm] / ours)
