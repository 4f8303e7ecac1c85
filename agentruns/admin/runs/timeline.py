"""The timeline of a run, drawn and in words. Pure: journal rows in, layout values out.

Its time axis is broken where nobody worked, so that days of waiting do not squash seconds of work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin.html import stamp
from agentruns.admin.runs import spans
from agentruns.admin.runs.spans import Mark, Span
from agentruns.journal.events import Row

ROWS = 400  # of a longer run the last ones are drawn
WIDTH = 900.0
EDGE = 8.0  # so that what lies at an end is not cut off
TOP, TITLE, BAR, GAP, BOTTOM = 22.0, 16.0, 18.0, 3.0, 22.0
DEEPEST = 6  # bars of one lane below each other
NARROWEST = 4.0
LETTER = 7.0  # pixels that a letter takes, about
SHORTEST_BREAK = 1.0  # seconds
WIDEST_BREAK = 72.0
LABEL = 110.0  # what a time takes, so that no two are written over each other
EVERY = 160.0
FINE = timedelta(seconds=10)  # a stretch below this is labelled to the tenth

LANES = {
    spans.MODEL: gettext_lazy("Model"),
    spans.TOOLS: gettext_lazy("Tools"),
    spans.PEOPLE: gettext_lazy("Waiting for people"),
    spans.IDLE: gettext_lazy("Waiting for a worker or a provider"),
}
Stretch = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Shape:
    """A bar, a mark, a break, a tick or the name of a lane; numbers are texts that no locale changes."""

    x: str
    y: str
    width: str
    height: str
    middle: str
    text: str = ""
    title: str = ""
    classes: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One span or mark in words."""

    start: Any
    length: str
    what: str
    outcome: str
    seq: str
    url: str


@dataclass(slots=True)
class Timeline:
    """The drawing of a page, and the same in words."""

    height: str = "0"
    width: str = f"{WIDTH:.0f}"
    summary: str = ""
    left_out: str = ""
    lanes: list[Shape] = field(default_factory=list)
    bars: list[Shape] = field(default_factory=list)
    marks: list[Shape] = field(default_factory=list)
    breaks: list[Shape] = field(default_factory=list)
    ticks: list[Shape] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


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
    """The place of each moment between 0 and `width`."""

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


def draw(
    rows: list[Row],
    now: datetime,
    *,
    doing: str = "",
    is_ended: bool = False,
    is_whole: bool = True,
    url: Callable[[int], str] = lambda seq: f"#row-{seq}",
) -> Timeline:
    """Return the timeline of a run's rows, in order; `doing` as in `spans.read`.

    `url` returns where a row is shown; `is_whole` says that no earlier rows were left out.
    """
    history = spans.read(rows, now, "" if is_ended else doing)
    result = Timeline()
    if not is_whole and rows:
        result.left_out = _("Only the last rows are drawn, from row %(seq)s on; the journal has all of them.")
        result.left_out %= {"seq": rows[0].seq}
    if not history.spans and not history.marks:
        return result
    last = max((row.created_at for row in rows), default=now)
    until = last if is_ended else max(now, last)
    for span in history.spans:
        span.start = min(span.start, until)
    _Drawing(result, history, until, url).draw()
    result.lines = _lines(history, until, url)
    result.summary = _summary(history, until)
    return result


def duration(length: timedelta) -> str:
    """Return a length of time for people, in its two largest units."""
    seconds = length.total_seconds()
    if seconds < 1:
        return _("%(count)d ms") % {"count": round(seconds * 1000)}
    if seconds < 60:
        return _("%(count)s s") % {"count": f"{seconds:.1f}".removesuffix(".0")}
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    if seconds < 3600:
        return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes[0], "seconds": minutes[1]}
    if seconds < 86400:
        return _("%(hours)d h %(minutes)d min") % {"hours": hours[0], "minutes": hours[1]}
    days, rest = divmod(round(seconds / 3600), 24)
    text = ngettext("%(days)d day", "%(days)d days", days) % {"days": days}
    return _("%(days)s %(hours)d h") % {"days": text, "hours": rest} if rest else text


