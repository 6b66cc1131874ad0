"""What the base install carries, and a Python in which nothing else can be imported.

`python -c PRELUDE…` blocks every installed top-level module that is not part of this repository, of the standard
library, or of the distributions that `[project].dependencies` brings. So a developer's environment, with torch
and Ray in it, stands in for a machine that has neither.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import PACKAGES, ROOT

ALWAYS_BLOCKED = ("torch", "ray", "transformers", "vllm", "sglang")

BLOCKER = """
import sys
class Blocker:
    blocked = frozenset({blocked!r})
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{{name}} is not part of the base install", name=name)
sys.meta_path.insert(0, Blocker())
"""


def prelude() -> str:
    """Code that, run first, makes every module outside the base install unimportable."""
    return BLOCKER.format(blocked=sorted({*ALWAYS_BLOCKED, *_modules_of_others()}))


def base_distributions() -> frozenset[str]:
    """Canonical names of the project's dependencies and of theirs, as far as this platform wants them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: set[str] = set()
    queue = [Requirement(text) for text in project["dependencies"]]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        try:
            texts = requires(requirement.name) or []
        except PackageNotFoundError:
            continue  # another platform's
        extras = requirement.extras or {""}
        theirs = [Requirement(text) for text in texts]
        queue += [
            each
            for each in theirs
            if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return frozenset(found)


def _modules_of_others() -> set[str]:
    base = base_distributions()
    return {
        module
        for module, owners in packages_distributions().items()
        if module not in PACKAGES and not any(canonicalize_name(owner) in base for owner in owners)
    }
