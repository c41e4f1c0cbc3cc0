"""The price of encoding: what training loses for each second that one thread of the saver encodes.

Two things are measured. Encoding waits for a core where training, data loaders or other jobs keep all of them busy;
then each second of a core is taken from one of these. And the trainer measures what its steps lose during each save.
Saves that were encoded lose more than plain ones where encoding competes with training, for cores or for memory, and
the difference is the price. Where no steps are seen, and a core is free, the price is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST_WEIGHS = 0.5
FORGOTTEN_AFTER = 32
"""After so many saves without encoding, what it cost is forgotten: one save tries it again."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What the chunks of one save took."""

    raw_bytes: int
    """Size of the whole save, unchanged chunks included."""
    wall_s: float
    """Time of all threads to encode and hash."""
    core_s: float
    """Processor time within wall_s."""
    is_plain: bool
    """The fastest codings were used."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """Per raw byte: what training lost, and seconds of encoding."""

    lost_s: float
    encoding_s: float

    def then(self, new: _Loss) -> _Loss:
        """Smoothed with a newer one."""
        return _Loss(_smooth(self.lost_s, new.lost_s), _smooth(self.encoding_s, new.encoding_s))


_NOTHING = _Loss(0.0, 0.0)


class Price:
    """Learns from one save after the other. For one thread at a time."""

    def __init__(self) -> None:
        self._losses: dict[bool, _Loss] = {}
        """The losses of plain saves, and of others."""
        self._has_core = 1.0
        """Share of the time that a thread which encodes has a core."""
        self._plain_saves = 0

    def learn(self, effort: Effort, lost_s: float | None) -> None:
        """Add a save that is uploaded. lost_s: what training lost meanwhile; None if that was not measured."""
        if effort.wall_s > 0:
            self._has_core = _smooth(self._has_core, min(1.0, effort.core_s / effort.wall_s))
        self._plain_saves = self._plain_saves + 1 if effort.is_plain else 0
        if self._plain_saves >= FORGOTTEN_AFTER:
            self._losses.pop(False, None)
        if lost_s is not None and effort.raw_bytes:
            new = _Loss(lost_s / effort.raw_bytes, effort.wall_s / effort.raw_bytes)
            self._losses[effort.is_plain] = self._losses.get(effort.is_plain, new).then(new)

    @property
    def per_second(self) -> float:
        """Seconds that training loses for each second that one thread encodes."""
        # It takes a core from others for as much of its time with a core as it waits for one itself.
        contended = self._has_core * (1.0 - self._has_core)
        encoded, plain = self._losses.get(False), self._losses.get(True, _NOTHING)
        if encoded is None or encoded.encoding_s <= plain.encoding_s:
            return contended
        return max(contended, (encoded.lost_s - plain.lost_s) / (encoded.encoding_s - plain.encoding_s))


def _smooth(old: float, new: float) -> float:
    return (1 - _NEWEST_WEIGHS) * old + _NEWEST_WEIGHS * new
