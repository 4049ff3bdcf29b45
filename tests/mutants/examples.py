"""A profile of Hypothesis: the same examples every time, and failures are not made smaller."""

from __future__ import annotations

from hypothesis import Phase, settings

PROFILE = "mutants"
settings.register_profile(
    PROFILE, derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
)
