"""Window of one live setting, measured again if its figures differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.workload.node.measure.agreement import LONGER, AgreedWindow, Agreement
from tuner.workload.node.measure.statistics import Reached, Window
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.node.meters import Meter
from tuner.workload.node.meters.timeline import Timeline
from tuner.workload.records.probe import WindowPolicy


@dataclass(frozen=True)
class SettingWindow:
    """A measurement of the setting that is in force.

    Attributes:
        competitors: configurations by which a window may be beaten, and then ends early.
    """

    conductor: Conductor
    meter: Meter
    timeline: Timeline
    competitors: Sequence[Reached] = ()

    def agreed(
        self,
        agreement: Agreement,
        policy: WindowPolicy,
        step_time_s: float,
        *,
        left_s: float,
        keep: Callable[[AgreedWindow], None],
    ) -> AgreedWindow:
        """Measure a window, once more if its figures differ and there is time; return it.

        `left_s` is the time that the probe has left; a window whose repetition fails goes to
        `keep`.
        """
        window = self._measure(policy, step_time_s)
        if not self.meter.info.independent:
            return AgreedWindow(window)

        def again(longer: WindowPolicy) -> Window:
            try:
                return self._measure(longer, step_time_s)
            except ProbeFailed:
                keep(AgreedWindow(window))
                raise

        in_time = left_s - window.length_s > 1.5 * LONGER * window.length_s
        return agreement.settle(window, policy, again if in_time else None)

    def _measure(self, policy: WindowPolicy, step_time_s: float) -> Window:
        return self.conductor.measure(
            self.meter,
            policy,
            step_time_s,
            samples=lambda: self.timeline.samples,
            competitors=self.competitors,
        )
