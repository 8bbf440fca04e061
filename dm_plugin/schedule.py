"""Which steps are probed: every `freq`-th absolute step from start to end inclusive, or inside given intervals.

The four keys and their meaning are those of Transformer Engine's debug features: intervals replace start and end, and a step is the number
of the training step, not a count since attachment.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """freq >= 1; start_end_list: ((first, last), ...) inclusive. Raises ValueError naming the key that is wrong."""

    freq: int = 1
    start_step: int = 0
    end_step: int | None = None
    start_end_list: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not _whole(self.freq) or self.freq < 1:
            raise ValueError(f"freq={self.freq!r} is not a schedule frequency; give a whole number of steps, 1 or more")
        for key in ("start_step", "end_step"):
            value = getattr(self, key)
            if not (_whole(value) or (key == "end_step" and value is None)):
                raise ValueError(
                    f"{key}={value!r} is not a step; give a whole number" + (" or nothing" if key == "end_step" else "")
                )
        if self.start_end_list is not None:
            try:
                pairs = tuple((first, last) for first, last in self.start_end_list)
            except (TypeError, ValueError):
                pairs = ((None, None),)  # type: ignore[assignment]
            if not all(_whole(a) and _whole(b) and a <= b for a, b in pairs):
                raise ValueError(
                    f"start_end_list={self.start_end_list!r} is not a list of [first, last] pairs of steps with first <= last"
                )
            object.__setattr__(self, "start_end_list", tuple(sorted(pairs)))

    def _intervals(self) -> Sequence[tuple[int, int | None]]:
        return self.start_end_list if self.start_end_list is not None else ((self.start_step, self.end_step),)

    def enabled(self, step: int) -> bool:
        """Is this step probed?"""
        inside = any(first <= step and (last is None or step <= last) for first, last in self._intervals())
        return inside and step % self.freq == 0

    def next_step(self, step: int) -> int | None:
        """The first probed step after `step`, None when there is none."""
        for first, last in self._intervals():
            candidate = -(-max(step + 1, first) // self.freq) * self.freq
            if last is None or candidate <= last:
                return candidate
        return None


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
