"""View of plans: the reader of their runs, and their lines of an answer."""

from __future__ import annotations

from tuner.answer.answer import Answer
from tuner.answer.views import View
from tuner.planner.plan import plan_result, read_plan
from tuner.planner.plan_run import probes_of_plan
from tuner.planner.text import doubt_lines, plan_lines, probe_lines
from tuner.problem.run_folder import RunFolder
from tuner.study.load import load_spec


class PlanView(View):
    """View of plans, which also reads their runs."""

    PROTOCOL = 1
    first_probes = staticmethod(probes_of_plan)

    def answer_of(self, run: RunFolder) -> Answer:
        """Return the answer of a plan's run."""
        return plan_result(load_spec(run, ()), read_plan(run.path))

    def opening_lines(self, answer: Answer) -> list[str]:
        """Return the doubts of a plan."""
        return doubt_lines(answer.plan.doubts if answer.plan else ())

    def answer_lines(self, answer: Answer) -> list[str]:
        """Return the sizes and the assumptions of a plan."""
        return plan_lines(answer)

    def summary_lines(self, answer: Answer) -> list[str]:
        """Return the lines of the answer, and the probes that would test the plan."""
        return [*plan_lines(answer), *probe_lines(answer)]


VIEW = PlanView()