class _Drawing:
    def __init__(
        self, result: Timeline, history: spans.History, until: datetime, url: Callable[[int], str]
    ) -> None:
        self.result, self.until, self.url = result, until, url
        self.spans, self.marks = history.spans, history.marks
        self.y = TOP
        moments = [moment for span in self.spans for moment in (span.start, span.end or until)]
        moments += [mark.at for mark in self.marks]
        worked = [(span.start, span.end or until) for span in self.spans if span.is_work]
        self.axis = Axis(moments, worked, WIDTH - 2 * EDGE)

    def draw(self) -> None:
        for lane, label in LANES.items():
            if found := [span for span in self.spans if span.lane == lane]:
                self._lane(str(label), found)
        height = self.y - TOP
        for gap in self.axis.breaks:
            length = duration(gap.length)
            title = _("%(length)s, drawn shorter") % {"length": length}
            text = length if len(length) * LETTER <= gap.width else "…"
            self.result.breaks.append(_shape(gap.x + EDGE, TOP, gap.width, height, text=text, title=title))
        for tick in self.axis.ticks():
            side = "start" if tick.x == 0 else "end" if tick.x >= self.axis.width - 1 else "middle"
            self.result.ticks.append(
                _shape(tick.x + EDGE, self.y + 14, height=self.y, text=tick.label, classes=side)
            )
        for mark in self.marks:
            self._mark(mark)
        self.result.height = f"{self.y + BOTTOM:.0f}"

    def _lane(self, label: str, found: list[Span]) -> None:
        self.result.lanes.append(_shape(EDGE, self.y + TITLE - 5, text=label))
        ends: list[datetime] = []
        for span in sorted(found, key=lambda span: span.start):
            depth = next((place for place, end in enumerate(ends) if end <= span.start), len(ends))
            depth = min(depth, DEEPEST - 1)
            ends[depth : depth + 1] = [span.end or self.until]
            self._bar(span, self.y + TITLE + depth * (BAR + GAP))
        self.y += TITLE + len(ends) * (BAR + GAP) + GAP

    def _bar(self, span: Span, y: float) -> None:
        left, right = self.axis.x(span.start), self.axis.x(span.end or self.until)
        width = max(right - left, NARROWEST)
        left = min(left, self.axis.width - width)
        fits = span.lane == spans.TOOLS and len(span.what) * LETTER + 8 <= width
        classes = f"ar-bar ar-bar--{span.lane} ar-bar--{span.tone}" + ("" if span.end else " ar-bar--open")
        self.result.bars.append(
            _shape(
                left + EDGE,
                y,
                width,
                BAR,
                text=span.what if fits else "",
                title=_words(span, self.until),
                classes=classes,
                url=self.url(span.seq),
            )
        )

    def _mark(self, mark: Mark) -> None:
        title = _("%(what)s (row %(seq)s)") % {"what": mark.what, "seq": mark.seq}
        self.result.marks.append(
            _shape(
                self.axis.x(mark.at) + EDGE,
                TOP,
                height=self.y,
                title=title,
                classes=f"ar-mark ar-mark--{mark.tone}",
                url=self.url(mark.seq),
            )
        )


def _shape(x: float, y: float, width: float = 0, height: float = 0, **texts: str) -> Shape:
    numbers = (x, y, width, height, x + width / 2)
    return Shape(*(f"{number:.1f}" for number in numbers), **texts)


def _length(span: Span, until: datetime) -> str:
    length = duration((span.end or until) - span.start)
    return length if span.end else _("%(length)s so far") % {"length": length}


def _named(span: Span) -> str:
    return _("Tool %(name)s") % {"name": span.what} if span.lane == spans.TOOLS else span.what


def _words(span: Span, until: datetime) -> str:
    words = [_named(span), _length(span, until), span.outcome]
    return " · ".join(filter(None, words)) + " " + _("(row %(seq)s)") % {"seq": span.seq}


def _lines(history: spans.History, until: datetime, url: Callable[[int], str]) -> list[Line]:
    found = [
        (span.start, span.seq, _length(span, until), _named(span), span.outcome) for span in history.spans
    ]
    found += [(mark.at, mark.seq, "", mark.what, "") for mark in history.marks]
    return [
        Line(stamp(start), length, what, outcome, str(seq), url(seq))
        for start, seq, length, what, outcome in sorted(found)
    ]


def _summary(history: spans.History, until: datetime) -> str:
    """Return in one sentence where the time went."""
    starts = [span.start for span in history.spans] + [mark.at for mark in history.marks]
    parts = []
    for lane, label in LANES.items():
        if found := [(span.start, span.end or until) for span in history.spans if span.lane == lane]:
            parts.append(_("%(lane)s: %(length)s") % {"lane": label, "length": duration(_covered(found))})
    bad = [mark.what for mark in history.marks if mark.tone == "bad"]
    text = _("%(length)s in all.") % {"length": duration(max(until - min(starts), timedelta()))}
    text += (" " + "; ".join(parts) + ".") if parts else ""
    return text + ((" " + "; ".join(dict.fromkeys(bad)) + ".") if bad else "")


def _covered(stretches: list[tuple[datetime, datetime]]) -> timedelta:
    """Return how long at least one of the stretches lasted."""
    total, reached = timedelta(), min(start for start, _end in stretches)
    for start, end in sorted(stretches):
        total += max(end - max(start, reached), timedelta())
        reached = max(reached, end)
    return total


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
