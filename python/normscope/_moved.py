# SPDX-License-Identifier: Apache-2.0
"""Names and modules of version 0.2.0 that are elsewhere now. They work in this version only.

A pickled model, as ``torch.save(model)`` writes it, contains the names of its classes' modules.
Models that version 0.2.0 has saved are therefore loaded through the modules listed here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

# Where each name of normscope is now.
_NAMES = {
    "CommunicationCounters": "training.CommunicationCounters",
    "Costs": "costs.Costs",
    "Prediction": "costs.Prediction",
    "communication_counters": "training.communication_counters",
    "detect_non_finite": "training.detect_non_finite",
    "empty_batch_like": "training.empty_batch_like",
    "exact_graphs": "training.exact_graphs",
    "measure_costs": "costs.measure",
    "predict": "costs.predict",
}

# What replaces names that are gone.
_REPLACEMENTS = {
    "AdaptiveScope": "recommend_scopes, set_scope or ProgressiveScope",
    "fuse": "convert(model, fuse=True), BatchNormAct2d or torch.compile",
}

# Where each module of normscope is now.
_MODULES = {
    "_timm": "models.timm",
    "accumulation": "training.accumulation",
    "activated": "layers.activated",
    "checkpoint": "training.checkpoint",
    "conversion": "models.conversion",
    "counters": "training.counters",
    "deployment": "models.deployment",
    "faults": "training.faults",
    "flops": "models.flops",
    "graphs": "training.modes",
    "lazy": "layers.lazy",
    "lightning": "models.lightning",
    "modules": "layers.batch_norm",
    "non_finite": "training.modes",
    "recommendation": "scopes.recommendation",
    "registry": "models.registry",
    "running_stats": "training.running_stats",
    "schedule": "scopes.schedule",
    "scope": "layers.scope",
    "scope_plan": "scopes.plan",
    "sync": "models.sync",
    "uneven": "training.uneven",
}


class _MovedModules(MetaPathFinder, Loader):
    """Imports a module that has moved under the name that it had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find modules that have moved."""
        package, _, name = fullname.partition(".")
        has_moved = package == __package__ and name in _MODULES
        return spec_from_loader(fullname, self) if has_moved else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that has moved in the place of the new, empty one."""
        name = module.__name__.partition(".")[2]
        sys.modules[module.__name__] = import_module(f"{__package__}.{_MODULES[name]}")


sys.meta_path.append(_MovedModules())


def moved(name: str) -> object:
    """Return the object or the module that had the name in normscope.

    Raises:
        AttributeError: If there was none.
    """
    if name in _MODULES:
        return import_module(f"{__package__}.{_MODULES[name]}")
    if name not in _NAMES:
        replacement = _REPLACEMENTS.get(name)
        advice = f" after version 0.2.0; use {replacement}" if replacement else ""
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}{advice}")
    module, _, attribute = _NAMES[name].rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), attribute)
