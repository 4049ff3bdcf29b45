"""Modules of each optional dependency, and the error if one is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from replaydb.errors import NotSupportedError

#: Modules that each extra installs, in the order in which a missing one is named.
MODULES = {
    "analysis": ("pyarrow",),
    "obstore": ("obstore",),
    "prometheus": ("prometheus_client",),
    "report": ("pyarrow", "plotly"),
    "ui": ("starlette", "uvicorn", "jinja2", "plotly", "pyarrow", "rapidfuzz"),
    "zstd": ("zstandard",),
}


def need(extra: str, what: str) -> None:
    """Check that an extra is installed.

    Args:
        extra: Name of the extra.
        what: The feature that needs it, in the singular, for the error.

    Raises:
        NotSupportedError: It is not installed. The message has the command that installs it.
    """
    for module in MODULES[extra]:
        if find_spec(module) is None:
            raise NotSupportedError(
                f"{what} needs the package {module}, which is not installed:"
                f" pip install 'replaydb[{extra}]'"
            )
