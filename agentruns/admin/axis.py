"""A time axis that is broken where nobody worked, so that days of waiting do not squash seconds of work.

Pure: moments in, positions out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

SHORTEST_BREAK = 1.0  # seconds
WIDEST_BREAK = 72.0
LABEL = 110.0  # what a time takes, so that no two are written over each other
EVERY = 160.0
FINE = timedelta(seconds=10)  # a stretch below this is labelled to the tenth

Stretch = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Break:
    """A stretch that is drawn shorter than it was."""

    x: float
    width: float
    length: timedelta


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled moment."""

    x: float
    at: datetime
    label: str


class Axis:
    """Where each moment lies between 0 and `width`."""

    def __init__(self, moments: Iterable[datetime], worked: Iterable[Stretch], width: float) -> None:
        self.times = sorted(set(moments))
        self.width = width
        self.breaks: list[Break] = []
        lengths = [(b - a).total_seconds() for a, b in pairwise(self.times)]
        broken = _broken(lengths, self._is_worked(list(worked)))
        narrow = min(WIDEST_BREAK, width / 2 / len(broken)) if broken else 0.0
        drawn = sum(length for place, length in enumerate(lengths) if place not in broken)
        scale = (width - narrow * len(broken)) / drawn if drawn else 0.0
        self.places = [0.0]
        for place, length in enumerate(lengths):
            step = narrow if place in broken else length * scale
            if place in broken:
                self.breaks.append(Break(self.places[-1], step, timedelta(seconds=length)))
            self.places.append(self.places[-1] + step)

    def x(self, moment: datetime) -> float:
        """Return where a moment lies; one outside lies at the nearer end."""
        right = bisect_right(self.times, moment)
        if right == 0:
            return 0.0
        if right == len(self.times):
            return self.places[right - 1]
        before, after = self.times[right - 1], self.times[right]
        share = (moment - before) / (after - before)
        return self.places[right - 1] + share * (self.places[right] - self.places[right - 1])

    def at(self, x: float) -> datetime:
        """Return the moment that lies at a place."""
        right = min(max(bisect_right(self.places, x), 1), len(self.places) - 1)
        if len(self.places) == 1:
            return self.times[0]
        before, after = self.places[right - 1], self.places[right]
        share = (x - before) / (after - before) if after > before else 0.0
        return self.times[right - 1] + min(share, 1.0) * (self.times[right] - self.times[right - 1])

    def ticks(self) -> list[Tick]:
        """Return the moments to label: both ends, where a break ends, and some in between."""
        end = self.places[-1]
        wanted = [0.0, end, *(one.x + one.width for one in self.breaks), *_every(end)]
        chosen: list[float] = []
        for x in wanted:
            inside = any(one.x < x < one.x + one.width for one in self.breaks)
            if not inside and all(abs(x - other) >= LABEL for other in chosen):
                chosen.append(x)
        chosen.sort()
        moments = [timezone.localtime(self.at(x)) for x in chosen]
        days = [None, *(moment.date() for moment in moments)]
        fine = self.times[-1] - self.times[0] < FINE
        return [
            Tick(x, moment, _clock(moment, day != moment.date(), fine))
            for x, moment, day in zip(chosen, moments, days, strict=False)
        ]

    def _is_worked(self, stretches: list[Stretch]) -> list[bool]:
        """Return for each pair of neighbouring moments whether somebody worked between them."""
        index = {moment: place for place, moment in enumerate(self.times)}
        change = [0] * (len(self.times) + 1)
        for start, end in stretches:
            change[index[start]] += 1
            change[index[end]] -= 1
        busy, found = 0, []
        for place in range(len(self.times) - 1):
            busy += change[place]
            found.append(busy > 0)
        return found


def _broken(lengths: list[float], worked: list[bool]) -> set[int]:
    """Return the waits to be drawn shorter: the longest, until the rest takes no longer than the work."""
    idle = [place for place, busy in enumerate(worked) if not busy]
    work = sum(length for length, busy in zip(lengths, worked, strict=True) if busy)
    limit = work or max(lengths, default=0.0)
    waited, broken = sum(lengths[place] for place in idle), set()
    for place in sorted(idle, key=lengths.__getitem__, reverse=True):
        if waited <= limit or lengths[place] < SHORTEST_BREAK:
            break
        broken.add(place)
        waited -= lengths[place]
    return broken


def _every(end: float) -> list[float]:
    return [EVERY * number for number in range(1, int(end / EVERY) + 1)]


def _clock(moment: datetime, is_new_day: bool, fine: bool) -> str:
    text = f"{moment:%H:%M:%S}" + (f".{moment.microsecond // 100_000}" if fine else "")
    if not is_new_day:
        return text
    return _("%(day)s, %(time)s") % {"day": date_format(moment, "j M"), "time": text}
