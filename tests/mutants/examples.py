"""Hypothesis profile with deterministic examples and without shrinking."""

from __future__ import annotations

from hypothesis import Phase, settings

PROFILE = "mutants"
settings.register_profile(
    PROFILE, derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
)
