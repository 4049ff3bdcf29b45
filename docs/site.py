"""What the site has beside `docs/`: the README as its front page, and the reference.

Hooks of MkDocs. The reference is of what is public: a page for each module in `MODULES`; what of it
has no docstring stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).resolve().parents[1]
INTEGRATIONS = sorted(
    f"replaydb.integrations.{path.stem}"
    for path in (CHECKOUT / "src/replaydb/integrations").iterdir()
    if not path.stem.startswith("_")
)
MODULES = (
    "replaydb",
    "replaydb.blocking",
    "replaydb.analysis",
    "replaydb.analysis.report",
    "replaydb.exchange",
    "replaydb.operations",
    "replaydb.training",
    *INTEGRATIONS,
)

#: [text](target), but not in code; a target with a scheme is left alone.
_LINK = re.compile(r"(?<!`)\[(?P<text>[^\]]+)\]\((?P<target>[^):#\s]+)(?P<anchor>#[\w-]+)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the reference to the navigation, and hold that all of it is documented."""
    reference = {"Reference": [{name: _page(name)} for name in MODULES]}
    config.nav = [*(config.nav or ()), reference]
    package = griffe.load("replaydb", search_paths=[str(CHECKOUT / "src")])
    if bare := [name for module in MODULES for name in _undocumented(package, module)]:
        raise PluginError(f"public, and without a docstring: {', '.join(bare)}")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are in no file of `docs/`."""
    for page, text in {
        "index.md": (CHECKOUT / "README.md").read_text(encoding="utf8"),
        **{_page(name): f"# {name}\n\n::: {name}\n" for name in MODULES},
    }.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository that are no pages into their names."""
    here = CHECKOUT if page.file.src_uri == "index.md" else Path(config.docs_dir, page.file.src_uri)
    folder = here if here.is_dir() else here.parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match["target"]).resolve()
        if target.is_relative_to(config.docs_dir) and target.is_file():
            uri = target.relative_to(config.docs_dir).as_posix()
            depth = page.file.src_uri.count("/")
            return f"[{match['text']}]({'../' * depth}{uri}{match['anchor'] or ''})"
        return match["text"]

    # Tests run such blocks; to the site they are Python.
    return _LINK.sub(link, markdown).replace("```python run", "```python")


def _page(module: str) -> str:
    return f"reference/{module}.md"


def _undocumented(package: Any, module: str) -> list[str]:
    inner = module.removeprefix("replaydb").lstrip(".")
    found = package[inner] if inner else package
    names = [one for one in found.members.values() if one.is_public and not one.is_module]
    things = [thing for one in names for thing in (one, *_methods(one))]
    return [thing.path for thing in (found, *things) if _is_bare(thing)]


def _methods(thing: Any) -> list[Any]:
    return [one for one in thing.all_members.values() if one.is_public] if thing.is_class else []


def _is_bare(thing: Any) -> bool:
    plain = thing.is_attribute and "property" not in thing.labels  # its class describes it
    return not (plain or thing.is_special or thing.has_docstring)
